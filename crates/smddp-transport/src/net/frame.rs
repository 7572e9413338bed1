//! The header in front of every payload between nodes: 64 bytes, little endian.

/// Bytes of an encoded header.
pub(crate) const HEADER: usize = 64;

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    /// Message `index` of `channel` in operation `seq`; `what`, `count` are the writer's header, `total` the
    /// channel's bytes in the whole operation.
    Data = 1,
    /// `index` messages of my `channel` in operation `seq` are read.
    Credit = 2,
    /// Message `seq` begins: `channel` unused, `what` the element type, `count` the tag, `total` its bytes; `index` is
    /// [`Frame::FOLLOWS`] where its only piece comes next.
    Announce = 3,
    /// The receiver of message `seq` has room for `index` pieces in all.
    Grant = 4,
    /// Piece `index` of message `seq`.
    Fragment = 5,
    /// The sender declares the group dead; the payload says why.
    Abort = 6,
    /// The sender leaves in good order: its last frame on class `channel`, of the classes whose bits `index` has. On the
    /// messages' class the payload is its process's last error, `total` nanoseconds old, if it had one.
    Leave = 7,
    /// The sender waits for the receiver in operation `seq`, which is `what`.
    WaitNotice = 8,
    /// The sender's last frame over this connection.
    Move = 9,
    /// The sender's first frame over this connection: `Move` is its last over another one.
    Moved = 10,
    /// The sender is about to leave together with all others, and has announced its last message.
    LastMessage = 11,
}

impl Kind {
    pub(crate) const ALL: [Self; 11] = [
        Self::Data,
        Self::Credit,
        Self::Announce,
        Self::Grant,
        Self::Fragment,
        Self::Abort,
        Self::Leave,
        Self::WaitNotice,
        Self::Move,
        Self::Moved,
        Self::LastMessage,
    ];
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Frame {
    pub(crate) kind: Kind,
    pub(crate) channel: u32,
    pub(crate) seq: u64,
    pub(crate) index: u64,
    /// Payload that follows.
    pub(crate) bytes: u64,
    pub(crate) what: u64,
    pub(crate) count: u64,
    pub(crate) total: u64,
}

/// "smddp" and a version, so that a stream out of step is found at once.
const MAGIC: u32 = 0x5d0d_0001;

/// Classes between two ranks.
pub(crate) const CLASSES: usize = 2;
/// The one of messages, and of bad news.
pub(crate) const MESSAGES: usize = 1;
pub(crate) const COLLECTIVES: usize = 0;

impl Frame {
    /// What waits on one class holds up nothing on the other: a collective's data may have to wait for its reader to
    /// make that call, and messages between the two go on meanwhile.
    pub(crate) const fn class(&self) -> usize {
        match self.kind {
            Kind::Data | Kind::Credit | Kind::WaitNotice | Kind::Move | Kind::Moved => 0,
            // The last frames of every class that was used.
            Kind::Leave | Kind::Abort => self.channel as usize,
            Kind::Announce | Kind::Grant | Kind::Fragment | Kind::LastMessage => MESSAGES,
        }
    }

    /// Of an `Announce`'s `index`.
    pub(crate) const FOLLOWS: u64 = 1;

    /// Whether the next frame on its class is sent at once: they may go together.
    pub(crate) const fn announces(&self) -> bool {
        matches!(self.kind, Kind::Announce) && self.index == Self::FOLLOWS && self.total > 0
    }

    pub(crate) const fn new(kind: Kind, seq: u64) -> Self {
        Self { kind, channel: 0, seq, index: 0, bytes: 0, what: 0, count: 0, total: 0 }
    }

    pub(crate) fn encode(&self) -> [u8; HEADER] {
        let mut out = [0; HEADER];
        let words = [
            u64::from(MAGIC) | (self.kind as u64) << 32,
            u64::from(self.channel),
            self.seq,
            self.index,
            self.bytes,
            self.what,
            self.count,
            self.total,
        ];
        for (chunk, word) in out.chunks_exact_mut(8).zip(words) {
            chunk.copy_from_slice(&word.to_le_bytes());
        }
        out
    }

    /// `None`: this is no frame.
    pub(crate) fn decode(bytes: &[u8; HEADER]) -> Option<Self> {
        let mut words = [0; HEADER / 8];
        for (word, chunk) in words.iter_mut().zip(bytes.chunks_exact(8)) {
            let mut eight = [0; 8];
            eight.copy_from_slice(chunk);
            *word = u64::from_le_bytes(eight);
        }
        let [first, channel, seq, index, bytes, what, count, total] = words;
        let kind = Kind::ALL.into_iter().find(|&k| k as u64 == first >> 32)?;
        (first as u32 == MAGIC).then_some(Self {
            kind,
            channel: u32::try_from(channel).ok()?,
            seq,
            index,
            bytes,
            what,
            count,
            total,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_comes_back_as_it_went() {
        for kind in Kind::ALL {
            let frame = Frame {
                kind,
                channel: 7,
                seq: u64::MAX,
                index: 3,
                bytes: 1 << 40,
                what: 5,
                count: 6,
                total: 9,
            };
            assert_eq!(Frame::decode(&frame.encode()), Some(frame));
        }
        assert_eq!(Frame::decode(&[0; HEADER]), None);
    }
}
