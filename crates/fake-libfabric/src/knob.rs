//! Knobs of a simulated fabric, the environment variables of their initial values, and the rules of EFA devices.

/// The library's version in libfabric's packed format.
pub const VERSION: u64 = 0;
/// Number of devices.
pub const DEVICES: u64 = 1;
/// Set to 1 to emulate writes.
pub const EMULATED_WRITE: u64 = 2;
/// Set to 1 for a provider without endpoint options.
pub const NO_OPTIONS: u64 = 3;
/// Number of open objects. Read-only.
pub const OPEN: u64 = 4;
/// Bit set of the endpoint options that were set, by option number. Read-only.
pub const OPTIONS: u64 = 5;
/// Number of inserted addresses. Read-only.
pub const INSERTED: u64 = 6;
/// Number of posted receive buffers. Read-only.
pub const POSTED: u64 = 7;
/// Number of registered memory regions. Read-only.
pub const REGIONS: u64 = 8;
/// Number of violations of EFA's rules. Read-only.
pub const VIOLATIONS: u64 = 9;
/// Set to 1 for older devices: the immediate data of a write consumes a receive buffer of its target.
pub const DATA_CONSUMES_BUFFER: u64 = 10;
/// Set to 1 for a library that changes process state: `fi_getinfo` installs a handler of SIGSTKFLT and flushes denormal
/// numbers.
pub const CHANGES_PROCESS_STATE: u64 = 11;
/// Seed of the random numbers. Without one, they differ between runs.
pub const SEED: u64 = 12;
/// Bytes of the largest message; 0: the default.
pub const MESSAGE: u64 = 13;
/// Bytes of the largest read or write; 0: the default.
pub const ONE_SIDED: u64 = 14;
/// Maximum number of pending operations per endpoint; 0: the default.
pub const OPERATIONS: u64 = 15;
/// Maximum number of posted receive buffers per endpoint; 0: the default.
pub const RECEIVES: u64 = 16;
/// Maximum number of unread completions per endpoint; 0: the default.
pub const COMPLETIONS: u64 = 17;
/// Bit set of the rules that are switched off, see [`Rule::bit`].
pub const WITHOUT: u64 = 18;
/// Bit set of the violated rules. Read-only.
pub const VIOLATED: u64 = 19;

/// Number of knobs.
pub const COUNT: usize = 20;

/// Environment variables of the initial values of fabric 0.
pub const VARIABLES: [(u64, &str); 5] = [
    (CHANGES_PROCESS_STATE, "FAKE_EFA_CHANGES_PROCESS_STATE"),
    (DEVICES, "FAKE_EFA_DEVICES"),
    (EMULATED_WRITE, "FAKE_EFA_EMULATED_WRITE"),
    (DATA_CONSUMES_BUFFER, "FAKE_EFA_DATA_CONSUMES_BUFFER"),
    (SEED, "FAKE_EFA_SEED"),
];

/// Rule of EFA devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// Local memory needs its descriptor.
    Descriptor,
    /// The provider chooses the keys, at random.
    Key,
    /// Remote memory is identified by its virtual address.
    Address,
    /// Messages have a maximum size.
    Message,
    /// Reads and writes have a maximum size.
    OneSided,
    /// Messages, parts of reads and writes, and completions arrive in any order.
    Order,
    /// A receive buffer must be posted before its message arrives.
    Receive,
    /// Queues are full at random, and a caller must read completions before it retries.
    Again,
    /// A completion queue that is not read overruns.
    Completions,
    /// A device serves the reads and writes of devices in its address vector only.
    AddressVector,
    /// Devices have no native writes unless [`EMULATED_WRITE`] is 0.
    Writes,
    /// Calls have valid arguments. This rule cannot be switched off.
    Call,
}

impl Rule {
    pub const ALL: [Self; 12] = [
        Self::Descriptor,
        Self::Key,
        Self::Address,
        Self::Message,
        Self::OneSided,
        Self::Order,
        Self::Receive,
        Self::Again,
        Self::Completions,
        Self::AddressVector,
        Self::Writes,
        Self::Call,
    ];

    /// Returns the bit of this rule in [`WITHOUT`] and [`VIOLATED`].
    pub const fn bit(self) -> u64 {
        1 << self as u64
    }
}
