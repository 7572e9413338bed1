//! What one thread at a time does for a communicator: start operations in order, move them on, end them.

mod detach;
mod faults;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use smddp_plan::format::named;
use smddp_transport::Group;
use smddp_transport::process::leave_error;

use crate::call::numbered;
use crate::describe;
use crate::device::{self, Enqueued, Site, Trouble};
use crate::error::Error;
use crate::exec;
use crate::head;
use crate::ledger::Record;
use crate::log::{self, Level};
use crate::op::{Operation, Repeat};
use crate::p2p::{PointToPoint, Request};
use crate::recorder::{Outcome, Recorder, Tally, ticks};
use crate::report;
use crate::steps::Progress;
use crate::work::Shared;

/// What waits to be taken up by the driver.
pub(crate) enum Item {
    Collective(Box<Operation>),
    /// Comes before the first collective on its device.
    Site(Box<Site>),
    Request(Request),
    /// The caller of this collective was interrupted and takes its buffers back.
    Detach(Arc<Shared>),
}

pub(crate) struct Driver {
    pub(crate) group: Group,
    /// Collectives in their order; the first one runs.
    pub(crate) queue: VecDeque<Box<Operation>>,
    pub(crate) messages: PointToPoint,
    /// Number of the next collective.
    pub(crate) next: u64,
    /// Collectives that are over.
    pub(crate) finished: u64,
    pub(crate) record: Record,
    tally: Arc<Tally>,
    /// What crossed nodes up to the end of the last collective.
    crossed: u64,
    recorder: Arc<Recorder>,
    /// The last poll moved a collective.
    advanced: bool,
    pub(crate) name: String,
    /// Collectives whose callers take their buffers back, see [`Self::detach`].
    detaching: Vec<Arc<Shared>>,
    /// A finished operation, to be filled again.
    pub(crate) spare: Option<Box<Operation>>,
    /// Finished ones whose calls may come again, the one that ended last at the end.
    #[expect(clippy::vec_box, reason = "they go from here to the queue and back without being copied")]
    kept: Vec<Box<Operation>>,
    sites: Vec<Site>,
    /// Operations that are a device's matter now.
    enqueued: VecDeque<Enqueued>,
    /// The group is dead since, and streams may still wait for it.
    releasing: Option<Instant>,
    /// The error that came of another rank's report, and the report.
    heard: Option<(Error, String)>,
    /// Set once the other ranks have been sent the reason why the group is dead.
    pub(crate) announced: bool,
    /// The last error of the process whose death ends this group.
    quoted: Option<String>,
    /// A rank that left while it had still to take something in that operation, and when that was first seen.
    untaken: Option<(usize, u64, Instant)>,
    /// The operation under way that others had ended before they declared the group dead, and since when that is known.
    behind: Option<(u64, Instant)>,
    /// This rank leaves, and the receivers of its messages know that there is none after those.
    told_last: bool,
    /// SMDDP_DEBUG=TRACE.
    traced: bool,
    /// The last call of which it was told that ranks are late.
    told_late: Option<u64>,
    /// The progress thread looks after this group, and has found that it is only [`Self::landing`]: it looks again soon.
    pub(crate) watched: bool,
}

impl Driver {
    pub(crate) fn new(group: Group, name: String, tally: Arc<Tally>, recorder: Arc<Recorder>) -> Self {
        let messages = PointToPoint::new(group.rank(), group.size(), recorder.clone());
        Self {
            group,
            queue: VecDeque::new(),
            messages,
            next: 0,
            finished: 0,
            record: Record::default(),
            tally,
            crossed: 0,
            recorder,
            advanced: false,
            name,
            detaching: Vec::new(),
            spare: None,
            kept: Vec::with_capacity(KEPT),
            sites: Vec::new(),
            enqueued: VecDeque::new(),
            releasing: None,
            heard: None,
            announced: false,
            quoted: None,
            untaken: None,
            behind: None,
            told_last: false,
            traced: log::tells(Level::Trace),
            told_late: None,
            watched: false,
        }
    }

    /// A finished operation of the same call, if one is kept.
    pub(crate) fn again(&mut self, call: &Repeat) -> Option<Box<Operation>> {
        let at = self.kept.iter().rposition(|op| op.repeat.as_ref() == Some(call))?;
        Some(self.kept.remove(at))
    }

