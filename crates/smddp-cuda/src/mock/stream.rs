//! A stream: a thread that does one operation after the other.

use std::sync::Arc;
use std::sync::MutexGuard;
use std::time::Duration;

use super::clock::Clock;
use super::random::Random;
use super::reduce;
use super::report::Operation;
use super::shadow::Touch;
use super::space::{Piece, gather, scatter};
use super::state::{Folding, Op, State};
use super::world::Shared;

/// How often a stream that waits looks for a word that was written past the checker.
const LOOK: Duration = Duration::from_millis(2);

/// A pause between the parts of an operation.
#[derive(Clone, Copy)]
struct Pause {
    yields: u64,
    sleep: Duration,
}

impl Pause {
    fn drawn(random: &mut Random, delay: Duration) -> Self {
        match random.below(8) {
            0..4 => Self { yields: 0, sleep: Duration::ZERO },
            4..7 => Self { yields: random.below(4), sleep: Duration::ZERO },
            _ => {
                let most = u64::try_from(delay.as_nanos()).unwrap_or(u64::MAX).saturating_add(1);
                Self { yields: 0, sleep: Duration::from_nanos(random.below(most)) }
            }
        }
    }

    fn take(self) {
        (0..self.yields).for_each(|_| std::thread::yield_now());
        if !self.sleep.is_zero() {
            std::thread::sleep(self.sleep);
        }
    }
}

/// Lets a host thread be interrupted where it calls the device.
pub(super) fn shake(shared: &Shared, process: usize) {
    let pause = {
        let mut state = shared.lock();
        let delay = state.script.delay;
        Pause::drawn(&mut state.processes[process].random, delay)
    };
    pause.take();
}

/// What the thread of stream `id` does.
pub(super) fn run(shared: &Shared, id: u64) {
    let mut state = shared.lock();
    loop {
        if state.ended {
            return;
        }
        let Some(stream) = state.streams.get(&id) else { return };
        let wake = stream.wake.clone();
        if stream.queue.is_empty() {
            if stream.closing {
                if let Some(stream) = state.streams.remove(&id) {
                    state.departed.join_seen(&stream.clock);
                }
                shared.progress.notify_all();
                return;
            }
            state = shared.wait(&wake, state);
        } else if !state.can_go(id) {
            state = shared.wait_for(&wake, state, LOOK);
        } else {
            let pause = state.pause(id);
            drop(state);
            pause.take();
            state = execute(shared, shared.lock(), id);
            shared.progress.notify_all();
        }
    }
}

impl State {
    fn pause(&mut self, id: u64) -> Pause {
        let delay = self.script.delay;
        match self.streams.get_mut(&id) {
            Some(stream) => Pause::drawn(&mut stream.random, delay),
            None => Pause { yields: 0, sleep: Duration::ZERO },
        }
    }
}

/// Does what is first on the stream, if it can still be done.
fn execute<'a>(shared: &'a Shared, mut state: MutexGuard<'a, State>, id: u64) -> MutexGuard<'a, State> {
    if state.ended || !state.can_go(id) {
        return state;
    }
    let Some(stream) = state.streams.get_mut(&id) else { return state };
    let Some(queued) = stream.queue.pop_front() else { return state };
    stream.executing = true;
    let actor = stream.actor;
    let mut clock = std::mem::take(&mut stream.clock);
    clock.join(&queued.order);
    clock.tick(actor);
    let operation = &queued.operation;
    match queued.op {
        Op::Copy(copies) => state = copy(shared, state, id, copies, (actor, &clock), operation),
        Op::Reduce { what, sources, to } => {
            state.reduce(what, &sources, &to, (actor, &clock), operation);
        }
        Op::WriteWord { word, value } => {
            if state.touch(&[word], Touch::AtomicWrite, (actor, &clock), operation) {
                state.write_word(&word, value, clock.clone());
            }
        }
        Op::WaitWord { word, value, id } => {
            let mut new = false;
            if state.touch(&[word], Touch::AtomicRead, (actor, &clock), operation)
                && let Some(allocation) = state.space.allocations.get_mut(&word.allocation)
                && let Some(Some(learned)) = allocation.word(word.offset).lets_through(value)
            {
                new = clock.join(&learned);
            }
            state.passed_wait(id, !new);
        }
        Op::Record(record) => {
            // Set once: each record has a cell of its own.
            let _ = record.set(clock.clone());
        }
        Op::WaitRecord { record, id } => {
            let new = record.get().is_some_and(|learned| clock.join(learned));
            state.passed_wait(id, !new);
        }
    }
    if let Some(stream) = state.streams.get_mut(&id) {
        stream.clock = clock;
        stream.done += 1;
        stream.executing = false;
    }
    state.wake_ready();
    state
}

