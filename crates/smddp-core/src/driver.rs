//! What one thread at a time does for a communicator: start operations in order, move them on, end them.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use smddp_plan::{Algorithm, Collective};
use smddp_transport::{Fault, Head, Link};

use crate::bind::Cache;
use crate::call::name_of;
use crate::describe;
use crate::error::Error;
use crate::exec::{Op, Progress};
use crate::p2p::{Mailroom, Post};

/// What waits to be taken up by the driver.
pub(crate) enum Item {
    Collective(Box<Op>),
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
    pub(crate) link: Box<dyn Link>,
    pub(crate) cache: Cache,
    /// Collectives in their order; the first one runs.
    pub(crate) queue: VecDeque<Box<Op>>,
    pub(crate) mail: Mailroom,
    /// Number of the next collective.
    pub(crate) next: u64,
    /// Collectives that are over.
    pub(crate) finished: u64,
    tally: Arc<Tally>,
    pub(crate) group: String,
    /// A finished operation, to be filled again.
    pub(crate) spare: Option<Box<Op>>,
}

impl Driver {
    pub(crate) fn new(link: Box<dyn Link>, group: String, tally: Arc<Tally>) -> Self {
        let mail = Mailroom::new(link.size());
        Self {
            link,
            cache: Cache::new(),
            queue: VecDeque::new(),
            mail,
            next: 0,
            finished: 0,
            tally,
            group,
            spare: None,
        }
    }

    /// Numbers a collective and puts it behind the others.
    pub(crate) fn enqueue(&mut self, mut op: Box<Op>) -> u64 {
        op.seq = self.next;
        self.next += 1;
        self.queue.push_back(op);
        self.next - 1
    }

    pub(crate) fn take_up(&mut self, item: Item) {
        match item {
            Item::Collective(op) => {
                self.enqueue(op);
            }
            Item::Post(post) => self.mail.post(post),
        }
    }

    pub(crate) fn pending(&self) -> bool {
        !self.queue.is_empty() || self.mail.pending() || self.link.busy()
    }

    /// Moves on whatever can be moved; whether anything did.
    pub(crate) fn poll(&mut self) -> Result<bool, Error> {
        // What can be sent goes out before a look at what came in, which may be a system call.
        let mut moved = self.advance()?;
        if self.link.turn() {
            self.advance()?;
            moved = true;
        }
        if self.mail.pending() {
            moved |= self.mail.poll(&mut *self.link, &self.group)?;
        }
        Ok(moved)
    }

    /// The same for the collectives alone.
    fn advance(&mut self) -> Result<bool, Error> {
        let mut moved = false;
        while let Some(op) = self.queue.front_mut() {
            match op.advance(&mut *self.link) {
                Ok(Progress::Done) => {
                    moved = true;
                    self.finished = op.seq + 1;
                    self.tally.add(op.collective, op.bound.choice.algorithm, op.bound.bytes);
                    if let Some(mut op) = self.queue.pop_front() {
                        if let Some(work) = op.work.take() {
                            work.finish(Ok(()));
                        }
                        self.spare = Some(op);
                    }
                }
                Ok(Progress::Moved) => {
                    moved = true;
                    break;
                }
                Ok(Progress::Blocked) => break,
                Err(mismatch) => {
                    let mine = Head { what: op.bound.what, count: op.bound.count };
                    let (collective, seq) = (op.collective, op.seq);
                    return Err(describe::mismatch(
                        &*self.link,
                        &self.group,
                        collective,
                        seq,
                        mine,
                        mismatch,
                    ));
                }
            }
        }
        Ok(moved)
    }

    /// Looks for reasons why nothing moves: the dead, the gone, and passed deadlines. Called when blocked.
    pub(crate) fn examine(&mut self, now: Instant) -> Result<(), Error> {
        let faults = self.link.faults();
        if !faults.is_empty() {
            // Whoever left may have published what we wait for just before.
            if self.poll()? || !self.pending() {
                return Ok(());
            }
            self.judge(&faults)?;
        }
        if let Some(op) = self.queue.front_mut() {
            let since = *op.submitted.get_or_insert(now);
            if now.duration_since(since) >= op.timeout {
                self.link.survey();
                return Err(describe::timeout(&*self.link, &self.group, op));
            }
        }
        self.mail.expire(&mut *self.link, &self.group, now)
    }

    fn judge(&mut self, faults: &[Fault]) -> Result<(), Error> {
        let what = match self.queue.front() {
            Some(op) => format!("{} #{}", name_of(op.collective), op.seq),
            None => "send or recv".to_owned(),
        };
        for fault in faults {
            if let Fault::Differs { seq, mine, found } = *fault {
                return Err(describe::mismatch(
                    &*self.link,
                    &self.group,
                    describe::collective(mine),
                    seq,
                    mine,
                    found,
                ));
            }
        }
        // Then the dead: they are the cause, what others report is the consequence.
        for fault in faults {
            if let Fault::Lost { rank, how } = fault {
                return Err(describe::lost(&*self.link, &self.group, what, *rank, how));
            }
        }
        for fault in faults {
            match fault {
                Fault::Poisoned { rank, why } => {
                    return Err(describe::reported(&*self.link, &self.group, what, *rank, why));
                }
                Fault::Left { rank } => {
                    let needed = self.queue.front().is_some_and(|op| !self.link.arrived(*rank, op.seq));
                    if needed || self.mail.needs(*rank) {
                        let how = "left the group (destroyed it or exited) before this operation";
                        return Err(describe::lost(&*self.link, &self.group, what, *rank, how));
                    }
                }
                Fault::Lost { .. } | Fault::Differs { .. } => {}
            }
        }
        Ok(())
    }

    /// The group is over: everything that waits ends with `error`, and the others are told.
    pub(crate) fn fail(&mut self, error: &Error) {
        self.link.poison(&describe::report(error));
        for mut op in self.queue.drain(..) {
            if let Some(work) = op.work.take() {
                work.finish(Err(error.clone()));
            }
        }
        self.mail.fail(error);
    }
}

pub(crate) type SharedWork = Arc<crate::work::Shared>;
