//! The engine of a group: starts operations in order, advances them and completes them. One thread at a time owns
//! it.

pub(crate) mod audit;
mod check;
pub(crate) mod deadlock;
mod detach;
pub(crate) mod fail;
pub(crate) mod messages;
pub(crate) mod operation;
pub(crate) mod owned_engine;
mod prepare;
pub(crate) mod progress_loop;
pub(crate) mod progress_thread;
#[cfg(test)]
mod query_test;
#[cfg(any(test, feature = "record"))]
mod record;
mod result_comparison;
pub(crate) mod shared;
pub(crate) mod wait_limit;
pub(crate) mod wait_plan;
pub(crate) mod waiting;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use smddp_group::{Facts, Group};
use smddp_plan::format::variant_name;

use crate::call::fingerprint;
use crate::call::numbered;
use crate::config::network::NetworkEstimate;
use crate::device::{DeviceSite, Enqueued};
use crate::engine::fail::{EndedCalls, Phase};
use crate::engine::messages::{MessageQueues, Request};
use crate::engine::operation::{CallShape, Operation};
#[cfg(feature = "record")]
use crate::engine::record::RecordingMonitor as FailureMonitor;
use crate::error::Error;
use crate::exec::device::{self, ExecError};
use crate::exec::host;
use crate::exec::walk::Progress;
use crate::failure::call_log::CallLog;
use crate::failure::limits::Limits;
#[cfg(not(feature = "record"))]
use crate::failure::monitor::FailureMonitor;
use crate::failure::names::GroupNames;
use crate::log::{self, Level};
use crate::observe::recorder::{Outcome, PathCounters, Recorder, ticks};
use crate::sync::completion::Completion;

/// Submission to the engine.
pub(crate) enum Command {
    Collective(Box<Operation>),
    /// State of a device. Precedes the first collective on that device.
    Site(Box<DeviceSite>),
    Request(Request),
    /// Release of the buffers of a collective whose caller was interrupted.
    Detach(Arc<Completion>),
    /// End of a query that its thread no longer continues.
    CancelQuery,
    /// End of the group with this error, reported to the other ranks.
    Abort(Error),
    /// End of the group because this rank closes it.
    Close(Error),
}

/// Operations of one group, advanced by the thread that owns the engine.
pub(crate) struct Engine {
    pub(crate) group: Group,
    /// Collectives in call order; the first one is active.
    pub(crate) queue: VecDeque<Box<Operation>>,
    pub(crate) messages: MessageQueues,
    /// Sequence number of the next collective.
    pub(crate) next: u64,
    /// Number of completed collectives.
    pub(crate) finished: u64,
    /// Number of collectives whose results the ranks could compare.
    audited: u64,
    pub(crate) call_log: CallLog,
    counters: Arc<PathCounters>,
    recorder: Arc<Recorder>,
    /// True if the last poll advanced a collective.
    advanced: bool,
    pub(crate) name: String,
    /// Memory for commands while they are applied.
    taken: Vec<Command>,
    /// Collectives whose callers release their buffers, see [`Self::detach`].
    detaching: Vec<Arc<Completion>>,
    /// A completed operation whose memory the next one takes over.
    pub(crate) spare: Option<Box<Operation>>,
    /// Completed operations kept for repeated calls, the most recent one last.
    #[expect(clippy::vec_box, reason = "the boxes move between this list and the queue without a copy")]
    reusable: Vec<Box<Operation>>,
    pub(crate) sites: Vec<DeviceSite>,
    /// Operations that are completely on a device's streams.
    enqueued: VecDeque<Enqueued>,
    /// Time at which the group died, while streams may still wait for it.
    release_started: Option<Instant>,
    /// Error that another rank reported, with the report to forward.
    forwarded_report: Option<(Error, String)>,
    pub(crate) phase: Phase,
    /// This rank closes the group: once it has failed, the rank leaves it.
    pub(crate) is_closing: bool,
    /// Calls to complete after the release of the engine, once the group has failed.
    ended: Option<Box<EndedCalls>>,
    /// Last error of the process whose death ends this group.
    cause_text: Option<String>,
    pub(crate) names: GroupNames,
    /// State of the other ranks at the last check.
    pub(crate) facts: Facts,
    monitor: FailureMonitor,
    /// Time at which the monitor requested the next check.
    next_check: Option<Instant>,
    /// This rank leaves and has announced to the receivers of its messages that no more follow.
    announced_last: bool,
    /// True with SMDDP_DEBUG=TRACE.
    is_traced: bool,
    /// Set by the progress thread: it polls this group, which waits for devices only (see [`Self::only_devices`]).
    pub(crate) device_only: bool,
    /// Bit of the next compared result that a test flips.
    #[cfg(test)]
    pub(crate) flipped_bit: Option<usize>,
}

