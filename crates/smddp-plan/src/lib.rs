//! Collective plans as data: the program of each rank, checked before any byte moves.
//!
//! A planner is a pure function from a [`PlanRequest`] to the [`Program`] of one rank. It depends on neither
//! memory addresses, transports nor sizes in bytes; binding supplies those. [`check`] builds the programs of
//! all ranks and executes them symbolically.
#![forbid(unsafe_code)]
#![warn(missing_docs, clippy::missing_errors_doc)]

pub mod algorithms;
pub mod check;
pub mod choice;
pub mod format;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
pub mod ir;
pub mod names;
pub mod sim;
pub mod topology;
pub mod tune;

pub use algorithms::{Algorithm, plan};
pub use choice::{Choice, Counts, Decision, GroupShape, Memory, Network, Reason, Settings, Shape, decide};
pub use format::{Format, Formats};
pub use ir::{
    Association, Buffer, Channel, Collective, Pipeline, PlanRequest, Program, Source, Span, Step, Timed,
};
pub use topology::Topology;
