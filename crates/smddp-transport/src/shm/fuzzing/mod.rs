//! The inner borders of shared memory.

mod unix;
mod words;

pub(crate) use unix::{answered, callers};
pub(crate) use words::{Words, pair};