impl Engine {
    pub(crate) fn new(
        group: Group,
        name: String,
        counters: Arc<PathCounters>,
        recorder: Arc<Recorder>,
    ) -> Self {
        let info = group.info().clone();
        let ranks = (0..info.size).map(|rank| info.describe(rank));
        let names = GroupNames::new(info.rank, &name, ranks);
        let messages = MessageQueues::new(info.rank, info.size, recorder.clone());
        Self {
            group,
            queue: VecDeque::new(),
            messages,
            next: 0,
            finished: 0,
            audited: 0,
            #[cfg(test)]
            flipped_bit: None,
            call_log: CallLog::default(),
            counters,
            recorder,
            advanced: false,
            name,
            taken: Vec::new(),
            detaching: Vec::new(),
            spare: None,
            reusable: Vec::with_capacity(MAX_KEPT),
            sites: Vec::new(),
            enqueued: VecDeque::new(),
            release_started: None,
            forwarded_report: None,
            phase: Phase::Running,
            is_closing: false,
            ended: None,
            cause_text: None,
            monitor: FailureMonitor::new(names.clone(), Limits::default()),
            names,
            facts: Facts::default(),
            next_check: None,
            announced_last: false,
            is_traced: log::is_enabled(Level::Trace),
            device_only: false,
        }
    }

    /// Uses this network estimate for the connections of this group, and records it.
    pub(crate) fn set_network(&mut self, estimate: NetworkEstimate) {
        self.group.set_in_flight(estimate.network.in_flight_bytes());
        self.recorder.set_network(estimate);
    }

    /// Takes a completed operation of the same call, if one is kept.
    pub(crate) fn reuse(&mut self, call: &CallShape) -> Option<Box<Operation>> {
        let at = self.reusable.iter().rposition(|op| op.shape.as_ref() == Some(call))?;
        Some(self.reusable.remove(at))
    }

    /// Enqueues an operation that the caller waits for. A small operation at the head of the queue starts
    /// immediately. It is recorded while its message is in flight, because reading the clock takes as long as
    /// sending.
    pub(crate) fn start(&mut self, mut op: Box<Operation>) -> Result<(), Error> {
        if !self.is_running()
            || self.is_traced
            || !self.queue.is_empty()
            || op.device.is_some()
            || !op.bound.channel_layout.inline
        {
            self.enqueue(op);
            return Ok(());
        }
        op.seq = self.next;
        self.next += 1;
        let Operation { seq, bound, execution, begun, .. } = &mut *op;
        let progress = host::advance(*seq, begun, bound, execution, &mut self.group);
        let now = ticks();
        self.record_start(&op, now);
        let (seq, mine) = (op.seq, op.bound.fingerprint);
        self.push(op);
        match progress {
            Ok(Progress::Done) => self.complete_first(now)?,
            Ok(_) => {}
            Err(mismatch) => self.on_mismatch(seq, mine, mismatch)?,
        }
        Ok(())
    }

    /// Records a collective that has received its sequence number.
    fn record_start(&mut self, op: &Operation, now: u64) {
        if !fingerprint::is_leaving(op.bound.fingerprint) {
            self.call_log.add(op.bound.fingerprint);
        }
        self.recorder.submitted(op.seq, op.bound.fingerprint, op.bound.bytes, now, self.queue.is_empty());
    }

    /// Appends a collective to the queue, and the comparison of its result if that is due.
    fn push(&mut self, op: Box<Operation>) {
        let comparison = if op.audit.is_some() { self.due_comparison(&op) } else { None };
        self.queue.push_back(op);
        if let Some(comparison) = comparison {
            self.enqueue(comparison);
        }
    }

