//! Calls of a communicator: collectives, sends and recvs.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use smddp_plan::Collective;

use super::work::{CallName, Work};
use super::{Communicator, Options};
use crate::call::message_label::Direction;
use crate::call::types::{DType, RedOp};
use crate::call::{self, Blocks, Call};
use crate::engine::Command;
use crate::engine::messages::Request;
use crate::engine::waiting::Until;
use crate::error::{Error, Result};
use crate::sync::completion::Completion;

/// Largest call, in bytes, that takes the fast path without detaching from the interpreter.
const FAST_PATH_BYTES: usize = 32 << 10;

pub(super) const BARRIER: Call<'static> = Call {
    collective: Collective::Barrier,
    dtype: DType::U8,
    redop: RedOp::Sum,
    root: 0,
    input: Blocks::None,
    output: Blocks::None,
};

impl Communicator {
    /// Runs `call` on the calling thread. Returns when it is over.
    ///
    /// After an error the caller's memory is no longer used. On [`Error::Interrupted`] the operation continues with
    /// copies of its buffers, so the other ranks can finish. If other ranks read the buffers directly, the group
    /// ends instead. Only device buffers remain in use, in the order of their stream, and `options.keep` is held
    /// until then.
    ///
    /// # Safety
    /// The buffers of `call` are valid and no other thread writes to them until this returns.
    ///
    /// # Errors
    /// [`Error::Invalid`] for invalid arguments, and the error of the group if it has ended or belongs to the
    /// parent of a forked process; no data has moved then. [`Error::Timeout`] after the deadline,
    /// [`Error::Mismatch`] for different calls, and [`Error::PeerLost`] if a rank ends or leaves; each of them
    /// ends the group. [`Error::Closed`] if a rank aborts or closes the group. [`Error::System`] if a resource
    /// is missing. [`Error::Interrupted`] if a signal handler asks for it.
    pub unsafe fn run(&self, call: &Call<'_>, options: Options) -> Result<()> {
        // SAFETY: the caller guarantees it.
        unsafe { self.run_with(call, options, false, |wait| wait()) }
    }

    /// Runs `call`, waiting in another state, such as without an interpreter's lock. `outside` switches the state and
    /// calls the closure that it receives. A small call that the other ranks have already made completes without
    /// `outside`.
    ///
    /// # Safety
    /// As for [`Communicator::run`].
    ///
    /// # Errors
    /// As for [`Communicator::run`].
    pub unsafe fn run_detached(
        &self,
        call: &Call<'_>,
        options: Options,
        outside: impl FnOnce(&mut dyn FnMut()),
    ) -> Result<()> {
        if call.bytes() <= FAST_PATH_BYTES {
            // SAFETY: the caller guarantees it.
            return unsafe { self.run_with(call, options, true, outside) };
        }
        let (mut outcome, mut options) = (Ok(()), Some(options));
        outside(&mut || {
            if let Some(options) = options.take() {
                // SAFETY: the caller guarantees it.
                outcome = unsafe { self.run(call, options) };
            }
        });
        outcome
    }

