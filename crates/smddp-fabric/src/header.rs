//! Message header between the endpoints of two processes: 32 bytes, little endian, followed by the body.

/// Size of an encoded header, in bytes.
pub const MESSAGE_HEADER: usize = 32;

const MAGIC: u16 = 0x5df1;

/// Kind of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum HeaderKind {
    /// Frame with the first part of its payload.
    First = 1,
    /// Further part of the last frame's payload.
    More = 2,
    /// Frame whose payload is in the sender's memory, to be fetched.
    Offer = 3,
    /// Completed offers.
    Fetched = 4,
    /// Memory to which the payload of an offer may be written.
    Grant = 5,
    /// Credits only.
    Credit = 6,
    /// Reachability probe.
    Ping = 7,
    /// Answer to a reachability probe.
    Pong = 8,
}

impl HeaderKind {
    /// All kinds, in the order of their numbers.
    pub const ALL: [Self; 8] = [
        Self::First,
        Self::More,
        Self::Offer,
        Self::Fetched,
        Self::Grant,
        Self::Credit,
        Self::Ping,
        Self::Pong,
    ];

    /// Returns true if messages of this kind are ordered within their pair.
    pub fn ordered(self) -> bool {
        matches!(self, Self::First | Self::More | Self::Offer)
    }
}

/// Decoded message header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Kind of the message.
    pub kind: HeaderKind,
    /// Set if the message used a credit.
    pub uses_credit: bool,
    /// Number of credits that the message returns to its receiver: messages received since the last return, or the rest of
    /// the window.
    pub credits: u32,
    /// Id of the sending endpoint.
    pub endpoint: u64,
    /// Group number at the receiver, and the sender's rank in the group.
    pub group: u32,
    /// Rank of the sender in the group.
    pub rank: u32,
    /// Sequence number of ordered messages within the pair.
    pub seq: u64,
}

impl Header {
    /// Creates a header without a group. [`Self::seal`] adds the fields that are known only at sending time.
    pub fn new(kind: HeaderKind, endpoint: u64) -> Self {
        Self { kind, uses_credit: false, credits: 0, endpoint, group: 0, rank: 0, seq: 0 }
    }

    /// Writes the header to the first [`MESSAGE_HEADER`] bytes.
    pub fn encode(&self, out: &mut [u8]) {
        out[..2].copy_from_slice(&MAGIC.to_le_bytes());
        out[2] = self.kind as u8;
        out[3] = u8::from(self.uses_credit);
        out[4..8].copy_from_slice(&self.credits.to_le_bytes());
        out[8..16].copy_from_slice(&self.endpoint.to_le_bytes());
        out[16..20].copy_from_slice(&self.group.to_le_bytes());
        out[20..24].copy_from_slice(&self.rank.to_le_bytes());
        out[24..MESSAGE_HEADER].copy_from_slice(&self.seq.to_le_bytes());
    }

    /// Decodes a header; `None`: not an smddp message.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let long = |at: usize| Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
        let (first, ids) = (long(0)?, long(16)?);
        let (endpoint, seq) = (long(8)?, long(24)?);
        let kind = HeaderKind::ALL.into_iter().find(|&w| w as u64 == first >> 16 & 0xff)?;
        (first as u16 == MAGIC).then_some(Self {
            kind,
            uses_credit: first >> 24 & 1 == 1,
            credits: (first >> 32) as u32,
            endpoint,
            group: ids as u32,
            rank: (ids >> 32) as u32,
            seq,
        })
    }

    /// Writes the fields that are known only at sending time into an encoded header: the credits, and whether the message uses
    /// one.
    pub fn seal(message: &mut [u8], credits: u32, uses_credit: bool) {
        message[3] = u8::from(uses_credit);
        message[4..8].copy_from_slice(&credits.to_le_bytes());
    }
}

/// Iterates over the integers of a body.
pub fn integers(body: &[u8]) -> impl Iterator<Item = u64> {
    body.chunks_exact(8).filter_map(|c| Some(u64::from_le_bytes(c.try_into().ok()?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_round_trip() {
        for kind in HeaderKind::ALL {
            let head = Header {
                endpoint: u64::MAX - 1,
                group: 7,
                rank: u32::MAX,
                seq: 1 << 50,
                ..Header::new(kind, 3)
            };
            let mut bytes = [0xaa; MESSAGE_HEADER];
            head.encode(&mut bytes);
            assert_eq!(Header::decode(&bytes), Some(head));
            Header::seal(&mut bytes, 11, true);
            assert_eq!(Header::decode(&bytes), Some(Header { credits: 11, uses_credit: true, ..head }));
            assert_eq!(Header::decode(&bytes[..MESSAGE_HEADER - 1]), None);
        }
        assert_eq!(Header::decode(&[0; MESSAGE_HEADER]), None);
    }
}