    /// Completes the first collective of the queue.
    fn complete_first(&mut self, now: u64) -> Result<(), Error> {
        let Some(mut op) = self.queue.pop_front() else { return Ok(()) };
        if op.audit.is_some()
            && let Err(error) = self.audit_completed(&mut op)
        {
            self.queue.push_front(op);
            return Err(error);
        }
        self.finished = op.seq + 1;
        let (bytes, internode_bytes) = (op.bound.bytes as u64, op.execution.internode_bytes);
        self.counters.add(op.collective, op.bound.variant(), bytes, internode_bytes);
        self.recorder.ended(op.seq, Outcome::Ok, now, self.queue.front().map(|op| op.seq));
        if self.is_traced {
            let operation = op.name();
            log::say(Level::Trace, &format!("{operation} on group `{}` ends", self.name));
        }
        self.complete(op);
        Ok(())
    }

    /// Assigns a sequence number to a collective and appends it to the queue.
    pub(crate) fn enqueue(&mut self, mut op: Box<Operation>) {
        op.seq = self.next;
        self.record_start(&op, ticks());
        if self.is_traced {
            let (operation, bytes) = (op.name(), op.bound.bytes);
            let variant = variant_name(op.bound.variant());
            log::say(
                Level::Trace,
                &format!("{operation} on group `{}` begins: {bytes} bytes by {variant}", self.name),
            );
        }
        self.next += 1;
        self.push(op);
    }

    pub(crate) fn apply(&mut self, command: Command) {
        match command {
            Command::Collective(op) => self.enqueue(op),
            Command::Site(site) => {
                // Streams wait for calls on a device, and threads for these streams.
                self.recorder.waited.set_uncertain(false);
                self.sites.push(*site);
            }
            Command::Request(request) => self.messages.post(request),
            Command::Detach(work) => self.detaching.push(work),
            Command::CancelQuery if self.facts.is_querying => {}
            Command::CancelQuery => self.cancel_query(),
            Command::Abort(error) => self.fail(&error, Instant::now()),
            Command::Close(error) => self.close(&error, Instant::now()),
        }
    }

    pub(crate) fn pending(&self) -> bool {
        let needs_polls = match self.phase {
            Phase::Failing { .. } => true,
            // The thread that closes the group continues.
            _ if self.is_closing => false,
            Phase::Abandoned => self.release_started.is_some(),
            _ => !self.group.is_flushed() || self.release_started.is_some(),
        };
        needs_polls || self.has_calls()
    }

    /// Returns true if a call is pending.
    pub(crate) fn has_calls(&self) -> bool {
        !self.queue.is_empty() || self.messages.pending() || !self.enqueued.is_empty()
    }

    /// Returns true if only operations on devices are pending. Nothing arrives from other ranks then, so infrequent
    /// polls suffice.
    pub(crate) fn only_devices(&self) -> bool {
        let host = !self.queue.is_empty() || self.messages.pending() || !self.group.is_flushed();
        !host && !self.enqueued.is_empty() && self.release_started.is_none()
    }

    /// Returns the longest sleep before the next poll. A device does not notify the doorbell.
    pub(crate) fn max_sleep(&self, now: Instant) -> Duration {
        let check =
            self.next_check.map_or(Duration::MAX, |at| at.saturating_duration_since(now).max(MIN_SLEEP));
        check.min(self.max_phase_sleep()).min(match self.queue.front() {
            Some(op) if op.device.is_some() && op.begun => Duration::from_micros(50),
            _ if !self.enqueued.is_empty() => Duration::from_millis(1),
            // Less and less often: a device may hang forever.
            _ => self.release_started.map_or(Duration::MAX, |since| {
                (now.duration_since(since) / 100).clamp(Duration::from_millis(1), Duration::from_millis(100))
            }),
        })
    }

    /// Advances everything that can make progress. Returns true if anything moved.
    pub(crate) fn poll(&mut self) -> Result<bool, Error> {
        while let Some(work) = self.detaching.pop() {
            let mut queue = self.queue.iter();
            let found = queue.find(|op| op.work.as_ref().is_some_and(|own| Arc::ptr_eq(own, &work)));
            if let Some(seq) = found.map(|op| op.seq) {
                self.detach(seq)?;
            }
        }
        // Send before receiving: a poll for incoming data may be a system call.
        let mut moved = self.advance()?;
        self.advanced = moved;
        if self.group.poll() {
            self.advanced |= self.advance()?;
            moved = true;
        }
        moved |= self.reap_devices()?;
        if self.messages.pending() {
            moved |= self.messages.poll(&mut self.group, &self.name)?;
        }
        Ok(moved)
    }

