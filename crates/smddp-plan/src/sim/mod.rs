//! Simulator: executes the programs of all ranks on a described cluster in virtual time.
//!
//! Every direction of every port is a first-in-first-out resource with a rate and a cost per message. Ports
//! are the rail of a rank, its port inside the node, and the uplink of a node if that is narrower. A message
//! has two events: it takes the out-port when it is sent, and the in-port when its first byte arrives, in
//! order of arrival. (Taking both at once would leave gaps in evenly loaded ports, up to a third too slow.)
//! The latency is between the two events. A rank has at most a window of bytes in flight in the network.
//!
//! ```text
//! out-port   |--- A ---|--- B ---|
//!                 latency \
//! in-port              |--- C ---|--- A ---|          A waits for C, which arrived first
//! ```
//!
//! Ranks run their pipelines as the executor does: step by step, segment by segment, and a send needs a free
//! slot of its channel. A plan with unnecessary waits is therefore slow here too, and a deadlock is an error.
//! Not modelled: congestion inside the network, contention for memory and PCIe, jitter, and the CPU work of
//! moving data. The result is a lower bound of the time, suitable for comparing plans.
//!
//! Times are integer picoseconds internally, so that a simulation gives the same result everywhere; seconds
//! in the API.

mod blocks;
mod cluster;
mod engine;
mod event;
mod flow;
mod job;
mod line;
mod outcome;
mod path;
mod ports;
mod search;
mod tape;
#[cfg(test)]
mod tests;

pub use blocks::Blocks;
pub use cluster::{Cluster, Override, Port};
pub use engine::{Load, replay};
pub use job::{Job, Run, UnsupportedPlan};
pub use line::{line_seconds, link_bytes_least};
pub use outcome::{Bar, Deadlock, Outcome, Side};
pub use path::{PathStep, PathSummary, Wait};
pub use search::{SearchResult, search};
