//! The knobs of `fake_set` and `fake_get`, and the environment variables of their initial values.

/// The library's version in libfabric's packed format.
pub const VERSION: u64 = 0;
/// Number of devices.
pub const DEVICES: u64 = 1;
/// 1: writes are emulated.
pub const EMULATED_WRITE: u64 = 2;
/// 1: the provider supports no endpoint options.
pub const NO_OPTIONS: u64 = 3;
/// Number of open objects. Read-only.
pub const OPEN: u64 = 4;
/// Bit set of the endpoint options that were set, by option number. Read-only.
pub const OPTIONS: u64 = 5;
/// Numbers of inserted addresses, posted receive buffers and registered memory regions. Read-only.
pub const INSERTED: u64 = 6;
pub const POSTED: u64 = 7;
pub const REGIONS: u64 = 8;
/// Number of calls that violate EFA's rules. Read-only.
pub const WRONG: u64 = 9;
/// 1: the immediate data of a write consumes a receive buffer of its target, as on older devices.
pub const TAKES: u64 = 10;

/// 1: `fi_getinfo` installs a handler of SIGSTKFLT and flushes denormal numbers.
pub const RUDE: u64 = 11;

pub const VARIABLES: [(u64, &str); 4] = [
    (RUDE, "FAKE_EFA_RUDE"),
    (DEVICES, "FAKE_EFA_DEVICES"),
    (EMULATED_WRITE, "FAKE_EFA_EMULATED_WRITE"),
    (TAKES, "FAKE_EFA_TAKES"),
];