    /// Advances the collectives only.
    fn advance(&mut self) -> Result<bool, Error> {
        let mut moved = false;
        if self.monitor.holds_calls() {
            return Ok(moved);
        }
        while let Some(op) = self.queue.front_mut() {
            let Operation { collective, seq, bound, execution, begun, device, .. } = &mut **op;
            let outcome = match device {
                None => {
                    host::advance(*seq, begun, bound, execution, &mut self.group).map_err(ExecError::Mismatch)
                }
                Some(device) => match self.sites.get_mut(device.handle.site) {
                    None => Err(ExecError::Device("the group has released its device".to_owned())),
                    Some(site) => {
                        let call = (*seq, *collective);
                        device::advance(call, begun, device, bound, execution, &mut self.group, site)
                    }
                },
            };
            match outcome {
                Ok(Progress::Done) => {
                    moved = true;
                    self.complete_first(ticks())?;
                }
                Ok(Progress::Moved) => {
                    moved = true;
                    break;
                }
                Ok(Progress::Blocked) => break,
                Err(ExecError::Device(reason)) => {
                    let operation = format!("{} on group `{}`", op.name(), self.name);
                    // A failed rank withdraws its memory; its reason then is the one to report.
                    self.on_transport_error(Error::System { operation, reason }, true)?;
                    break;
                }
                Err(ExecError::Peer(reason)) => {
                    let operation = format!("{} on group `{}`", op.name(), self.name);
                    self.on_transport_error(Error::System { operation, reason }, false)?;
                    break;
                }
                Err(ExecError::Mismatch(mismatch)) => {
                    let (seq, mine) = (op.seq, op.bound.fingerprint);
                    self.on_mismatch(seq, mine, mismatch)?;
                    break;
                }
            }
        }
        Ok(moved)
    }

    /// Completes an operation for which this host has no more work.
    fn complete(&mut self, mut op: Box<Operation>) {
        let work = op.work.take();
        match op.device.take() {
            None => {
                if let Some(work) = work {
                    work.finish(Ok(()));
                }
            }
            Some(device) => {
                // Later work on the stream runs after this operation's last readers.
                self.sites[device.handle.site].release_slabs(&device.slabs);
                if let Some(work) = &work {
                    work.enqueued();
                }
                self.enqueued.push_back(Enqueued {
                    site: device.handle.site,
                    number: device.number,
                    seq: op.seq,
                    collective: op.collective,
                    submitted: op.submitted,
                    timeout: op.timeout,
                    work,
                })
            }
        }
        if !op.is_reusable() {
            if op.overlaps {
                op.input_copy = Vec::new();
            }
            self.spare = Some(op);
            return;
        }
        if self.reusable.len() == MAX_KEPT {
            self.spare = Some(self.reusable.remove(0));
        }
        self.reusable.push(op);
    }

    /// Completes the operations that their devices have finished.
    fn reap_devices(&mut self) -> Result<bool, Error> {
        let mut moved = false;
        let mut index = 0;
        while let Some(enqueued) = self.enqueued.get(index) {
            let site = &self.sites[enqueued.site];
            if !site.handle.is_done(enqueued.number) {
                index += 1;
                continue;
            }
            if site.handle.released() {
                // Another rank released all streams, so the data is invalid. The report with its reason is in
                // flight.
                if self.monitor.holds_calls() {
                    return Ok(moved);
                }
                let reason = format!(
                    "another rank of the node failed while {} was on the device",
                    numbered(enqueued.collective, enqueued.seq)
                );
                let error = Error::Closed { group: self.name.clone(), reason };
                self.on_transport_error(error, true)?;
                return Ok(moved);
            }
            if let Some(work) = self.enqueued.remove(index).and_then(|enqueued| enqueued.work) {
                work.finish(Ok(()));
            }
            moved = true;
        }
        Ok(moved)
    }

    /// Returns true while collective `seq` is pending: its buffers are in use.
    pub(crate) fn holds(&self, seq: u64) -> bool {
        self.queue.iter().any(|op| op.seq == seq)
    }
}

/// Maximum number of operations kept for repeated calls. A training step rarely makes more different calls that are
/// small enough to benefit.
const MAX_KEPT: usize = 8;

/// Shortest sleep before a requested check.
const MIN_SLEEP: Duration = Duration::from_micros(50);
