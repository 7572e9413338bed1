//! What a fabric endpoint offers, in the terms of EFA, the least of them: messages of limited size that arrive in no
//! order, one-sided reads and writes into registered memory, bounded queues.

use std::os::fd::RawFd;

/// The caller's number for an operation; comes back once, with its end.
pub(crate) type Context = u64;

/// What a provider can do. All counts are per rail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
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
pub(crate) struct Local {
    pub(crate) at: *mut u8,
    pub(crate) bytes: usize,
    pub(crate) desc: usize,
}

/// Bytes of another process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Remote {
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

/// An endpoint per rail, each with its completion queue and its book of addresses.
pub(crate) trait Provider: Send {
    /// "efa (libfabric 2.1)".
    fn describe(&self) -> String;
    fn rails(&self) -> usize;
    fn limits(&self) -> Limits;
    /// What others insert to reach this rail.
    fn address(&self, rail: usize) -> Vec<u8>;
    /// Makes memory known to a rail, for all operations of this process and of others.
    ///
    /// # Safety
    /// The memory lives until the provider is dropped.
    unsafe fn register(&mut self, rail: usize, at: *mut u8, bytes: usize) -> Result<Registered, String>;
    /// Notes a peer's address; what is returned stands for it.
    fn insert(&mut self, rail: usize, address: &[u8]) -> Result<u64, String>;

    /// # Safety
    /// For this and the following: `local` is registered memory of this process that stays put, and that nobody reads
    /// (receive, read) or writes (send, write) in another way until the operation's end was told.
    unsafe fn receive(&mut self, rail: usize, local: Local, context: Context) -> Result<Posted, String>;
    /// # Safety
    /// See [`Provider::receive`].
    unsafe fn send(&mut self, rail: usize, to: u64, local: Local, context: Context)
    -> Result<Posted, String>;
    /// # Safety
    /// See [`Provider::receive`].
    unsafe fn read(
        &mut self,
        rail: usize,
        from: u64,
        local: Local,
        remote: Remote,
        context: Context,
    ) -> Result<Posted, String>;
    /// A write that tells the peer `number` when it is there.
    ///
    /// # Safety
    /// See [`Provider::receive`].
    unsafe fn write(
        &mut self,
        rail: usize,
        to: u64,
        local: Local,
        remote: Remote,
        number: u32,
        context: Context,
    ) -> Result<Posted, String>;

    /// Moves the rail on and appends what happened, a few events at most.
    fn poll(&mut self, rail: usize, events: &mut Vec<Event>);
    /// Appends the descriptors that tell of events to come. `false`: there are none, or events are waiting already.
    fn interest(&mut self, fds: &mut Vec<(RawFd, i16)>) -> bool;
}
