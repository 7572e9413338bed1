//! Observation of calls: counters by path, and the recorder of recent operations.

mod counters;
pub(crate) mod recorder;