    /// # Safety
    /// As for [`Communicator::run`].
    unsafe fn run_with(
        &self,
        call: &Call<'_>,
        options: Options,
        fast: bool,
        outside: impl FnOnce(&mut dyn FnMut()),
    ) -> Result<()> {
        let state = &self.0;
        state.check_usable()?;
        if options.on.is_none()
            && let Some(mut engine) = state.try_own()
        {
            let op = state.prepare_repeated(&mut engine, call, self.timeout(&options))?;
            engine.take_commands();
            let number = engine.next;
            if let Some(Err(error)) = engine.guard(|engine| engine.start(op)) {
                engine.fail_group(error);
            }
            state.submitted.fetch_add(1, Ordering::Relaxed);
            let comparison = state.config.audit.results.and_then(|_| engine.comparison_of(number));
            let until = Until::Over(number);
            let mut outcome = engine.outcome_of(&until);
            if outcome.is_none() && fast {
                outcome = engine.poll_briefly(&until);
            }
            if comparison.is_none()
                && let Some(outcome) = outcome
            {
                return outcome;
            }
            let mut held = Some(engine);
            outside(&mut || {
                if let Some(engine) = held.take() {
                    outcome = Some(state.run_to_completion(engine, number));
                }
                if let (Some(Ok(())), Some(comparison)) = (&outcome, &comparison) {
                    outcome = Some(state.wait_for_comparison(comparison));
                }
            });
            // The buffers are in use until the operation is over, even if `outside` did not call its closure.
            let rest = held.take().map(|engine| state.run_to_completion(engine, number));
            return outcome.or(rest).unwrap_or(Ok(()));
        }
        let mut outcome = Ok(());
        let mut options = Some(options);
        outside(&mut || {
            if let Some(options) = options.take() {
                let on_device = options.on.is_some();
                // SAFETY: the caller guarantees it. `wait` returns when the work is done or interrupted. After an
                // interrupt, `SharedState::detach` releases the buffers; for device buffers the work holds `keep`.
                outcome = unsafe { self.start(call, options) }.and_then(|work| {
                    let outcome = work.wait(None);
                    if outcome == Err(Error::Interrupted) && !on_device {
                        state.detach(&work.shared);
                    }
                    outcome
                });
            }
        });
        outcome
    }

    /// Returns when all ranks of the group have called it.
    ///
    /// # Errors
    /// As for [`Communicator::run`].
    pub fn barrier(&self, options: Options) -> Result<()> {
        // SAFETY: a barrier has no buffers.
        unsafe { self.run(&BARRIER, options) }
    }

    /// Waits at a barrier and calls `check` after each pause. The first pause is `pause`; pauses grow to ten times
    /// `pause`.
    ///
    /// # Errors
    /// Errors of the barrier and of `check`; the latter aborts the group.
    pub(crate) fn checked_barrier(
        &self,
        options: Options,
        pause: Duration,
        mut check: impl FnMut() -> Result<()>,
    ) -> Result<()> {
        // SAFETY: a barrier has no buffers.
        let work = unsafe { self.begin(&BARRIER, options) }?;
        let mut next = pause;
        loop {
            let outcome = work.wait(Some(next));
            if work.is_done() {
                return work.wait(None);
            }
            if outcome == Err(Error::Interrupted) {
                return outcome;
            }
            if let Err(error) = check() {
                if work.poll() {
                    return work.wait(None);
                }
                self.abort("another rank could not join");
                return Err(error);
            }
            next = (2 * next).min(10 * pause);
        }
    }

    /// Starts `call`, which progresses in the background.
    ///
    /// # Safety
    /// The buffers of `call` are valid, and not written by other threads, until the work is done. `options.keep`
    /// can hold them.
    ///
    /// # Errors
    /// [`Error::Invalid`] for invalid arguments, [`Error::System`] if a resource is missing, and the error of
    /// the group if it has ended or belongs to the parent of a forked process. Later errors are the outcome of
    /// the [`Work`].
    pub unsafe fn start(&self, call: &Call<'_>, options: Options) -> Result<Work> {
        // SAFETY: the caller guarantees it.
        let work = unsafe { self.begin(call, options) }?;
        self.0.start_progress();
        Ok(work)
    }

    /// Starts `call` and makes `stream`, a stream of the call's device, wait for it, as [`Work::wait_stream`] does.
    /// The second value is the outcome of that wait. Only this thread polls; the progress thread is not notified.
    ///
    /// # Safety
    /// As for [`Communicator::start`].
    ///
    /// # Errors
    /// As for [`Communicator::start`]; the call is not submitted then. The inner result has the errors of
    /// [`Work::wait_stream`].
    pub unsafe fn start_for(
        &self,
        call: &Call<'_>,
        options: Options,
        stream: smddp_cuda::Stream,
    ) -> Result<(Work, Result<()>)> {
        // SAFETY: the caller guarantees it.
        let work = unsafe { self.begin(call, options) }?;
        let waits = work.wait_stream(stream);
        Ok((work, waits))
    }

