//! What one thread at a time does for a communicator: start operations in order, move them on, end them.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use smddp_plan::{Algorithm, Collective};
use smddp_transport::{Fault, Group, Head, Mismatch};

use crate::call::{name_of, rooted};
use crate::describe;
use crate::device::{self, Flight, Site, Trouble};
use crate::error::Error;
use crate::exec::{Op, Progress};
use crate::head;
use crate::leaving::Record;
use crate::p2p::{Mailroom, Post};
use crate::report;

/// What waits to be taken up by the driver.
pub(crate) enum Item {
    Collective(Box<Op>),
    /// Comes before the first collective on its device.
    Site(Box<Site>),
    Post(Post),
}

/// Operations and bytes of their whole buffers, by collective and algorithm. The driver counts, anybody may look.
#[derive(Default)]
pub(crate) struct Tally([[(AtomicU64, AtomicU64); Algorithm::ALL.len()]; Collective::ALL.len()]);

impl Tally {
    /// Only the driver calls this, so a load and a store do.
    fn add(&self, collective: Collective, algorithm: Algorithm, size: usize) {
        let (operations, bytes) = &self.0[collective as usize][algorithm as usize];
        operations.store(operations.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        bytes.store(bytes.load(Ordering::Relaxed) + size as u64, Ordering::Relaxed);
    }

    pub(crate) fn get(&self, collective: Collective, algorithm: Algorithm) -> (u64, u64) {
        let (operations, bytes) = &self.0[collective as usize][algorithm as usize];
        (operations.load(Ordering::Relaxed), bytes.load(Ordering::Relaxed))
    }
}

pub(crate) struct Driver {
    pub(crate) link: Group,
    /// Collectives in their order; the first one runs.
    pub(crate) queue: VecDeque<Box<Op>>,
    pub(crate) mail: Mailroom,
    /// Number of the next collective.
    pub(crate) next: u64,
    /// Collectives that are over.
    pub(crate) finished: u64,
    pub(crate) record: Record,
    tally: Arc<Tally>,
    /// The last poll moved a collective.
    advanced: bool,
    one_node: bool,
    pub(crate) group: String,
    /// A finished operation, to be filled again.
    pub(crate) spare: Option<Box<Op>>,
    sites: Vec<Site>,
    /// Operations that are a device's matter now.
    flying: VecDeque<Flight>,
    /// The group is dead since, and streams may still wait for it.
    mourning: Option<Instant>,
    /// The error that came of another rank's report, and the report.
    heard: Option<(Error, String)>,
}

impl Driver {
    pub(crate) fn new(link: Group, group: String, tally: Arc<Tally>) -> Self {
        let mail = Mailroom::new(link.rank(), link.size());
        Self {
            one_node: link.way().is_empty(),
            link,
            queue: VecDeque::new(),
            mail,
            next: 0,
            finished: 0,
            record: Record::default(),
            tally,
            advanced: false,
            group,
            spare: None,
            sites: Vec::new(),
            flying: VecDeque::new(),
            mourning: None,
            heard: None,
        }
    }

    /// Numbers a collective and puts it behind the others.
    pub(crate) fn enqueue(&mut self, mut op: Box<Op>) -> u64 {
        op.seq = self.next;
        if !head::is_leaving(op.bound.head) {
            self.record.add(op.bound.head);
        }
        self.next += 1;
        self.queue.push_back(op);
        self.next - 1
    }

    pub(crate) fn take_up(&mut self, item: Item) {
        match item {
            Item::Collective(op) => {
                self.enqueue(op);
            }
            Item::Site(site) => self.sites.push(*site),
            Item::Post(post) => self.mail.post(post),
        }
    }

    pub(crate) fn pending(&self) -> bool {
        self.waited_for() || self.link.busy() || self.mourning.is_some()
    }

    /// Whether some call is not over.
    pub(crate) fn waited_for(&self) -> bool {
        !self.queue.is_empty() || self.mail.pending() || !self.flying.is_empty()
    }

