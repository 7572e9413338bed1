//! How bytes move between the ranks of one group.
//!
//! A [`Link`] is one rank's end of one communicator's wires. It *lends cells*: a writer fills its next cell of
//! a channel and publishes it, a reader looks at it where it lies and releases it. Nothing here blocks; what
//! cannot be done yet is `None` or `false`, never an error.

pub mod board;
pub mod bootstrap;
pub mod fork;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
pub mod joint;
pub mod loopback;
mod net;
mod send;
pub mod shm;
pub mod warn;

#[cfg(any(test, fuzzing))]
pub use net::feed;
pub use net::{fabric, interface};

use std::os::fd::RawFd;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// What a call is: the same on all its ranks, whatever the bits mean to the core.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Head {
    pub what: u64,
    pub count: u64,
}

/// One channel that this rank writes in an operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outlet {
    /// Ranks that read it, ascending; [`Outlet::ELSEWHERE`] for one that another wire serves.
    pub readers: Vec<usize>,
    /// Bytes of the largest message.
    pub cell: usize,
    /// Messages in the whole operation.
    pub messages: u64,
    /// Payload in the whole operation, held against what each reader expects.
    pub bytes: u64,
}

impl Outlet {
    pub(crate) const ELSEWHERE: usize = usize::MAX;
}

/// One channel that this rank reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Inlet {
    pub rank: usize,
    pub channel: usize,
    /// My index among its readers.
    pub reader: usize,
    /// Bytes of the largest message.
    pub cell: usize,
    pub messages: u64,
    pub bytes: u64,
}

/// The channels of one bound call's operations at one rank.
#[derive(Clone, Debug, Default)]
pub struct Wiring {
    pub outlets: Vec<Outlet>,
    pub inlets: Vec<Inlet>,
    /// Every channel carries one message that fits a slot: payload travels with the header.
    pub inline: bool,
    /// Cells per channel wanted, and the fewest that work.
    pub depth: (usize, usize),
    /// Cells per channel on which all ranks agree: how far a writer on another node may be ahead of a reader.
    pub window: usize,
    /// Empty where the wiring is made.
    pub ways: Ways,
}

/// What its link made of a wiring when it first met it. A wiring is one link's from then on.
#[derive(Clone, Default)]
pub struct Ways(pub(crate) OnceLock<Arc<joint::Routes>>);

impl std::fmt::Debug for Ways {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.0.get().is_some() { "Ways(found)" } else { "Ways(unknown)" })
    }
}

/// Two ranks made different calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mismatch {
    pub rank: usize,
    pub theirs: Head,
    /// Bytes on the channel: expected here, offered there (only where the heads agree).
    pub bytes: Option<(u64, u64)>,
}

/// Why a rank will not come any more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The process is gone without having left the group.
    Lost { rank: usize, how: String },
    /// This process cannot reach the rank, which may be well: it lacks something.
    Unable { rank: usize, why: String },
    /// The rank left the group (closed it or exited in good order).
    Left { rank: usize },
    /// The rank declared the group unusable, and says why.
    Poisoned { rank: usize, why: String },
    /// Operation `seq` is over here, which needed nothing of that rank, and it made another call.
    Differs { seq: u64, mine: Head, found: Mismatch },
}

/// A message between two ranks, outside the collectives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mail {
    pub tag: u64,
    pub what: u64,
    pub bytes: u64,
}

/// Where a message of P2P stands: the sender's or the receiver's half.
pub type Stream = u64;

/// Bytes of the text in which a rank tells why the group is dead.
pub const LONGEST_WHY: usize = 2000;

/// One rank's end of a communicator. One owner at a time; `&self` methods are safe from any thread.
pub trait Link: Send {
    fn rank(&self) -> usize;
    fn size(&self) -> usize;
    /// Payload that fits a slot.
    fn slot_bytes(&self) -> usize;

