//! A bound program is followed, one lane after the other, until every lane is done or blocked.
//!
//! What a step waits for, and that nothing moves before all of it is there, is decided here, for any kind of memory. How bytes
//! move is a [`StepExecutor`]'s: the host moves them itself, for a device they are enqueued.

use smddp_plan::Buffer;
use smddp_transport::{Group, Mismatch};

use crate::bind::{BlockRun, BoundCall, BoundStep, IncomingMessage, Reduce};
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
    /// In and Out overlap. Known where that matters, see `bind::ZeroCopy`.
    pub(crate) in_place: bool,
    /// Outputs go past the caches.
    pub(crate) stream: bool,
    pub(crate) pipelines: Vec<PipelineCursor>,
}

impl Execution {
    pub(crate) fn address(&self, bound: &BoundCall, buffer: Buffer, block: usize, segment: usize) -> usize {
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
    pub(crate) fn overlaps(&self, bound: &BoundCall) -> bool {
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
pub(crate) struct PipelineCursor {
    iteration: usize,
    step_index: usize,
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
pub(crate) type StepResult<M, T = ()> = Result<T, <M as StepExecutor>::Error>;

/// What moves the bytes of a step, once all that the step waits for is there.
pub(crate) trait StepExecutor {
    type Error: From<Mismatch>;
    /// Room for the next message of a channel.
    type Slot;

    fn execution(&mut self) -> &mut Execution;
    fn group(&mut self) -> &mut Group;
    /// For a message of one segment of `run`.
    fn slot(&mut self, channel: usize, run: BlockRun, segment: usize)
    -> StepResult<Self, Option<Self::Slot>>;
    /// Sends one segment of `source`, and keeps it in `tee`.
    fn send(
        &mut self,
        to: Self::Slot,
        source: BlockRun,
        tee: Option<BlockRun>,
        segment: usize,
    ) -> StepResult<Self>;
    /// Keeps the blocks that are taken of a message in `to`, and sends them on. False: it has to wait after all.
    fn receive(
        &mut self,
        from: (&IncomingMessage, *const u8),
        to: BlockRun,
        forward_slot: Option<Self::Slot>,
        segment: usize,
    ) -> StepResult<Self, bool>;
    /// `messages`: one for each source, null where it has none for this segment.
    fn reduce(
        &mut self,
        step: &Reduce,
        messages: &[*const u8],
        forward_slot: Option<Self::Slot>,
        segment: usize,
    ) -> StepResult<Self>;
    fn copy(&mut self, source: BlockRun, to: BlockRun, finish: bool, segment: usize) -> StepResult<Self>;
}

/// Advances all lanes until each is at its end or blocked. Returns whether all are at their ends, and whether a step was taken.
#[inline]
pub(crate) fn walk<M: StepExecutor>(bound: &BoundCall, executor: &mut M) -> StepResult<M, (bool, bool)> {
    let (mut done, mut moved) = (true, false);
    for (pipeline, steps) in bound.pipelines.iter().enumerate() {
        let mut at = executor.execution().pipelines[pipeline];
        let walked = walk_lane(steps, bound.iterations[pipeline], &mut at, executor);
        // Also after an error: a departing rank polls again after a mismatch, and must not repeat a step.
        executor.execution().pipelines[pipeline] = at;
        moved |= walked?;
        done &= at.iteration >= bound.iterations[pipeline];
    }
    Ok((done, moved))
}

/// Advances one lane from `at`, which stays at the first step that did not complete. Returns whether a step was taken.
#[inline]
fn walk_lane<M: StepExecutor>(
    steps: &[(usize, BoundStep)],
    iterations: usize,
    at: &mut PipelineCursor,
    executor: &mut M,
) -> StepResult<M, bool> {
    let mut moved = false;
    while at.iteration < iterations {
        while at.step_index < steps.len() {
            let (lag, step) = &steps[at.step_index];
            if let Some(segment) = at.iteration.checked_sub(*lag)
                && !run_step(executor, step, segment)?
            {
                return Ok(moved);
            }
            moved = true;
            at.step_index += 1;
        }
        at.step_index = 0;
        at.iteration += 1;
    }
    Ok(moved)
}

/// One step on one segment; false where it has to wait. Whatever it needs is there before anything is moved.
fn run_step<M: StepExecutor>(executor: &mut M, step: &BoundStep, segment: usize) -> StepResult<M, bool> {
    match step {
        BoundStep::Send { channel, source, tee } if segment < source.segments => {
            let Some(slot) = executor.slot(*channel, *source, segment)? else { return Ok(false) };
            executor.send(slot, *source, *tee, segment)?;
        }
        BoundStep::Receive { from, to, forward } if segment < from.message.segments => {
            let Some(message) = executor.group().message(from.recv_channel)? else { return Ok(false) };
            let Some(forward_slot) = forward_slot(executor, *forward, *to, segment)? else {
                return Ok(false);
            };
            if !executor.receive((from, message), *to, forward_slot, segment)? {
                return Ok(false);
            }
            executor.group().release(from.recv_channel);
        }
        BoundStep::Reduce(step) => {
            return with_buffer(step.from.len(), std::ptr::null(), |messages| {
                for (message, from) in messages.iter_mut().zip(&step.from) {
                    if segment < from.message.segments {
                        let Some(found) = executor.group().message(from.recv_channel)? else {
                            return Ok(false);
                        };
                        *message = found;
                    }
                }
                let Some(forward_slot) = forward_slot(executor, step.send, step.result, segment)? else {
                    return Ok(false);
                };
                executor.reduce(step, messages, forward_slot, segment)?;
                for from in step.from.iter().filter(|from| segment < from.message.segments) {
                    executor.group().release(from.recv_channel);
                }
                Ok(true)
            });
        }
        BoundStep::Copy { source, to, finish } => executor.copy(*source, *to, *finish, segment)?,
        _ => {}
    }
    Ok(true)
}

/// Room where one segment of `run` is sent on to, if it is; `None`: not yet.
fn forward_slot<M: StepExecutor>(
    executor: &mut M,
    channel: Option<usize>,
    run: BlockRun,
    segment: usize,
) -> StepResult<M, Option<Option<M::Slot>>> {
    let Some(channel) = channel.filter(|_| segment < run.segments) else { return Ok(Some(None)) };
    Ok(executor.slot(channel, run, segment)?.map(Some))
}

/// Sources of a reduction that need no allocation.
const INLINE_SOURCES: usize = 17;

/// Room for so many values, for the time of a step.
#[inline]
pub(crate) fn with_buffer<T: Copy, R>(count: usize, blank: T, body: impl FnOnce(&mut [T]) -> R) -> R {
    if count <= INLINE_SOURCES {
        body(&mut [blank; INLINE_SOURCES][..count])
    } else {
        body(&mut vec![blank; count])
    }
}
