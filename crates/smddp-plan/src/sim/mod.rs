//! The cost model: replays the real programs of all ranks on a described cluster, without a clock.
//!
//! Every direction of every port (a rank's rail to the network, its port inside the node, a node's uplink where
//! that is the narrower one) is a first-in-first-out resource with a rate and a cost per message. A message has
//! two events: when it is sent it takes the out-port, and when its first byte arrives it takes the in-port, in
//! the order of arrival. (Taking both at once would leave gaps in ports that are loaded evenly: up to a third
//! too slow.) In between lies the latency. A rank has at most a window of bytes under way in the network.
//!
//! ```text
//! out-port   |--- A ---|--- B ---|
//!                 latency \
//! in-port              |--- C ---|--- A ---|          A waits for C, which arrived first
//! ```
//!
//! Ranks run their lanes as the executor does: step by step, segment by segment, and a send needs a free cell of
//! its channel. So a schedule that waits in the wrong place is slow here, too; one that deadlocks is an error.
//! What is left out: congestion inside the network, contention for memory and PCIe, jitter, and the processor's
//! part in moving data. The result is a bound, good for comparing schedules.
//!
//! Times are whole picoseconds inside, so that a replay is the same everywhere; seconds outside.

mod blocks;
mod cluster;
mod engine;
mod flow;
mod job;
mod line;
mod path;
mod ports;
mod search;
mod tape;
#[cfg(test)]
mod tests;

pub use blocks::Blocks;
pub use cluster::{Cluster, Override, Port};
pub use engine::{Bar, Load, Outcome, Side, Stuck, replay};
pub use job::{Job, Run, Unplanned};
pub use line::{line_seconds, link_bytes_least};
pub use path::{PathStep, PathSummary, Wait};
pub use search::{Found, search};
