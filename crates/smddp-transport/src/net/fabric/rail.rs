//! What a fabric endpoint offers, in the terms of EFA, the least of them: messages of limited size that arrive in no
//! order, one-sided reads and writes into registered memory, bounded queues.

use std::os::fd::RawFd;

/// The caller's number for an operation; comes back once, with its end.
pub(crate) type Context = u64;

/// What a provider can do. All counts are per rail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RailLimits {
    /// Bytes of the largest message.
    pub(crate) message: usize,
    /// Bytes of the largest one-sided operation.
    pub(crate) one_sided: usize,
    /// Sends, reads and writes under way at once.
    pub(crate) operations: usize,
    /// Receive buffers posted at once.
    pub(crate) receives: usize,
    /// Completions that fit the queue.
    pub(crate) completions: usize,
    /// Whether the device writes: otherwise a write is messages in disguise, and reads are better.
    pub(crate) writes: bool,
    /// Whether the provider holds messages back until a receive buffer is there.
    pub(crate) patient: bool,
}

/// Memory of this process as a rail knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Registered {
    /// For operations of this process.
    pub(crate) desc: usize,
    /// For operations of others.
    pub(crate) key: u64,
    /// What others give for its first byte.
    pub(crate) base: u64,
}

/// Bytes of this process in an operation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LocalMemory {
    pub(crate) at: *mut u8,
    pub(crate) bytes: usize,
    pub(crate) desc: usize,
}

/// Bytes of another process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RemoteMemory {
    pub(crate) address: u64,
    pub(crate) key: u64,
}

/// What became of an operation that was handed over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Posted {
    Yes,
    /// A queue is full: poll, then try again.
    Again,
}

/// What a completion queue tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// A send, read or write is over.
    Done(Context),
    /// A message of so many bytes is in this receive buffer.
    Received(Context, usize),
    /// A peer's write with this number is in my memory.
    Written(u32),
    /// A receive buffer was used up, and no message is in it: some devices take one for each write's number.
    Taken(Context),
    /// Something failed; `None`: not to be pinned on one operation.
    Failed(Option<Context>, String),
}

impl RailLimits {
    /// What two rails can do alike.
    pub(crate) fn both(self, other: Self) -> Self {
        Self {
            message: self.message.min(other.message),
            one_sided: self.one_sided.min(other.one_sided),
            operations: self.operations.min(other.operations),
            receives: self.receives.min(other.receives),
            completions: self.completions.min(other.completions),
            writes: self.writes & other.writes,
            patient: self.patient & other.patient,
        }
    }
}

/// One device's endpoint, with its completion queue and its book of addresses.
pub(crate) trait Rail: Send {
    fn limits(&self) -> RailLimits;
    /// What others insert to reach it.
    fn address(&self) -> Vec<u8>;
    /// Makes memory known to it, for all operations of this process and of others.
    ///
    /// # Safety
    /// The memory lives until the rail is dropped.
    unsafe fn register(&mut self, at: *mut u8, bytes: usize) -> Result<Registered, String>;
    /// Notes a peer's address; what is returned stands for it.
    fn insert(&mut self, address: &[u8]) -> Result<u64, String>;

    /// # Safety
    /// For this and the following: `local` is registered memory of this process that stays put, and that nobody reads
    /// (receive, a read) or writes (send, a write) in another way until the operation's end was told.
    unsafe fn receive(&mut self, local: LocalMemory, context: Context) -> Result<Posted, String>;
    /// # Safety
    /// See [`Rail::receive`].
    unsafe fn send(&mut self, to: u64, local: LocalMemory, context: Context) -> Result<Posted, String>;
    /// Reads from a peer; or writes to it, and tells it that number when all is there.
    ///
    /// # Safety
    /// See [`Rail::receive`].
    unsafe fn one_sided(
        &mut self,
        peer: u64,
        local: LocalMemory,
        remote: RemoteMemory,
        write: Option<u32>,
        context: Context,
    ) -> Result<Posted, String>;

    /// Moves it on and appends what happened, a few events at most.
    fn poll(&mut self, events: &mut Vec<Event>);
    /// The descriptor that tells of events to come. `None`: there is none, or events are waiting already.
    fn interest(&mut self) -> Option<RawFd>;
}
