//! Execution of bound programs: each pipeline runs until it is done or has to wait.
//!
//! This module decides, for any kind of memory, what a step waits for: nothing is moved before all of it is
//! available. A [`StepExecutor`] moves the bytes: with the processor for host memory, or with enqueued work for
//! device memory.

use smddp_base::Mismatch;
use smddp_group::Group;
use smddp_plan::Buffer;

use crate::bind::{BlockRun, BoundCall, BoundStep, IncomingMessage, Reduce};
use crate::call::types::DType;

/// State of an operation: its buffers, and the position in each pipeline. Buffers are stored as addresses. The caller
/// of `Communicator::start` keeps them valid until the operation is over.
#[derive(Default)]
pub(crate) struct Execution {
    pub(crate) dtype: DType,
    /// Divisor of finishing reductions.
    pub(crate) scale: Option<u32>,
    /// Address of each flat buffer; 0 if `lists` holds the addresses of the blocks.
    pub(crate) bases: [usize; 3],
    pub(crate) lists: [Option<Vec<usize>>; 2],
    /// Pending copy of the input; taken when the operation starts.
    pub(crate) input_copy: Option<InputCopy>,
    /// True if In and Out overlap. Set only for calls that depend on it, see `bind::ZeroCopy`.
    pub(crate) in_place: bool,
    /// True if outputs are written with non-temporal stores.
    pub(crate) stream: bool,
    pub(crate) pipelines: Vec<PipelineCursor>,
    /// Bytes sent to ranks of other nodes. Set when the operation ends.
    pub(crate) internode_bytes: u64,
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
    /// Returns true if Out shares memory with In.
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

/// A copy of the input to memory of the operation, made before anything else. It is needed if the input overlaps the
/// output, or if each element is multiplied by a factor.
pub(crate) struct InputCopy {
    /// Address and bytes of the caller's blocks, which are contiguous in the copy.
    pub(crate) pieces: Vec<(usize, usize)>,
    pub(crate) factor: Option<f64>,
}

/// Position in a pipeline.
#[derive(Clone, Copy, Default)]
pub(crate) struct PipelineCursor {
    iteration: usize,
    step_index: usize,
}

/// Result of an advance.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    Done,
    /// Steps ran, and more are left.
    Moved,
    Blocked,
}

impl Progress {
    pub(crate) fn moved(moved: bool) -> Self {
        if moved { Self::Moved } else { Self::Blocked }
    }
}

/// Result of a call to an executor.
pub(crate) type StepResult<M, T = ()> = Result<T, <M as StepExecutor>::Error>;

/// Moves the bytes of a step, after all data and slots of the step are available.
pub(crate) trait StepExecutor {
    type Error: From<Mismatch>;
    /// Slot for the next message of a channel.
    type Slot;

    fn execution(&mut self) -> &mut Execution;
    fn group(&mut self) -> &mut Group;
    /// Returns a slot for a message of one segment of `run`, or `None` if the channel has none free.
    fn slot(&mut self, channel: usize, run: BlockRun, segment: usize)
    -> StepResult<Self, Option<Self::Slot>>;
    /// Sends one segment of `source`, and copies it to `tee`.
    fn send(
        &mut self,
        to: Self::Slot,
        source: BlockRun,
        tee: Option<BlockRun>,
        segment: usize,
    ) -> StepResult<Self>;
    /// Stores the taken blocks of a message in `to`, and forwards them. Returns false if the step has to wait after
    /// all.
    fn receive(
        &mut self,
        from: (&IncomingMessage, *const u8),
        to: BlockRun,
        forward_slot: Option<Self::Slot>,
        segment: usize,
    ) -> StepResult<Self, bool>;
    /// Reduces one segment. `messages`: one for each source, null if it has none for this segment.
    fn reduce(
        &mut self,
        step: &Reduce,
        messages: &[*const u8],
        forward_slot: Option<Self::Slot>,
        segment: usize,
    ) -> StepResult<Self>;
    fn copy(&mut self, source: BlockRun, to: BlockRun, finish: bool, segment: usize) -> StepResult<Self>;
}

/// Advances all pipelines until each is done or has to wait. Returns two flags: all are done; any step ran.
#[inline]
pub(crate) fn walk<M: StepExecutor>(bound: &BoundCall, executor: &mut M) -> StepResult<M, (bool, bool)> {
    let (mut done, mut moved) = (true, false);
    for (pipeline, steps) in bound.pipelines.iter().enumerate() {
        let mut at = executor.execution().pipelines[pipeline];
        let walked = walk_pipeline(steps, bound.iterations[pipeline], &mut at, executor);
        // Also after an error: a departing rank polls again after a mismatch, and must not repeat a step.
        executor.execution().pipelines[pipeline] = at;
        moved |= walked?;
        done &= at.iteration >= bound.iterations[pipeline];
    }
    Ok((done, moved))
}

/// Advances one pipeline. Leaves `at` at the first step that did not complete. Returns true if any step ran.
#[inline]
fn walk_pipeline<M: StepExecutor>(
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

/// Runs one step on one segment. Returns false if it has to wait; then nothing was moved.
fn run_step<M: StepExecutor>(executor: &mut M, step: &BoundStep, segment: usize) -> StepResult<M, bool> {
    match step {
        BoundStep::Send { channel, source, tee } if segment < source.segments => {
            let Some(slot) = executor.slot(*channel, *source, segment)? else { return Ok(false) };
            executor.send(slot, *source, *tee, segment)?;
        }
        BoundStep::Receive { from, to, forward } if segment < from.message.segments => {
            let Some(message) = executor.group().recv_slot(from.recv_channel)? else { return Ok(false) };
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
                        let Some(found) = executor.group().recv_slot(from.recv_channel)? else {
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

/// Returns a slot for forwarding one segment of `run`, or an inner `None` if it is not forwarded; an outer `None` if
/// the channel has no free slot.
fn forward_slot<M: StepExecutor>(
    executor: &mut M,
    channel: Option<usize>,
    run: BlockRun,
    segment: usize,
) -> StepResult<M, Option<Option<M::Slot>>> {
    let Some(channel) = channel.filter(|_| segment < run.segments) else { return Ok(Some(None)) };
    Ok(executor.slot(channel, run, segment)?.map(Some))
}

/// Maximum number of sources of a reduction without an allocation.
const INLINE_SOURCES: usize = 17;

/// Calls `body` with a buffer of `count` values.
#[inline]
pub(crate) fn with_buffer<T: Copy, R>(count: usize, blank: T, body: impl FnOnce(&mut [T]) -> R) -> R {
    if count <= INLINE_SOURCES {
        body(&mut [blank; INLINE_SOURCES][..count])
    } else {
        body(&mut vec![blank; count])
    }
}
