//! What `fake_set` and `fake_get` take, and the variables that a process begins with.

/// The library's version, as libfabric packs it.
pub const VERSION: u64 = 0;
/// Devices.
pub const DEVICES: u64 = 1;
/// 1: writes are emulated.
pub const EMULATED_WRITE: u64 = 2;
/// 1: unknown to the provider are all options of endpoints.
pub const NO_OPTIONS: u64 = 3;
/// Objects that are open. Only read.
pub const OPEN: u64 = 4;
/// Options set so far, one bit for each by its number. Only read.
pub const OPTIONS: u64 = 5;
/// Addresses inserted, receive buffers posted, memory regions registered. Only read.
pub const INSERTED: u64 = 6;
pub const POSTED: u64 = 7;
pub const REGIONS: u64 = 8;
/// Calls that EFA would not take. Only read.
pub const WRONG: u64 = 9;
/// 1: a write's number takes a receive buffer of its target, as on older devices.
pub const TAKES: u64 = 10;

/// 1: `fi_getinfo` installs a handler of SIGSTKFLT and flushes denormal numbers.
pub const RUDE: u64 = 11;

pub const VARIABLES: [(u64, &str); 4] = [
    (RUDE, "FAKE_EFA_RUDE"),
    (DEVICES, "FAKE_EFA_DEVICES"),
    (EMULATED_WRITE, "FAKE_EFA_EMULATED_WRITE"),
    (TAKES, "FAKE_EFA_TAKES"),
];
