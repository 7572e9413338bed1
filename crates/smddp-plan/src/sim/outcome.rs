//! Results of a simulation.

use super::path::PathStep;

/// Activity that a bar of a drawing shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Sending into the network.
    Send,
    /// Receiving from the network.
    Receive,
    /// Writing for the ranks of the node.
    Write,
    /// Reading from a rank of the node.
    Read,
}

/// A message at a port of a watched rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bar {
    /// Rank of the port.
    pub rank: usize,
    /// The peer; for a write, its first reader.
    pub peer: usize,
    /// Port and direction.
    pub side: Side,
    /// Time at which the message takes the port, in seconds.
    pub begin: f64,
    /// Time at which the port is free again, in seconds.
    pub end: f64,
    /// Size of the message in bytes.
    pub bytes: u64,
}

/// Result of a simulation.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Seconds until the last rank has finished.
    pub seconds: f64,
    /// Bytes that each node sent into the network.
    pub out_bytes: Vec<u64>,
    /// Bytes that each node received from the network.
    pub in_bytes: Vec<u64>,
    /// Number of messages in the network.
    pub network_messages: u64,
    /// Number of messages inside nodes. A write for all readers is one message.
    pub local_messages: u64,
    /// Waits of the critical path, in the order of time.
    pub path: Vec<PathStep>,
    /// Messages of the watched ranks, for drawing.
    pub bars: Vec<Bar>,
}

/// Some pipelines did not finish: too few slots, or an incorrect plan.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("deadlock: {pipelines} pipelines cannot finish, the first at rank {rank}, step {step}")]
pub struct Deadlock {
    /// Number of pipelines that did not finish.
    pub pipelines: usize,
    /// Rank of the first of them.
    pub rank: usize,
    /// Index in the trace of the pipeline.
    pub step: usize,
}