    /// The same as [`Self::enqueue`] for one that the caller waits for. A small one that nothing is before goes on at once, and is
    /// written down while its message is on its way: a look at the clock takes as long as that.
    pub(crate) fn enter(&mut self, mut op: Box<Operation>) -> Result<(), Error> {
        if self.traced || !self.queue.is_empty() || op.device.is_some() || !op.bound.wiring.inline {
            self.enqueue(op);
            return Ok(());
        }
        op.seq = self.next;
        self.next += 1;
        let Operation { seq, bound, execution, begun, .. } = &mut *op;
        let progress = exec::advance(*seq, begun, bound, execution, &mut self.group);
        let now = ticks();
        self.note(&op, now);
        let (seq, mine) = (op.seq, op.bound.head);
        self.queue.push_back(op);
        match progress {
            Ok(Progress::Done) => self.end_first(now),
            Ok(_) => {}
            Err(mismatch) => self.differ(seq, mine, mismatch)?,
        }
        Ok(())
    }

    /// A collective has its number.
    fn note(&mut self, op: &Operation, now: u64) {
        if !head::is_leaving(op.bound.head) {
            self.record.add(op.bound.head);
        }
        self.recorder.submitted(op.seq, op.bound.head, op.bound.bytes, now, self.queue.is_empty());
    }

    /// The first collective of the queue is over here.
    fn end_first(&mut self, now: u64) {
        let Some(op) = self.queue.pop_front() else { return };
        self.finished = op.seq + 1;
        let crossed = self.group.crossed();
        self.tally.add(op.collective, op.bound.way(), op.bound.bytes as u64, crossed - self.crossed);
        self.crossed = crossed;
        self.recorder.ended(op.seq, Outcome::Ok, now, self.queue.front().map(|op| op.seq));
        if self.traced {
            let what = numbered(op.collective, op.seq);
            log::say(Level::Trace, &format!("{what} on group `{}` ends", self.name));
        }
        self.over(op);
    }

    /// Numbers a collective and puts it behind the others.
    pub(crate) fn enqueue(&mut self, mut op: Box<Operation>) {
        op.seq = self.next;
        self.note(&op, ticks());
        if self.traced {
            let (what, bytes) = (numbered(op.collective, op.seq), op.bound.bytes);
            let way = named(op.bound.way());
            log::say(
                Level::Trace,
                &format!("{what} on group `{}` begins: {bytes} bytes by {way}", self.name),
            );
        }
        self.next += 1;
        self.queue.push_back(op);
    }

    pub(crate) fn take_up(&mut self, item: Item) {
        match item {
            Item::Collective(op) => self.enqueue(op),
            Item::Site(site) => self.sites.push(*site),
            Item::Request(request) => self.messages.post(request),
            Item::Detach(work) => self.detaching.push(work),
        }
    }

    pub(crate) fn pending(&self) -> bool {
        self.waited_for() || self.group.busy() || self.releasing.is_some()
    }

    /// Whether some call is not over.
    pub(crate) fn waited_for(&self) -> bool {
        !self.queue.is_empty() || self.messages.pending() || !self.enqueued.is_empty()
    }

    /// Whether devices alone have something to end. Nothing that comes from others matters then, and a look now and then is
    /// enough.
    pub(crate) fn landing(&self) -> bool {
        let host = !self.queue.is_empty() || self.messages.pending() || self.group.busy();
        !host && !self.enqueued.is_empty() && self.releasing.is_none()
    }

    /// How long nobody may sleep: a device rings no bell.
    pub(crate) fn nap(&self, now: Instant) -> Duration {
        match self.queue.front() {
            Some(op) if op.device.is_some() && op.begun => Duration::from_micros(50),
            _ if !self.enqueued.is_empty() => Duration::from_millis(1),
            // Ever more seldom: a device may hang for good.
            _ => self.releasing.map_or(Duration::MAX, |since| {
                (now.duration_since(since) / 100).clamp(Duration::from_millis(1), Duration::from_millis(100))
            }),
        }
    }