    /// Looks at what came in over wires that nobody watches otherwise; once before each round of looks.
    fn turn(&mut self) -> bool {
        false
    }
    /// Whether something that this rank has finished with is still to be sent: then somebody has to go on driving.
    fn busy(&self) -> bool {
        false
    }
    /// Opens operation `seq`: takes what memory it needs and tells the others what it is. `false`: not yet, or not
    /// at all because of a fault (an operation that needs nothing of the others would not notice it otherwise).
    fn begin(&mut self, seq: u64, head: Head, wiring: &Wiring) -> bool;
    /// My next free cell of outlet `channel`.
    fn cell(&mut self, channel: usize) -> Option<*mut u8>;
    /// The cell filled last is a message of `bytes` now.
    fn publish(&mut self, channel: usize, bytes: usize);
    /// The next unread message of inlet `inlet`, where it lies.
    fn message(&mut self, inlet: usize) -> Result<Option<*const u8>, Mismatch>;
    /// That message is read.
    fn release(&mut self, inlet: usize);
    /// Holds the headers of the writers that sent nothing here against mine, too; `false`: not all of them are there.
    fn settle(&mut self) -> Result<bool, Mismatch>;
    /// The operation is over at this rank; its memory is reused when its readers are done.
    fn end(&mut self);
    /// Whether the readers' caches are far from this rank's: then large cells are better written past the caches.
    fn far(&self) -> bool;
    /// Wakes the ranks that sleep and should see what was published; called before this rank turns to other things.
    fn flush(&mut self);
    /// Whether `rank` has begun operation `seq` (or a later one); `None`: not known.
    fn arrived(&self, rank: usize, seq: u64) -> Option<bool>;
    /// Whether operation `seq` cannot end here without `rank`, which is not known to have begun it.
    fn awaits(&self, rank: usize, seq: u64) -> bool {
        self.arrived(rank, seq) == Some(false)
    }
    /// A deadline has passed: finds out within a few seconds which ranks have arrived, where that is not known; no longer
    /// than until another rank tells why the group is dead.
    fn survey(&mut self) {}
    /// Ranks whose processes did not answer when they were asked so.
    fn silent(&self) -> Vec<usize> {
        Vec::new()
    }
    /// What `rank` says operation `seq` is, if it begun it and has not gone on far.
    fn head_of(&self, rank: usize, seq: u64) -> Option<Head>;

    /// Starts sending a message; `None`: not yet.
    fn mail_open(&mut self, to: usize, mail: Mail) -> Option<Stream>;
    /// Next free cell of an outgoing message: address and room in bytes.
    fn mail_cell(&mut self, stream: Stream) -> Option<(*mut u8, usize)>;
    /// The cell filled last is a piece of `bytes` now.
    fn mail_publish(&mut self, stream: Stream, bytes: usize);
    /// Everything is written; memory comes back when the receiver is done.
    fn mail_close(&mut self, stream: Stream);
    /// Whether no message of `rank` is still to come, though what it called for may be.
    fn mailed_last(&self, _rank: usize) -> bool {
        false
    }
    /// Next message that `from` announced and that was not yet taken from the wire.
    fn mail_next(&mut self, from: usize) -> Option<(Mail, Stream)>;
    /// Next piece of an incoming message.
    fn mail_piece(&mut self, from: usize, stream: Stream) -> Option<(*const u8, usize)>;
    fn mail_release(&mut self, from: usize, stream: Stream);

    /// Anybody who is gone, left or declared the group dead. Called while this rank waits: the ranks that it waits for
    /// are looked after from now on, if they were not before.
    fn faults(&mut self) -> Vec<Fault>;
    /// Tells the others that this group is dead and why, in [`LONGEST_WHY`] bytes; more is cut off.
    fn poison(&mut self, why: &str);
    /// Leaves in good order.
    fn leave(&mut self);
    /// "rank 3 (host h1, pid 812)".
    fn describe(&self, rank: usize) -> String;

    /// Descriptors that end a sleep besides the bell, with their poll events; false: nobody may sleep long.
    fn interest(&self, _fds: &mut Vec<(RawFd, i16)>) -> bool {
        true
    }
    /// How ranks of other nodes are reached; empty where there are none.
    fn way(&self) -> String {
        String::new()
    }
    /// The way to `rank` as this process's kernel sees it, once something has gone there and back; `None` where no kernel
    /// does.
    fn round_trip(&self, _rank: usize) -> Option<Duration> {
        None
    }
    /// So many bytes may be on their way to one rank of another node: the wire is to have room for them.
    fn expect(&mut self, _bytes: usize) {}
    /// What the ranks of this node share besides messages; `None` in a group of one rank.
    fn board(&self) -> Option<Arc<dyn board::Board>> {
        None
    }
    /// The bell that rings where something comes in, for any thread.
    fn sleeper(&self) -> Box<dyn Sleeper>;
}

/// The bell on which the threads of this process sleep while nothing moves.
pub trait Sleeper: Send + Sync {
    /// Wakes all who sleep.
    fn ring(&self);
    /// I am about to sleep: what is published from here on rings. One more look at the wires comes now, which sees what was
    /// published before; then [`Sleeper::sleep`] with this ticket, unless there was something; then [`Sleeper::rise`].
    fn drowse(&self) -> u32;
    /// Sleeps until it rings after `ticket` was taken, one of `fds` is ready, or the time is up.
    fn sleep(&self, ticket: u32, fds: &[(RawFd, i16)], at_most: Duration);
    fn rise(&self);
}
