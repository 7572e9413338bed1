//! Description of a call that all transports share: its fingerprint, its channels, and how two ranks' calls differ.

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
    /// Reader on another node.
    pub const REMOTE: usize = usize::MAX;
}

/// One channel that this rank reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecvChannel {
    /// Rank that writes the channel; among the ranks of a node, its index on the node.
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
    /// Rank that made the other call; among the ranks of a node, its index on the node.
    pub rank: usize,
    /// Fingerprint of its call.
    pub theirs: CallFingerprint,
    /// Bytes on the channel: (expected here, offered there). Set only if the fingerprints are equal.
    pub bytes: Option<(u64, u64)>,
}