    /// Moves on whatever can be moved; whether anything did.
    pub(crate) fn poll(&mut self) -> Result<bool, Error> {
        while let Some(work) = self.detaching.pop() {
            let mut queue = self.queue.iter();
            let found = queue.find(|op| op.work.as_ref().is_some_and(|own| Arc::ptr_eq(own, &work)));
            if let Some(seq) = found.map(|op| op.seq) {
                self.detach(seq)?;
            }
        }
        // What can be sent goes out before a look at what came in, which may be a system call.
        let mut moved = self.advance()?;
        self.advanced = moved;
        if self.group.turn() {
            self.advanced |= self.advance()?;
            moved = true;
        }
        moved |= self.retire()?;
        if self.messages.pending() {
            moved |= self.messages.poll(&mut self.group, &self.name)?;
        }
        Ok(moved)
    }

    /// The same for the collectives alone.
    fn advance(&mut self) -> Result<bool, Error> {
        let mut moved = false;
        while let Some(op) = self.queue.front_mut() {
            let Operation { collective, seq, bound, execution, begun, device, .. } = &mut **op;
            let outcome = match device {
                None => {
                    exec::advance(*seq, begun, bound, execution, &mut self.group).map_err(Trouble::Mismatch)
                }
                Some(device) => match self.sites.get_mut(device.handle.site) {
                    None => Err(Trouble::Device("the group has left its device".to_owned())),
                    Some(site) => {
                        let call = (*seq, *collective);
                        device::advance(call, begun, device, bound, execution, &mut self.group, site)
                    }
                },
            };
            match outcome {
                Ok(Progress::Done) => {
                    moved = true;
                    self.end_first(ticks());
                }
                Ok(Progress::Moved) => {
                    moved = true;
                    break;
                }
                Ok(Progress::Blocked) => break,
                Err(Trouble::Device(why)) => {
                    let what = format!("{} on group `{}`", numbered(op.collective, op.seq), self.name);
                    // A rank that failed takes its memory back: then its reason is the one to tell.
                    let cause = self.examine_faults(Instant::now())?;
                    return Err(cause.unwrap_or(Error::System { what, why }));
                }
                Err(Trouble::Peer(why)) => {
                    let what = format!("{} on group `{}`", numbered(op.collective, op.seq), self.name);
                    self.await_faults()?;
                    return Err(Error::System { what, why });
                }
                Err(Trouble::Mismatch(mismatch)) => {
                    let (seq, mine) = (op.seq, op.bound.head);
                    self.differ(seq, mine, mismatch)?;
                    break;
                }
            }
        }
        Ok(moved)
    }

    /// Messages that were just submitted set out. What comes in over a wire, which each look asks the kernel for, is left to whoever
    /// waits.
    pub(crate) fn set_out(&mut self) -> Result<bool, Error> {
        if !self.group.spans_nodes() {
            return self.poll();
        }
        let moved = self.messages.send(&mut self.group);
        self.group.push();
        Ok(moved)
    }