    /// How long nobody may sleep: a device rings no bell.
    pub(crate) fn nap(&self) -> Duration {
        match self.queue.front() {
            Some(op) if op.device.is_some() && op.begun => Duration::from_micros(50),
            _ if !self.flying.is_empty() => Duration::from_millis(1),
            // Ever more seldom: a device may hang for good.
            _ => self.mourning.map_or(Duration::MAX, |since| {
                (since.elapsed() / 100).clamp(Duration::from_millis(1), Duration::from_millis(100))
            }),
        }
    }

    /// Moves on whatever can be moved; whether anything did.
    pub(crate) fn poll(&mut self) -> Result<bool, Error> {
        // What can be sent goes out before a look at what came in, which may be a system call.
        let mut moved = self.advance()?;
        self.advanced = moved;
        if self.link.turn() {
            self.advanced |= self.advance()?;
            moved = true;
        }
        moved |= self.retire()?;
        if self.mail.pending() {
            moved |= self.mail.poll(&mut self.link, &self.group)?;
        }
        Ok(moved)
    }

    /// The same for the collectives alone.
    fn advance(&mut self) -> Result<bool, Error> {
        let mut moved = false;
        while let Some(op) = self.queue.front_mut() {
            let place = op.device.as_ref().map(|device| device.lobby.place.site);
            let outcome = match place.map(|site| self.sites.get_mut(site)) {
                None => op.advance(&mut self.link).map_err(Trouble::Mismatch),
                Some(Some(site)) => device::advance(op, &mut self.link, site),
                Some(None) => Err(Trouble::Device("the group has left its device".to_owned())),
            };
            match outcome {
                Ok(Progress::Done) => {
                    moved = true;
                    self.finished = op.seq + 1;
                    self.tally.add(op.collective, op.bound.choice.algorithm, op.bound.bytes);
                    if let Some(op) = self.queue.pop_front() {
                        self.over(op);
                    }
                }
                Ok(Progress::Moved) => {
                    moved = true;
                    break;
                }
                Ok(Progress::Blocked) => break,
                Err(Trouble::Device(why)) => {
                    let what = format!("{} #{} on group `{}`", name_of(op.collective), op.seq, self.group);
                    // A rank that failed takes its memory back: then its reason is the one to tell.
                    let cause = self.examine_faults()?;
                    return Err(cause.unwrap_or(Error::System { what, why }));
                }
                Err(Trouble::Peer(why)) => {
                    let what = format!("{} #{} on group `{}`", name_of(op.collective), op.seq, self.group);
                    self.await_faults()?;
                    return Err(Error::System { what, why });
                }
                Err(Trouble::Mismatch(mismatch)) => {
                    let (seq, mine) = (op.seq, op.bound.head);
                    self.differ(seq, mine, mismatch)?;
                }
            }
        }
        Ok(moved)
    }

    /// An operation to which this host has nothing to add.
    fn over(&mut self, mut op: Box<Op>) {
        let work = op.work.take();
        match op.device.take() {
            None => {
                if let Some(work) = work {
                    work.finish(Ok(()));
                }
            }
            Some(device) => {
                // Whatever comes next on the stream comes after this operation's last readers.
                self.sites[device.lobby.place.site].give_back(&device.slabs);
                if let Some(work) = &work {
                    work.enqueued();
                }
                self.flying.push_back(Flight {
                    site: device.lobby.place.site,
                    number: device.number,
                    seq: op.seq,
                    collective: op.collective,
                    submitted: op.submitted.unwrap_or_else(Instant::now),
                    timeout: op.timeout,
                    work,
                })
            }
        }
        self.spare = Some(op);
    }