    /// Submits a call without starting progress on it.
    ///
    /// # Safety
    /// As for [`Communicator::start`].
    unsafe fn begin(&self, call: &Call<'_>, options: Options) -> Result<Work> {
        let state = &self.0;
        state.check_usable()?;
        let counts = call::check(call, state.rank, state.size)?;
        let timeout = self.timeout(&options);
        let device = options.on.as_ref().map(|on| self.device_op(on, call)).transpose()?;
        let shared = Arc::new(Completion::new(options.keep));
        let spare = state.take_spare();
        let mut op = state.prepare(spare, call, counts, timeout, device)?;
        op.work = Some(shared.clone());
        op.submitted = Some(Instant::now());
        let mut completion = None;
        let _ = state.engine.submit(|| {
            // Device sequence numbers follow the order of the commands.
            completion = op.device.as_mut().map(|device| {
                device.number = device.handle.number();
                device.completion()
            });
            state.submitted.fetch_add(1, Ordering::Relaxed);
            Command::Collective(op)
        });
        let call = CallName::Collective(call.collective);
        Ok(Work { shared, comm: state.clone(), call, completion })
    }

    /// Sends `count` elements to `dst`.
    ///
    /// # Safety
    /// As for [`Communicator::start`].
    ///
    /// # Errors
    /// [`Error::Invalid`] for device memory, and for a `dst` that is this rank or outside of the group. The
    /// error of the group if it has ended or belongs to the parent of a forked process. Later errors are the
    /// outcome of the [`Work`].
    pub unsafe fn send(
        &self,
        ptr: *const u8,
        count: usize,
        dtype: DType,
        dst: usize,
        tag: u64,
        options: Options,
    ) -> Result<Work> {
        self.post(Direction::To(dst), ptr as usize, count, dtype, tag, options)
    }

    /// Receives `count` elements from `src`, or from any rank.
    ///
    /// # Safety
    /// As for [`Communicator::start`]: no pending call reads or writes the memory, which is not checked.
    ///
    /// # Errors
    /// As for [`Communicator::send`], with `src` in place of `dst`.
    pub unsafe fn recv(
        &self,
        ptr: *mut u8,
        count: usize,
        dtype: DType,
        src: Option<usize>,
        tag: u64,
        options: Options,
    ) -> Result<Work> {
        self.post(src.map_or(Direction::FromAny, Direction::From), ptr as usize, count, dtype, tag, options)
    }

    fn post(
        &self,
        direction: Direction,
        ptr: usize,
        count: usize,
        dtype: DType,
        tag: u64,
        options: Options,
    ) -> Result<Work> {
        let state = &self.0;
        state.check_usable()?;
        if options.on.is_some() {
            return Err(Error::Invalid(format!(
                "{direction} on group `{}`: send and recv support host memory only; copy the tensor to the CPU first",
                state.name
            )));
        }
        match direction {
            Direction::To(rank) | Direction::From(rank) if rank >= state.size => {
                return Err(Error::Invalid(format!("rank {rank} is not in this group of {}", state.size)));
            }
            Direction::To(rank) | Direction::From(rank) if rank == state.rank => {
                return Err(Error::Invalid(format!("rank {rank} cannot send to or receive from itself")));
            }
            _ => {}
        }
        let timeout = self.timeout(&options);
        let shared = Arc::new(Completion::new(options.keep));
        let post = Request {
            direction,
            ptr,
            count,
            dtype,
            tag,
            timeout,
            submitted: Instant::now(),
            work: shared.clone(),
        };
        state.start_message(post);
        Ok(Work { shared, comm: state.clone(), call: CallName::Message(direction), completion: None })
    }
}
