//! Leaving a group together. Most calls that differ are found while they run; a root that reads from nobody, or a message
//! that nobody receives, may be over before. So the last thing that the ranks of a group do is to hold against each other
//! what they called: one small all_reduce, and where its sum is wrong, an all_gather that tells why.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use smddp_plan::{Collective, Counts};
use smddp_transport::fork::PerProcess;
use smddp_transport::{CallFingerprint, Group, Mismatch};

use super::Communicator;
use crate::call::fingerprint::{self, mix};
use crate::call::types::{DType, RedOp};
use crate::call::{Blocks, Call};
use crate::engine::Engine;
use crate::engine::shared::SharedState;
use crate::error::{Error, Result};
use crate::failure::call_log::MAX_RECORDED;
use crate::failure::error_text;
use crate::log::{self, Level};
use crate::sync::completion::Completion;
use crate::sync::lock;

/// Groups with more ranks are told that messages are left over, not whose.
const LISTED: usize = 1024;
/// Leftovers that an error lists.
const SHOWN: usize = 8;

/// Words of a rank's whole story: number of calls, newest headers, messages.
fn story(engine: &Engine, size: usize) -> Vec<u64> {
    let call_log = &engine.call_log;
    let mut words = vec![call_log.calls];
    words.extend(call_log.latest.iter().flat_map(|fingerprint| [fingerprint.what, fingerprint.count]));
    words.resize(1 + 2 * MAX_RECORDED, 0);
    if size <= LISTED {
        words.extend(
            engine
                .messages
                .message_log
                .counts
                .iter()
                .map(|&(sent, asked)| u64::from(sent) << 32 | u64::from(asked)),
        );
    }
    words
}

/// What is wrong, from the stories of all ranks; nothing where some only asked for messages that nobody sent: such a recv
/// ends with the group, and says so itself.
fn verdict(group: &Group, name: &str, stories: &[u64], size: usize) -> Option<Error> {
    let each = stories.len() / size;
    let story = |rank: usize| &stories[rank * each..(rank + 1) * each];
    let me = group.rank();
    let calls = story(me)[0];
    let first = calls.saturating_sub(MAX_RECORDED as u64);
    for (index, seq) in (first..calls).enumerate() {
        let fingerprint = |rank: usize| CallFingerprint {
            what: story(rank)[1 + 2 * index],
            count: story(rank)[2 + 2 * index],
        };
        let mine = fingerprint(me);
        if let Some(rank) = (0..size).find(|&rank| fingerprint(rank) != mine) {
            let collective = fingerprint::collective(mine).unwrap_or(Collective::Barrier);
            let found = Mismatch { rank, theirs: fingerprint(rank), bytes: None };
            return Some(error_text::mismatch(group, name, collective, seq, mine, found));
        }
    }
    let told = |rank: usize, peer: usize| story(rank).get(1 + 2 * MAX_RECORDED + peer).copied().unwrap_or(0);
    let pairs = (0..size).flat_map(|from| (0..size).map(move |to| (from, to)));
    let pairs = pairs.map(|(from, to)| (from, to, told(from, to) >> 32, told(to, from) & 0xffff_ffff));
    let (mut left, mut unanswered) = (Vec::new(), false);
    for pair @ (_, _, sent, asked) in pairs {
        unanswered |= sent < asked;
        if sent > asked {
            left.push(pair);
        }
    }
    if left.is_empty() && unanswered {
        return None;
    }
    let describe = |&(from, to, sent, asked): &(usize, usize, u64, u64)| {
        let (from, to) = (group.describe(from), group.describe(to));
        format!("{from} sent {sent} message(s) to {to}, which asked for {asked}")
    };
    let mut detail = left.iter().take(SHOWN).map(describe).collect::<Vec<_>>().join("; ");
    if left.is_empty() {
        detail = format!(
            "the ranks made different calls before the last {MAX_RECORDED}, or not all messages were received"
        );
    } else if left.len() > SHOWN {
        detail += &format!("; and {} more pairs", left.len() - SHOWN);
    }
    let rank = left.iter().flat_map(|&(from, to, ..)| [from, to]).find(|&rank| rank != me).unwrap_or(me);
    detail += "; every send needs its recv";
    Some(Error::Mismatch { what: "destroy_process_group".to_owned(), group: name.to_owned(), rank, detail })
}

/// A step of leaving together: what each rank gives, and whether the ranks' words are added up or set in a row.
struct Step {
    work: Arc<Completion>,
    taken: Words,
}

/// Memory that a call writes while it is under way.
type Words = Arc<[AtomicU64]>;

fn address(words: &Words) -> *mut u8 {
    words.as_ptr().cast_mut().cast()
}

impl Step {
    fn taken(&self) -> Vec<u64> {
        self.taken.iter().map(|word| word.load(Ordering::Relaxed)).collect()
    }
}