/// Copies in any order, each in parts between which others go on.
fn copy<'a>(
    shared: &'a Shared,
    mut state: MutexGuard<'a, State>,
    id: u64,
    mut copies: Vec<(Vec<Piece>, Vec<Piece>)>,
    by: (usize, &Clock),
    operation: &Arc<Operation>,
) -> MutexGuard<'a, State> {
    let parts: Vec<(&[Piece], bool)> =
        copies.iter().flat_map(|(from, to)| [(&from[..], false), (&to[..], true)]).collect();
    state.overlaps(&parts, operation);
    copies.retain(|(from, to)| {
        // Both are checked, whatever the first comes to.
        let readable = state.touch(from, Touch::Read, by, operation);
        state.touch(to, Touch::Write, by, operation) && readable
    });
    while !copies.is_empty() {
        let (next, parts) = match state.streams.get_mut(&id) {
            Some(stream) => (stream.random.below(copies.len() as u64), 1 + stream.random.below(3)),
            None => (0, 1),
        };
        let (from, to) = copies.swap_remove(next as usize);
        let bytes: usize = from.iter().map(|piece| piece.bytes).sum();
        let part = bytes.div_ceil(parts as usize).max(1);
        for skip in (0..bytes).step_by(part) {
            if skip > 0 {
                let pause = state.pause(id);
                drop(state);
                pause.take();
                state = shared.lock();
            }
            // Freed in between: that was reported by who freed it.
            if from.iter().chain(&to).all(|piece| state.space.alive(piece)) {
                let mut data = vec![0; part.min(bytes - skip)];
                // SAFETY: all pieces are alive, and stay so under the lock.
                unsafe {
                    gather(&state.space, &from, skip, &mut data);
                    scatter(&state.space, &to, skip, &data);
                }
            }
        }
    }
    state
}

impl State {
    fn reduce(
        &mut self,
        what: Folding,
        sources: &[Vec<Piece>],
        to: &[Piece],
        by: (usize, &Clock),
        operation: &Arc<Operation>,
    ) {
        let mut distinct: Vec<(&[Piece], bool)> =
            sources.iter().filter(|source| source[..] != *to).map(|source| (&source[..], false)).collect();
        distinct.push((to, true));
        self.overlaps(&distinct, operation);
        let mut alive = true;
        for source in sources {
            alive &= self.touch(source, Touch::Read, by, operation);
        }
        alive &= self.touch(to, Touch::Write, by, operation);
        if !alive {
            return;
        }
        let bytes = to.iter().map(|piece| piece.bytes).sum();
        let sources: Vec<Vec<u8>> = sources
            .iter()
            .map(|source| {
                let mut data = vec![0; bytes];
                // SAFETY: all pieces are alive, and stay so under the lock.
                unsafe { gather(&self.space, source, 0, &mut data) };
                data
            })
            .collect();
        let sources: Vec<&[u8]> = sources.iter().map(Vec::as_slice).collect();
        // Refused when it was enqueued, if it can be refused.
        if let Ok(result) = reduce::reduce(what.element, what.fold, what.divide, what.times, &sources) {
            // SAFETY: as above.
            unsafe { scatter(&self.space, to, 0, &result) };
        }
    }

    fn passed_wait(&mut self, id: super::WaitId, redundant: bool) {
        if let Some(seen) = self.waits.get_mut(&id) {
            seen.redundant = Some(redundant);
        }
    }
}
