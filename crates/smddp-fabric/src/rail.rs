//! Interface of a fabric device, limited to the capabilities of EFA, the least capable provider.
//!
//! A device has messages of limited size without ordering, one-sided reads and writes of registered memory, and bounded queues.

use std::os::fd::RawFd;

/// Caller's id of an operation; returned once, with its completion.
pub type Context = u64;

/// Capabilities of a provider. All counts are per rail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RailLimits {
    /// Size of the largest message, in bytes.
    pub message: usize,
    /// Size of the largest one-sided operation, in bytes.
    pub one_sided: usize,
    /// Maximum number of sends, reads and writes in flight.
    pub operations: usize,
    /// Maximum number of posted receive buffers.
    pub receives: usize,
    /// Size of the completion queue.
    pub completions: usize,
    /// Set if the device writes natively. Other providers emulate writes with messages, and reads are better.
    pub writes: bool,
    /// Set if the provider holds messages back until a receive buffer is posted.
    pub holds_messages: bool,
}

/// Memory of this process registered on a rail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Registered {
    /// Descriptor for operations of this process.
    pub desc: usize,
    /// Key for operations of peers.
    pub key: u64,
    /// Address of the first byte for operations of peers.
    pub base: u64,
}

/// Local memory of an operation.
#[derive(Clone, Copy, Debug)]
pub struct LocalMemory {
    /// First byte.
    pub at: *mut u8,
    /// Number of bytes.
    pub bytes: usize,
    /// Local descriptor of the registration.
    pub desc: usize,
}

/// Remote memory of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteMemory {
    /// Address for operations of this process.
    pub address: u64,
    /// Key of the registration.
    pub key: u64,
}

/// Result of posting an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Posted {
    /// The device took the operation.
    Accepted,
    /// A queue is full: poll, then retry.
    QueueFull,
}

/// Completion queue event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Completion {
    /// A send, read or write is complete.
    Done(Context),
    /// A message of this many bytes is in the receive buffer.
    Received(Context, usize),
    /// A peer's write with this immediate data is complete.
    RemoteWrite(u32),
    /// A receive buffer was used up without a message: some devices use one for the immediate data of a write.
    BufferConsumed(Context),
    /// An operation failed; `None`: the failure does not belong to one operation.
    Failed(Option<Context>, String),
}

impl RailLimits {
    /// Returns the capabilities that both rails have.
    pub fn common(self, other: Self) -> Self {
        Self {
            message: self.message.min(other.message),
            one_sided: self.one_sided.min(other.one_sided),
            operations: self.operations.min(other.operations),
            receives: self.receives.min(other.receives),
            completions: self.completions.min(other.completions),
            writes: self.writes & other.writes,
            holds_messages: self.holds_messages & other.holds_messages,
        }
    }
}

/// Endpoint of one device, with its completion queue and its address vector.
///
/// # Safety
/// An endpoint reuses the local memory of an operation after its completion, and frees registered memory after the rail is
/// dropped. Therefore:
/// - A rail reports a [`Context`] that it has accepted at most once, in [`Completion::Done`], [`Completion::Received`],
///   [`Completion::BufferConsumed`] or [`Completion::Failed`]. The device does not access the operation's local memory afterwards.
/// - [`Completion::Received`] has the number of bytes that the device has written to the receive buffer.
/// - An operation accesses only its local memory, and only as its kind requires. Peers access only registered memory.
/// - After an operation that was not [`Posted::Accepted`], and after `drop`, the device accesses no memory of this process.
pub unsafe trait Rail: Send {
    /// Returns the capabilities of the device.
    fn limits(&self) -> RailLimits;
    /// Address that peers insert to reach this rail.
    fn address(&self) -> Vec<u8>;
    /// Registers memory for all operations of this process and of peers.
    ///
    /// # Errors
    /// The device rejects the registration; the text has its reason.
    ///
    /// # Safety
    /// The memory lives until the rail is dropped.
    unsafe fn register(&mut self, at: *mut u8, bytes: usize) -> Result<Registered, String>;
    /// Inserts a peer's address into the address vector; returns its handle.
    ///
    /// # Errors
    /// The device rejects the address.
    fn insert(&mut self, address: &[u8]) -> Result<u64, String>;

    /// Posts a receive buffer.
    ///
    /// # Errors
    /// For this and the following methods: the device is broken. A full queue is [`Posted::QueueFull`] instead.
    ///
    /// # Safety
    /// For this and the following methods: `local` is registered memory of this process that does not move. Until the operation's
    /// completion, nothing else reads it (receive, read) or writes it (send, write).
    unsafe fn receive(&mut self, local: LocalMemory, context: Context) -> Result<Posted, String>;
    /// Sends a message.
    ///
    /// # Errors
    /// See [`Rail::receive`].
    ///
    /// # Safety
    /// See [`Rail::receive`].
    unsafe fn send(&mut self, to: u64, local: LocalMemory, context: Context) -> Result<Posted, String>;
    /// Reads from a peer, or writes to it with `write` as immediate data, which arrives after all the bytes.
    ///
    /// # Errors
    /// See [`Rail::receive`].
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

    /// Makes progress, and appends a few completions at most.
    fn poll(&mut self, events: &mut Vec<Completion>);
    /// Returns a descriptor that becomes readable with the next completion. `None`: there is none, or completions are pending.
    fn wait_sources(&mut self) -> Option<RawFd>;
}