    /// An operation to which this host has nothing to add.
    fn over(&mut self, mut op: Box<Operation>) {
        let work = op.work.take();
        match op.device.take() {
            None => {
                if let Some(work) = work {
                    work.finish(Ok(()));
                }
            }
            Some(device) => {
                // Whatever comes next on the stream comes after this operation's last readers.
                self.sites[device.handle.site].give_back(&device.slabs);
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
        if !op.worth_keeping() {
            if op.overlaps {
                op.input_copy = Vec::new();
            }
            self.spare = Some(op);
            return;
        }
        if self.kept.len() == KEPT {
            self.spare = Some(self.kept.remove(0));
        }
        self.kept.push(op);
    }

    /// Ends the operations with which the device is through.
    fn retire(&mut self) -> Result<bool, Error> {
        let mut moved = false;
        let mut index = 0;
        while let Some(enqueued) = self.enqueued.get(index) {
            let site = &self.sites[enqueued.site];
            if !site.handle.is_done(enqueued.number) {
                index += 1;
                continue;
            }
            if site.handle.released() {
                // Another rank let all streams go on: the data is not to be trusted. Its reason is on its way.
                if let Some(error) = self.examine_faults(Instant::now())? {
                    return Err(error);
                }
                let enqueued = &self.enqueued[index];
                let why = format!(
                    "another rank of the node gave it up while {} was on the device",
                    numbered(enqueued.collective, enqueued.seq)
                );
                return Err(Error::Closed { group: self.name.clone(), why });
            }
            if let Some(work) = self.enqueued.remove(index).and_then(|enqueued| enqueued.work) {
                work.finish(Ok(()));
            }
            moved = true;
        }
        Ok(moved)
    }

    /// Whether devices have something to end, or will have. To its caller such a call is over: only streams wait for it.
    pub(crate) fn in_flight(&self) -> bool {
        !self.enqueued.is_empty() || self.queue.iter().any(|op| op.device.is_some())
    }

    /// Lets go of all devices; what their streams still use is theirs to give back.
    pub(crate) fn forget_devices(&mut self) {
        while let Some(since) = self.releasing
            && !self.release()
            && since.elapsed() < RELEASING
        {
            std::thread::sleep(Duration::from_micros(100));
        }
        self.enqueued.clear();
        self.sites.clear();
        self.releasing = None;
    }

    /// The group is dead: lets all streams go on, again and again, because one that goes on may write smaller numbers.
    pub(crate) fn keep_releasing(&mut self, now: Instant) {
        let Some(since) = self.releasing else { return };
        let late = now.duration_since(since) >= RELEASING;
        // A stream that stood still so long writes its numbers when it goes on, over those that release.
        if self.release() && late {
            self.releasing = None;
        }
    }

    /// Lets all streams go on; whether they are empty.
    fn release(&mut self) -> bool {
        let mut empty = true;
        for site in &mut self.sites {
            empty &= site.release();
        }
        empty
    }

    /// Whoever sees this process die later, and waits for it in whichever group, is told of this error; of the first one where
    /// one came of another.
    pub(crate) fn leave_error(&mut self, error: &Error) {
        match self.quoted.take() {
            Some(first) => leave_error(&first),
            None => describe::leave(&self.group, &self.name, error),
        }
    }

    /// Ends the group: releases the callers' memory, notifies the other ranks and ends all pending calls with `error`.
    pub(crate) fn fail(&mut self, error: &Error, now: Instant) {
        self.announced = true;
        let heard = self.heard.take().filter(|(about, _)| about == error);
        self.recorder.failed(&error.to_string());
        // Before the notice: sending it also reads from the sockets, and those bytes must not reach a caller's memory.
        self.group.let_go();
        self.group.poison(&heard.map_or_else(|| report::own(self.group.rank(), error), |(_, report)| report));
        self.end(error, now);
    }

    /// The same because this rank closes the group: the other ranks receive the loss of this rank as the reason, with the
    /// last error of this process.
    pub(crate) fn depart(&mut self, error: &Error, now: Instant) {
        let reason = describe::departure(&self.group, &self.name, &self.oldest());
        self.heard = Some((error.clone(), report::own(self.group.rank(), &reason)));
        self.fail(error, now);
    }

    /// True while collective `seq` is not over: its buffers are in use.
    pub(crate) fn holds(&self, seq: u64) -> bool {
        self.queue.iter().any(|op| op.seq == seq)
    }

    /// All that waits here ends with `error`.
    pub(crate) fn end(&mut self, error: &Error, now: Instant) {
        self.group.let_go();
        for mut op in self.queue.drain(..) {
            self.recorder.ended(op.seq, Outcome::Failed, ticks(), None);
            if let Some(work) = op.work.take() {
                work.finish(Err(error.clone()));
            }
        }
        self.messages.fail(error);
        for enqueued in self.enqueued.drain(..) {
            if let Some(work) = enqueued.work {
                work.finish(Err(error.clone()));
            }
        }
        if !self.sites.is_empty() {
            self.releasing.get_or_insert(now);
            self.keep_releasing(now);
        }
    }
}

/// Operations that are kept for their calls to come again: of a training step that makes more, few are so small that it matters.
const KEPT: usize = 8;

/// Streams of a dead group are let go on for this long at least: what they had queued is over by then as a rule. Callers'
/// streams wait for that no longer.
const RELEASING: Duration = Duration::from_secs(5);