    /// Ends the operations with which the device is through.
    fn retire(&mut self) -> Result<bool, Error> {
        let mut moved = false;
        let mut index = 0;
        while let Some(flight) = self.flying.get(index) {
            let site = &self.sites[flight.site];
            if !site.lobby.is_done(flight.number) {
                index += 1;
                continue;
            }
            if site.lobby.released() {
                // Another rank let all streams go on: the data is not to be trusted. Its reason is on its way.
                if let Some(error) = self.examine_faults()? {
                    return Err(error);
                }
                let flight = &self.flying[index];
                let why = format!(
                    "another rank of the node gave it up while {} #{} was on the device",
                    name_of(flight.collective),
                    flight.seq
                );
                return Err(Error::Closed { group: self.group.clone(), why });
            }
            if let Some(work) = self.flying.remove(index).and_then(|flight| flight.work) {
                work.finish(Ok(()));
            }
            moved = true;
        }
        Ok(moved)
    }

    fn examine_faults(&mut self) -> Result<Option<Error>, Error> {
        let faults = self.link.faults();
        Ok(self.judge(&faults, false).err())
    }

    /// Something went wrong at another rank. If it is dead, that is the reason; this process hears of it soon.
    fn await_faults(&mut self) -> Result<(), Error> {
        let begun = Instant::now();
        while begun.elapsed() < HEARSAY {
            if let Some(error) = self.examine_faults()? {
                return Err(error);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Whether devices have something to end, or will have. To its caller such a call is over: only streams wait for it.
    pub(crate) fn in_flight(&self) -> bool {
        !self.flying.is_empty() || self.queue.iter().any(|op| op.device.is_some())
    }

    /// Lets go of all devices; what their streams still use is theirs to give back.
    pub(crate) fn forget_devices(&mut self) {
        while let Some(since) = self.mourning
            && !self.release(false)
        {
            if since.elapsed() >= MOURNING {
                self.release(true);
                break;
            }
            std::thread::sleep(Duration::from_micros(100));
        }
        self.flying.clear();
        self.sites.clear();
        self.mourning = None;
    }

    /// The group is dead: lets all streams go on, again and again, because one that goes on may write smaller numbers.
    pub(crate) fn mourn(&mut self) {
        let Some(since) = self.mourning else { return };
        let late = since.elapsed() >= MOURNING;
        let empty = self.release(late);
        // A stream that stood still so long writes its numbers when it goes on, over those that release.
        if late && empty {
            self.mourning = None;
        }
    }

    /// Lets all streams go on; whether they are empty.
    fn release(&mut self, late: bool) -> bool {
        let mut empty = true;
        for site in &mut self.sites {
            empty &= site.release_all(late);
        }
        empty
    }

    /// Looks for reasons why what is waited for does not come: the dead, the gone, and passed deadlines. Called when blocked,
    /// and now and then while something moves.
    pub(crate) fn examine(&mut self, now: Instant) -> Result<(), Error> {
        if let Some(op) = self.queue.front().filter(|op| op.begun) {
            let (seq, mine) = (op.seq, op.bound.head);
            if let Some(found) = self.link.settle().err().or_else(|| self.other_call(seq, mine)) {
                self.differ(seq, mine, found)?;
            }
        }
        let faults = self.link.faults();
        if !faults.is_empty() {
            // Whoever left may have published what we wait for just before.
            let moved = self.poll()?;
            if !self.pending() {
                return Ok(());
            }
            // Messages that go on and on are no reason for a collective to wait for the dead.
            if !moved || !self.queue.is_empty() && !self.advanced {
                self.judge(&faults, moved)?;
            }
        }
        if let Some(op) = self.queue.front_mut() {
            let since = *op.submitted.get_or_insert(now);
            if now.duration_since(since) >= op.timeout {
                self.link.survey();
                // Another rank may have found the cause meanwhile.
                let faults = self.link.faults();
                self.judge(&faults, false)?;
                let Some(op) = self.queue.front() else { return Ok(()) };
                return Err(describe::timeout(&self.link, &self.group, op));
            }
        }
        for flight in &self.flying {
            if now.duration_since(flight.submitted) >= flight.timeout {
                return Err(describe::stuck(&self.group, flight));
            }
        }
        self.look_for_leavers()?;
        self.mail.expire(&mut self.link, &self.group, now)
    }

    /// Where calls differ, all may be writing to ranks that do not read, and hold nobody's header against their own.
    fn other_call(&self, seq: u64, mine: Head) -> Option<Mismatch> {
        (0..self.link.size()).filter(|&rank| rank != self.link.rank()).find_map(|rank| {
            let theirs = self.link.head_of(rank, seq).filter(|&theirs| theirs != mine)?;
            Some(Mismatch { rank, theirs, bytes: None })
        })
    }

    /// A rank that leaves sends nothing more to the recvs that wait for it. In a node all that it sent can be seen before that it
    /// leaves; between nodes messages have a way of their own, at whose end it says so.
    fn look_for_leavers(&mut self) -> Result<(), Error> {
        if !self.queue.is_empty() {
            return Ok(());
        }
        let leaves = |rank: &usize| {
            self.one_node && self.link.head_of(*rank, self.next).is_some_and(head::is_leaving)
                || self.link.p2p_over(*rank)
        };
        if let Some(rank) = self.mail.sought().into_iter().find(leaves) {
            self.mail.poll(&mut self.link, &self.group)?;
            if self.mail.sought().contains(&rank) {
                return Err(self.left_behind("recv".to_owned(), rank));
            }
        }
        Ok(())
    }

    /// A rank has left that something here waits for.
    fn left_behind(&self, what: String, rank: usize) -> Error {
        let unclaimed = self.mail.unclaimed(rank, &self.link, &self.group);
        unclaimed.unwrap_or_else(|| describe::lost(&self.link, &self.group, what, rank, LEFT))
    }

    /// `moving`: messages still come in, perhaps of those who have left.
    fn judge(&mut self, faults: &[Fault], moving: bool) -> Result<(), Error> {
        let what = match (self.queue.front(), self.flying.front()) {
            (Some(op), _) => format!("{} #{}", name_of(op.collective), op.seq),
            (None, Some(flight)) => format!("{} #{}", name_of(flight.collective), flight.seq),
            (None, None) => "send or recv".to_owned(),
        };
        for fault in faults {
            if let Fault::Differs { seq, mine, found } = *fault {
                self.differ(seq, mine, found)?;
            }
        }
        if self.leaves() {
            return self.judge_leaving(faults);
        }
        // Then the dead: they are the cause, what others report is the consequence.
        for fault in faults {
            if let Fault::Lost { rank, how } = fault {
                return Err(describe::lost(&self.link, &self.group, what, *rank, how));
            }
        }
        // What another rank reports may well be how this process's own trouble looks from there.
        for fault in faults {
            if let Fault::Unable { rank, why } = fault {
                return Err(describe::unable(&self.link, &self.group, &what, *rank, why));
            }
        }
        for fault in faults {
            match fault {
                Fault::Poisoned { rank, why } => return Err(self.hear(what, *rank, why)),
                Fault::Left { rank } => {
                    let needed = self.queue.front().is_some_and(|op| self.link.awaits(*rank, op.seq));
                    if needed || !moving && self.mail.needs(*rank) {
                        return Err(self.left_behind(what, *rank));
                    }
                }
                Fault::Lost { .. } | Fault::Differs { .. } | Fault::Unable { .. } => {}
            }
        }
        Ok(())
    }

    /// What another rank reports, as an error here, which is passed on in that rank's words.
    fn hear(&mut self, what: String, from: usize, report: &str) -> Error {
        let error = report::heard(&self.link, &self.group, what, from, report);
        self.heard = Some((error.clone(), report.to_owned()));
        error
    }

    /// Two ranks made different calls, which is the end of the group, unless one of them left and the other hears that.
    fn differ(&mut self, seq: u64, mine: Head, found: Mismatch) -> Result<(), Error> {
        let collective = head::collective(mine).unwrap_or(Collective::Barrier);
        let (leave, left) = (head::is_leaving(mine), head::is_leaving(found.theirs));
        if left && !leave && !rooted(collective) && self.queue.front().is_some_and(|op| op.seq == seq) {
            let what = format!("{} #{seq}", name_of(collective));
            return Err(describe::lost(&self.link, &self.group, what, found.rank, LEFT));
        }
        // A call of which all ranks are a part raises over there. Without a root's part in it, it may have ended well.
        if leave && !left && head::collective(found.theirs).is_some_and(|theirs| !rooted(theirs)) {
            self.leave_alone(&format!(
                "{} waits in {}",
                self.link.describe(found.rank),
                head::call(found.theirs)
            ));
            return Ok(());
        }
        Err(describe::mismatch(&self.link, &self.group, collective, seq, mine, found))
    }

    /// Whether the call under way is the one by which this rank leaves.
    fn leaves(&self) -> bool {
        self.queue.front().is_some_and(|op| head::is_leaving(op.bound.head))
    }

    /// Ends the call by which this rank leaves: there is nobody to hold anything against.
    pub(crate) fn leave_alone(&mut self, why: &str) {
        if self.leaves()
            && let Some(op) = self.queue.pop_front()
            && let Some(work) = op.work
        {
            work.finish(Err(Error::Closed { group: self.group.clone(), why: why.to_owned() }));
        }
    }

    /// A rank that is gone ends the leaving, and no error is left of it but that of ranks that made different calls.
    fn judge_leaving(&mut self, faults: &[Fault]) -> Result<(), Error> {
        let seq = self.queue.front().map_or(0, |op| op.seq);
        for fault in faults {
            match fault {
                Fault::Poisoned { rank, why } if report::is_mismatch(why) => {
                    return Err(self.hear("destroy_process_group".to_owned(), *rank, why));
                }
                Fault::Left { rank } if !self.link.awaits(*rank, seq) => {}
                Fault::Lost { rank, .. } | Fault::Poisoned { rank, .. } | Fault::Left { rank } => {
                    self.leave_alone(&format!("{} is gone", self.link.describe(*rank)));
                    break;
                }
                Fault::Unable { rank, why } => {
                    self.leave_alone(&format!("{} is out of reach: {why}", self.link.describe(*rank)));
                    break;
                }
                Fault::Differs { .. } => {}
            }
        }
        Ok(())
    }

    /// The group is over: everything that waits ends with `error`, and the others are told.
    pub(crate) fn fail(&mut self, error: &Error) {
        let heard = self.heard.take().filter(|(about, _)| about == error);
        self.link.poison(&heard.map_or_else(|| report::own(self.link.rank(), error), |(_, report)| report));
        self.end(error);
    }

    /// All that waits here ends with `error`.
    pub(crate) fn end(&mut self, error: &Error) {
        for mut op in self.queue.drain(..) {
            if let Some(work) = op.work.take() {
                work.finish(Err(error.clone()));
            }
        }
        self.mail.fail(error);
        for flight in self.flying.drain(..) {
            if let Some(work) = flight.work {
                work.finish(Err(error.clone()));
            }
        }
        if !self.sites.is_empty() {
            self.mourning.get_or_insert_with(Instant::now);
            self.mourn();
        }
    }
}

/// What became of a rank that needs this group no more.
const LEFT: &str = "left the group (destroyed it or exited) before this operation";

/// Streams of a dead group are let go on for this long at least: what they had queued is over by then as a rule. Callers'
/// streams wait for that no longer.
const MOURNING: Duration = Duration::from_secs(5);

/// A death in the node is known everywhere there after this time at most.
const HEARSAY: Duration = Duration::from_secs(1);

pub(crate) type SharedWork = Arc<crate::work::Shared>;
