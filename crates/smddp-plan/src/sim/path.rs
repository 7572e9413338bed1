//! The critical path: what the last rank waited for, what that waited for, and so on.

use super::flow::NOBODY;
use super::ports::{Time, seconds};

/// A lane waited.
#[derive(Clone, Copy, Debug)]
pub(super) struct Record {
    pub(super) lane: u32,
    pub(super) action: u32,
    pub(super) wait: Wait,
    /// Whom it waited for, where that is a writer.
    pub(super) peer: u32,
    /// The last wait of the lane that this one waited for, when it did what was waited for.
    pub(super) from: u32,
    pub(super) until: Time,
    /// Of a message: when it was sent.
    pub(super) posted: Time,
    pub(super) out_wait: u32,
    pub(super) in_wait: u32,
}

/// What a step of the path waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Wait {
    /// A message from another node.
    Network,
    /// A message from the same node.
    Local,
    /// A free cell.
    Credit,
}

impl Wait {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Network => "message from another node",
            Self::Local => "message inside the node",
            Self::Credit => "free cell",
        }
    }
}

/// One wait on the critical path; the next begins where this one ended, or later by the rank's own work.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PathStep {
    pub rank: usize,
    /// Counted in what the replay makes of the lane's steps.
    pub step: usize,
    pub wait: Wait,
    /// Whom it waited for; `None` at the beginning of everything.
    pub on: Option<usize>,
    /// Seconds since the beginning: since when that was under way, and until when.
    pub begin: f64,
    pub end: f64,
    /// Of that, seconds in line for the sender's port and for the receiver's.
    pub out_queue: f64,
    pub in_queue: f64,
}

/// Follows the records back from `last`; the path in the order of time.
pub(super) fn trace(records: &[Record], last: u32, rank_of: &dyn Fn(u32) -> usize) -> Vec<PathStep> {
    let mut path = Vec::new();
    let mut at = last;
    while at != NOBODY {
        let record = &records[at as usize];
        let before = (record.from != NOBODY).then(|| &records[record.from as usize]);
        let begin = match record.wait {
            Wait::Network | Wait::Local => record.posted,
            Wait::Credit => before.map_or(0, |before| before.until),
        };
        path.push(PathStep {
            rank: rank_of(record.lane),
            step: record.action as usize,
            wait: record.wait,
            on: match record.peer {
                NOBODY => before.map(|before| rank_of(before.lane)),
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

/// Where the time of a path went, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PathSummary {
    /// Messages between nodes, under way; how many.
    pub network: f64,
    pub network_hops: usize,
    /// In line for a port, into the network or out of it or inside the node: the port was busy with other
    /// messages.
    pub queue: f64,
    /// Messages inside nodes, under way; how many.
    pub local: f64,
    pub local_hops: usize,
    /// Waiting for free cells.
    pub credit: f64,
    /// The rest: the ranks' own work.
    pub work: f64,
}

impl PathSummary {
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
