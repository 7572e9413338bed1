//! Transport of bytes between the ranks of one group.
//!
//! A [`Group`] is one rank's end of a communicator. It has shared memory with the ranks of its node, and a wire to the ranks of
//! other nodes if there are any.

#![warn(missing_docs)]

pub mod bootstrap;
mod facts;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod handshake;
pub mod joint;
mod net;
mod p2p;
pub mod process;
mod rank_info;
pub mod shm;
mod socket_io;
mod token;

use smddp_base::{CloseOnFork, lock};

pub use smddp_base::{fork, threads, warning};

pub use facts::{AbortReport, CallMismatch, Facts, Liveness, QueryAnswer, RankFacts};
pub use joint::{Group, GroupInfo, Health, Messages, Outgoing, RecvTarget, RoutedChannels, Routes};
pub use net::channels::Carrier;
pub use net::{fabric, interface};
pub use p2p::{Envelope, MessageId, MessageTransport};
pub use process::{Exporter, MemoryExport, SingleCopy, Sleeper, SymmetricBuffer, SymmetricUsage};
pub use rank_info::{RankInfo, RankInfoError, host_name};
pub use shm::{SharedPage, ZeroCopySource};
pub use token::Token;

/// Identity of a call: equal on all its ranks. The transport compares it; the core defines the meaning of the bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CallFingerprint {
    /// Operation and its parameters, for example collective, data type and root.
    pub call: u64,
    /// Number of elements, possibly with a hash of uneven counts; or the tag of a point-to-point message.
    pub count: u64,
}

/// One channel that this rank writes in an operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SendChannel {
    /// Ranks that read it, ascending; [`SendChannel::REMOTE`] for a reader on another node.
    pub readers: Vec<usize>,
    /// Bytes of the largest message.
    pub slot_bytes: usize,
    /// Messages in the whole operation.
    pub messages: u64,
    /// Payload bytes in the whole operation. Each reader compares them with the number that it expects.
    pub bytes: u64,
}

impl SendChannel {
    pub(crate) const REMOTE: usize = usize::MAX;
}

/// One channel that this rank reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecvChannel {
    /// Rank that writes the channel; in [`shm::LocalChannels`] its index on the node.
    pub rank: usize,
    /// Index of the channel among the writer's send channels.
    pub channel: usize,
    /// Index of this rank among its readers.
    pub reader: usize,
    /// Bytes of the largest message.
    pub slot_bytes: usize,
    /// Messages in the whole operation.
    pub messages: u64,
    /// Payload bytes in the whole operation.
    pub bytes: u64,
}

/// The channels of one bound call's operations at one rank.
#[derive(Clone, Debug, Default)]
pub struct Channels {
    /// Channels that this rank writes.
    pub send_channels: Vec<SendChannel>,
    /// Channels that this rank reads.
    pub recv_channels: Vec<RecvChannel>,
    /// Set if every channel carries one message that fits into a header: the payload then travels with the header.
    pub inline: bool,
    /// Desired and minimum number of slots per channel.
    pub depth: (usize, usize),
    /// Slots per channel on which all ranks agree: the number of messages by which a writer on another node may be ahead of a
    /// reader.
    pub window: usize,
}

/// Two ranks made different calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// Rank that made the other call; in [`shm::LocalChannels`] its index on the node.
    pub rank: usize,
    /// Fingerprint of its call.
    pub theirs: CallFingerprint,
    /// Bytes on the channel: (expected here, offered there). Set only if the fingerprints are equal.
    pub bytes: Option<(u64, u64)>,
}

/// Reason why an operation with a rank cannot complete.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The process ended without leaving the group.
    Lost { rank: usize, how: String },
    /// This process cannot reach the rank because of a local limit or permission. The rank itself may be healthy.
    Unreachable { rank: usize, reason: String },
    /// The rank left the group (closed it or exited in good order).
    Left { rank: usize },
    /// The rank aborted the group and reported the reason.
    Aborted { rank: usize, reason: String },
    /// Operation `seq`, which needed nothing of that rank, has ended here, and the rank made another call in its place.
    Mismatch { seq: u64, mine: CallFingerprint, found: Mismatch },
}

/// Maximum length of an abort report in bytes.
pub const MAX_ABORT_REPORT: usize = 2000;
