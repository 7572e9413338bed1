//! What moves, as data: one rank's part of a collective, proven before a byte moves.
//!
//! A planner is a pure function from a question ([`Ask`]) to one rank's [`Program`]. It knows neither
//! memory nor wires nor sizes in bytes; those come when the program is bound. [`check`] builds the programs
//! of all ranks and replays them symbolically.
#![forbid(unsafe_code)]

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
pub use choice::{Choice, Counts, Decision, Group, Memory, Network, Reason, Settings, Shape, decide};
pub use format::{Format, Formats};
pub use ir::{Ask, Association, Buffer, Channel, Collective, Lane, Program, Source, Span, Step, Timed};
pub use topology::Topology;
