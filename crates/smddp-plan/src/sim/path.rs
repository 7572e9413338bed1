//! Critical path: the waits of the last rank, the waits of the ranks it waited for, and so on.

use super::flow::NONE;
use super::ports::{Time, seconds};

/// One wait of a pipeline.
#[derive(Clone, Copy, Debug)]
pub(super) struct Record {
    pub(super) pipeline: u32,
    pub(super) action: u32,
    pub(super) wait: Wait,
    /// Rank that it waited for, if that is a writer.
    pub(super) peer: u32,
    /// Last wait of the other pipeline before the event that ended this wait.
    pub(super) from: u32,
    pub(super) until: Time,
    /// Send time of the message, if it waited for one.
    pub(super) posted: Time,
    pub(super) out_wait: u32,
    pub(super) in_wait: u32,
}

/// Event that a step of the path waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Wait {
    /// A message from another node.
    Network,
    /// A message from the same node.
    Local,
    /// A free slot.
    Credit,
}

impl Wait {
    /// Returns the name for output.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Network => "message from another node",
            Self::Local => "message inside the node",
            Self::Credit => "free slot",
        }
    }
}

/// One wait on the critical path. The next wait starts at its end, or later after work of the rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PathStep {
    /// Rank that waits.
    pub rank: usize,
    /// Index in the trace of the pipeline.
    pub step: usize,
    /// Event that it waits for.
    pub wait: Wait,
    /// Rank that it waited for; `None` at the start of the path.
    pub on: Option<usize>,
    /// Seconds from the start of the simulation to the start of the awaited event.
    pub begin: f64,
    /// Seconds from the start of the simulation to the end of the wait.
    pub end: f64,
    /// Seconds of the wait in the queue of the sender's port.
    pub out_queue: f64,
    /// Seconds of the wait in the queue of the receiver's port.
    pub in_queue: f64,
}

/// Follows the records back from `last`. Returns the path in the order of time.
pub(super) fn trace(records: &[Record], last: u32, rank_of: &dyn Fn(u32) -> usize) -> Vec<PathStep> {
    let mut path = Vec::new();
    let mut at = last;
    while at != NONE {
        let record = &records[at as usize];
        let before = (record.from != NONE).then(|| &records[record.from as usize]);
        let begin = match record.wait {
            Wait::Network | Wait::Local => record.posted,
            Wait::Credit => before.map_or(0, |before| before.until),
        };
        path.push(PathStep {
            rank: rank_of(record.pipeline),
            step: record.action as usize,
            wait: record.wait,
            on: match record.peer {
                NONE => before.map(|before| rank_of(before.pipeline)),
                peer => Some(peer as usize),
            },
            begin: seconds(begin),
            end: seconds(record.until),
            out_queue: f64::from(record.out_wait) * 1e-9,
            in_queue: f64::from(record.in_wait) * 1e-9,
        });
        at = record.from;
    }
    path.reverse();
    path
}

/// Time of a path by cause, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PathSummary {
    /// Messages in flight between nodes.
    pub network: f64,
    /// Number of messages between nodes.
    pub network_hops: usize,
    /// Waiting for busy ports, to and from the network or inside the node.
    pub queue: f64,
    /// Messages in flight inside nodes.
    pub local: f64,
    /// Number of messages inside nodes.
    pub local_hops: usize,
    /// Waiting for free slots.
    pub credit: f64,
    /// The rest: work of the ranks.
    pub work: f64,
}

impl PathSummary {
    /// Sums up a path of a simulation that takes `total` seconds.
    pub fn of(path: &[PathStep], total: f64) -> Self {
        let mut sum = Self::default();
        for step in path {
            let queue = step.out_queue + step.in_queue;
            let moved = (step.end - step.begin - queue).max(0.0);
            match step.wait {
                Wait::Network => {
                    sum.network += moved;
                    sum.network_hops += 1;
                }
                Wait::Local => {
                    sum.local += moved;
                    sum.local_hops += 1;
                }
                Wait::Credit => sum.credit += moved,
            }
            sum.queue += queue;
        }
        sum.work = (total - sum.network - sum.local - sum.credit - sum.queue).max(0.0);
        sum
    }
}
