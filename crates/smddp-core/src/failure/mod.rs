//! Failure monitor, abort reports, error texts, and the log of calls that ranks compare. Nothing here reads a clock,
//! sleeps, locks or performs I/O.

pub(crate) mod call_log;
#[cfg(any(test, feature = "record"))]
pub(crate) mod case_text;
pub(crate) mod deadlock;
pub(crate) mod error_text;
pub(crate) mod limits;
pub(crate) mod monitor;
pub(crate) mod names;
pub(crate) mod pending;
pub(crate) mod report;
pub(crate) mod straggler_query;
#[cfg(test)]
pub(crate) mod tests;
