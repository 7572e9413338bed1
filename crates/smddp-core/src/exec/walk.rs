//! A bound program is followed, one lane after the other, until every lane is done or blocked.
//!
//! What a step waits for, and that nothing moves before all of it is there, is decided here, for any kind of memory. How bytes
//! move is a [`Mover`]'s: the host moves them itself, for a device they are enqueued.

use smddp_plan::Buffer;
use smddp_transport::{Group, Mismatch};

use crate::bind::{Act, Bound, Incoming, Reduce, Run};
use crate::call::types::DType;

/// An operation under way: buffers, and how far each lane is. Buffers are addresses here; they are valid until the operation
/// is over, which is the promise of whoever started it (see `Communicator::start`).
#[derive(Default)]
pub(crate) struct Execution {
    pub(crate) dtype: DType,
    /// What a finishing reduction divides by.
    pub(crate) scale: Option<u32>,
    /// Address of each flat buffer; 0 where `lists` has the blocks' addresses.
    pub(crate) bases: [usize; 3],
    pub(crate) lists: [Option<Vec<usize>>; 2],
    /// Until the operation begins.
    pub(crate) input_copy: Option<InputCopy>,
    /// In and Out overlap. Known where that matters, see `bind::Direct`.
    pub(crate) in_place: bool,
    /// Outputs go past the caches.
    pub(crate) stream: bool,
    pub(crate) lanes: Vec<Cursor>,
}

impl Execution {
    pub(crate) fn address(&self, bound: &Bound, buffer: Buffer, block: usize, segment: usize) -> usize {
        let table = buffer as usize;
        let offset = match self.lists.get(table) {
            Some(Some(list)) => list[block],
            _ => bound.offsets[table][block],
        };
        self.bases[table] + offset + segment * bound.choice.segment
    }
}

impl Execution {
    /// Whether memory of Out is memory of In, too.
    pub(crate) fn overlaps(&self, bound: &Bound) -> bool {
        let [input, output] = [Buffer::In, Buffer::Out].map(|buffer| {
            let blocks = 0..bound.lengths[buffer as usize].len();
            let ends = blocks.map(|block| {
                let at = self.address(bound, buffer, block, 0);
                (at, at + bound.length(buffer, block))
            });
            let some = ends.filter(|(at, end)| at < end);
            some.fold((usize::MAX, 0), |(low, high), (at, end)| (low.min(at), high.max(end)))
        });
        input.0 < output.1 && output.0 < input.1
    }
}

/// A copy of the input, into memory of the operation's own, that precedes everything else: the input overlaps the output, or each
/// element is multiplied by a factor first.
pub(crate) struct InputCopy {
    /// Address and bytes of the caller's blocks, which lie one behind the other in the copy.
    pub(crate) pieces: Vec<(usize, usize)>,
    pub(crate) factor: Option<f64>,
}

/// Where a lane stands.
#[derive(Clone, Copy, Default)]
pub(crate) struct Cursor {
    turn: usize,
    index: usize,
}

/// What going on came to.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    Done,
    /// Something moved, more is to come.
    Moved,
    Blocked,
}

impl Progress {
    pub(crate) fn moved(moved: bool) -> Self {
        if moved { Self::Moved } else { Self::Blocked }
    }
}

/// What becomes of asking a mover.
pub(crate) type Outcome<M, T = ()> = Result<T, <M as Mover>::Trouble>;

/// What moves the bytes of a step, once all that the step waits for is there.
pub(crate) trait Mover {
    type Trouble: From<Mismatch>;
    /// Room for the next message of a channel.
    type Room;

    fn execution(&mut self) -> &mut Execution;
    fn group(&mut self) -> &mut Group;
    /// For a message of one segment of `run`.
    fn room(&mut self, channel: usize, run: Run, segment: usize) -> Outcome<Self, Option<Self::Room>>;
    /// Sends one segment of `source`, and keeps it in `tee`.
    fn send(&mut self, to: Self::Room, source: Run, tee: Option<Run>, segment: usize) -> Outcome<Self>;
    /// Keeps the blocks that are taken of a message in `to`, and sends them on. False: it has to wait after all.
    fn receive(
        &mut self,
        from: (&Incoming, *const u8),
        to: Run,
        onward: Option<Self::Room>,
        segment: usize,
    ) -> Outcome<Self, bool>;
    /// `messages`: one for each source, null where it has none for this segment.
    fn reduce(
        &mut self,
        step: &Reduce,
        messages: &[*const u8],
        onward: Option<Self::Room>,
        segment: usize,
    ) -> Outcome<Self>;
    fn copy(&mut self, source: Run, to: Run, finish: bool, segment: usize) -> Outcome<Self>;
}