impl SharedState {
    /// Deletes the record of this rank's claim. Called before the ranks leave together: afterwards the process that serves the store
    /// may end.
    ///
    /// # Errors
    /// [`Error::Interrupted`]. Any other error of the store is logged: the record does no harm.
    pub(super) fn delete_claim(&self) -> Result<()> {
        let deletion = lock(&self.claim).as_mut().and_then(|(_, deletion)| deletion.take());
        if let Some(Err(error)) = deletion.map(|delete| delete()) {
            if error == Error::Interrupted {
                return Err(error);
            }
            let (rank, name) = (self.rank, &self.name);
            log::say(
                Level::Trace,
                &format!("group `{name}`: the claim of rank {rank} stays in the store: {error}"),
            );
        }
        Ok(())
    }

    /// Puts a call behind all others by which this rank leaves; `None` where somebody else waits in this group for a
    /// call that its end is to end.
    fn leaving_step(
        self: &Arc<Self>,
        collective: Collective,
        give: impl Fn(&Engine) -> Vec<u64>,
    ) -> Result<Option<Step>> {
        let Some(mut engine) = self.try_own_for() else { return Ok(None) };
        self.take_commands(&mut engine);
        let given: Words = give(&engine).into_iter().map(AtomicU64::new).collect();
        let count = given.len();
        let (counts, room) = match collective {
            Collective::AllReduce => (Counts::Whole(count), count),
            _ => (Counts::Even(count), count * self.size),
        };
        let taken: Words = (0..room).map(|_| AtomicU64::new(0)).collect();
        let call = Call {
            collective,
            dtype: DType::U64,
            redop: RedOp::Sum,
            root: 0,
            input: Blocks::Flat { ptr: address(&given), count },
            output: Blocks::Flat { ptr: address(&taken), count: room },
        };
        let mut op = self.prepare(engine.spare.take(), &call, counts, Duration::MAX, None)?;
        let mut bound = (*op.bound).clone();
        bound.fingerprint = fingerprint::leaving(bound.fingerprint);
        bound.wired = bound.wired.unannounced();
        op.bound = Arc::new(bound);
        let work = Arc::new(Completion::new(Some(Box::new((given, taken.clone())))));
        op.work = Some(work.clone());
        engine.enqueue(op);
        self.release(engine);
        Ok(Some(Step { work, taken }))
    }

    /// Holds against each other what the ranks called: `Mismatch` where they did not do the same. `wait` waits for a step,
    /// as long as there is time; a rank that is gone, or late, cannot be held against, which is no error.
    /// Whether all messages were sent and asked for: those under way are then sure to arrive.
    pub(crate) fn compare(self: &Arc<Self>, wait: impl Fn(&Completion) -> Result<()>) -> Result<bool> {
        let own = std::cell::Cell::new(0);
        let first = self.leaving_step(Collective::AllReduce, |engine| {
            own.set(mix(engine.call_log.digest ^ mix(engine.call_log.calls)));
            vec![own.get(), engine.messages.message_log.balance]
        })?;
        let Some(step) = first else { return Ok(false) };
        wait(&step.work)?;
        let sums = step.taken();
        // Sums of words that look like chance: of different ones it is this by chance only.
        if sums == [own.get().wrapping_mul(self.size as u64), 0] {
            return Ok(true);
        }
        // All ranks have come to this.
        let Some(step) = self.leaving_step(Collective::AllGather, |engine| story(engine, self.size))? else {
            return Ok(false);
        };
        wait(&step.work)?;
        let Some(mut engine) = self.try_own_for() else { return Ok(false) };
        let Some(error) = verdict(&engine.group, &self.name, &step.taken(), self.size) else {
            return Ok(false);
        };
        self.fail_group(&mut engine, error.clone());
        Err(error)
    }

    /// Nothing that is still under way has to be compared any more.
    pub(crate) fn cancel_leaving(&self) {
        if let Some(mut engine) = self.try_own_for() {
            engine.end_leaving("its time to leave was over");
        }
    }
}

/// Threads that close groups.
static CLOSING: PerProcess<Mutex<Vec<JoinHandle<()>>>> = PerProcess::new();

impl Communicator {
    /// As [`Communicator::close`], for a caller that continues in another group at once. Between nodes the delivery of a dead group's
    /// reason may take up to two seconds, so a separate thread waits for it. This call waits for operations on devices.
    pub fn close_in_background(&self) {
        if self.error().is_none() || !lock(&self.0.handles).is_empty() {
            return self.close();
        }
        let dead = self.clone();
        let begun = std::thread::Builder::new().name("smddp-leave".to_owned()).spawn(move || dead.close());
        let Ok(thread) = begun else { return self.close() };
        let mut closing = lock(CLOSING.get());
        closing.retain(|thread| !thread.is_finished());
        closing.push(thread);
    }
}

/// Waits until those threads are done.
pub(super) fn join_closing_threads() {
    let closing = std::mem::take(&mut *lock(CLOSING.get()));
    closing.into_iter().for_each(|thread| drop(thread.join()));
}