/// Advances all lanes until each is at its end or blocked. Returns whether all are at their ends, and whether a step was taken.
#[inline]
pub(crate) fn walk<M: Mover>(bound: &Bound, mover: &mut M) -> Outcome<M, (bool, bool)> {
    let (mut done, mut moved) = (true, false);
    for (lane, acts) in bound.lanes.iter().enumerate() {
        let mut at = mover.execution().lanes[lane];
        let walked = walk_lane(acts, bound.turns[lane], &mut at, mover);
        // Also after an error: a departing rank polls again after a mismatch, and must not repeat a step.
        mover.execution().lanes[lane] = at;
        moved |= walked?;
        done &= at.turn >= bound.turns[lane];
    }
    Ok((done, moved))
}

/// Advances one lane from `at`, which stays at the first step that did not complete. Returns whether a step was taken.
#[inline]
fn walk_lane<M: Mover>(
    acts: &[(usize, Act)],
    turns: usize,
    at: &mut Cursor,
    mover: &mut M,
) -> Outcome<M, bool> {
    let mut moved = false;
    while at.turn < turns {
        while at.index < acts.len() {
            let (lag, step) = &acts[at.index];
            if let Some(segment) = at.turn.checked_sub(*lag)
                && !act(mover, step, segment)?
            {
                return Ok(moved);
            }
            moved = true;
            at.index += 1;
        }
        at.index = 0;
        at.turn += 1;
    }
    Ok(moved)
}

/// One step on one segment; false where it has to wait. Whatever it needs is there before anything is moved.
fn act<M: Mover>(mover: &mut M, act: &Act, segment: usize) -> Outcome<M, bool> {
    match act {
        Act::Send { channel, source, tee } if segment < source.segments => {
            let Some(room) = mover.room(*channel, *source, segment)? else { return Ok(false) };
            mover.send(room, *source, *tee, segment)?;
        }
        Act::Receive { from, to, forward } if segment < from.message.segments => {
            let Some(message) = mover.group().message(from.recv_channel)? else { return Ok(false) };
            let Some(onward) = onward(mover, *forward, *to, segment)? else { return Ok(false) };
            if !mover.receive((from, message), *to, onward, segment)? {
                return Ok(false);
            }
            mover.group().release(from.recv_channel);
        }
        Act::Reduce(step) => {
            return with_room(step.from.len(), std::ptr::null(), |messages| {
                for (message, from) in messages.iter_mut().zip(&step.from) {
                    if segment < from.message.segments {
                        let Some(found) = mover.group().message(from.recv_channel)? else { return Ok(false) };
                        *message = found;
                    }
                }
                let Some(onward) = onward(mover, step.send, step.result, segment)? else { return Ok(false) };
                mover.reduce(step, messages, onward, segment)?;
                for from in step.from.iter().filter(|from| segment < from.message.segments) {
                    mover.group().release(from.recv_channel);
                }
                Ok(true)
            });
        }
        Act::Copy { source, to, finish } => mover.copy(*source, *to, *finish, segment)?,
        _ => {}
    }
    Ok(true)
}

/// Room where one segment of `run` is sent on to, if it is; `None`: not yet.
fn onward<M: Mover>(
    mover: &mut M,
    channel: Option<usize>,
    run: Run,
    segment: usize,
) -> Outcome<M, Option<Option<M::Room>>> {
    let Some(channel) = channel.filter(|_| segment < run.segments) else { return Ok(Some(None)) };
    Ok(mover.room(channel, run, segment)?.map(Some))
}

/// Sources of a reduction that need no allocation.
const FEW: usize = 17;

/// Room for so many values, for the time of a step.
#[inline]
pub(crate) fn with_room<T: Copy, R>(count: usize, blank: T, what: impl FnOnce(&mut [T]) -> R) -> R {
    if count <= FEW { what(&mut [blank; FEW][..count]) } else { what(&mut vec![blank; count]) }
}
