//! Messages between the engines of two processes: a header of 32 bytes, little endian, and a body.

/// Bytes of an encoded header.
pub(crate) const HEAD: usize = 32;

const MAGIC: u16 = 0x5df1;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum HeaderKind {
    /// A frame and the first of its payload.
    First = 1,
    /// More of the last frame's payload.
    More = 2,
    /// A frame whose payload lies in the sender's memory, to be fetched.
    TransportOffer = 3,
    /// Offers that are fetched.
    Fetched = 4,
    /// Where the payload of an offer may be written.
    Grant = 5,
    /// Nothing but credits.
    Credit = 6,
    /// Shows whether the receiver can be reached, and its answer.
    Ping = 7,
    Pong = 8,
}

impl HeaderKind {
    pub(crate) const ALL: [Self; 8] = [
        Self::First,
        Self::More,
        Self::TransportOffer,
        Self::Fetched,
        Self::Grant,
        Self::Credit,
        Self::Ping,
        Self::Pong,
    ];

    /// Whether it has a place in the order of its pair.
    pub(crate) fn ordered(self) -> bool {
        matches!(self, Self::First | Self::More | Self::TransportOffer)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) what: HeaderKind,
    /// Whether it took a credit.
    pub(crate) counted: bool,
    /// So many more messages may its receiver send: those that its sender has taken since it last said so, or the window
    /// that it opens.
    pub(crate) credits: u32,
    /// The sending engine.
    pub(crate) engine: u64,
    /// The receiver's number for the group, and the sender's rank in it.
    pub(crate) group: u32,
    pub(crate) rank: u32,
    /// Counts what the pair sends in order.
    pub(crate) seq: u64,
}

impl Header {
    /// One that belongs to no group. What is known only when it goes comes with [`Self::seal`].
    pub(crate) fn new(what: HeaderKind, engine: u64) -> Self {
        Self { what, counted: false, credits: 0, engine, group: 0, rank: 0, seq: 0 }
    }

    pub(crate) fn encode(&self, out: &mut [u8]) {
        out[..2].copy_from_slice(&MAGIC.to_le_bytes());
        out[2] = self.what as u8;
        out[3] = u8::from(self.counted);
        out[4..8].copy_from_slice(&self.credits.to_le_bytes());
        out[8..16].copy_from_slice(&self.engine.to_le_bytes());
        out[16..20].copy_from_slice(&self.group.to_le_bytes());
        out[20..24].copy_from_slice(&self.rank.to_le_bytes());
        out[24..HEAD].copy_from_slice(&self.seq.to_le_bytes());
    }

    /// `None`: this is no message of ours.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let long = |at: usize| Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
        let (first, ids) = (long(0)?, long(16)?);
        let (engine, seq) = (long(8)?, long(24)?);
        let what = HeaderKind::ALL.into_iter().find(|&w| w as u64 == first >> 16 & 0xff)?;
        (first as u16 == MAGIC).then_some(Self {
            what,
            counted: first >> 24 & 1 == 1,
            credits: (first >> 32) as u32,
            engine,
            group: ids as u32,
            rank: (ids >> 32) as u32,
            seq,
        })
    }

    /// Writes into an encoded header what is known only when it goes: the credits, and whether it takes one.
    pub(crate) fn seal(message: &mut [u8], credits: u32, counted: bool) {
        message[3] = u8::from(counted);
        message[4..8].copy_from_slice(&credits.to_le_bytes());
    }
}

/// Numbers in a body, one behind the other.
pub(crate) fn numbers(body: &[u8]) -> impl Iterator<Item = u64> {
    body.chunks_exact(8).filter_map(|c| Some(u64::from_le_bytes(c.try_into().ok()?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_comes_back_as_it_went() {
        for what in HeaderKind::ALL {
            let head = Header {
                engine: u64::MAX - 1,
                group: 7,
                rank: u32::MAX,
                seq: 1 << 50,
                ..Header::new(what, 3)
            };
            let mut bytes = [0xaa; HEAD];
            head.encode(&mut bytes);
            assert_eq!(Header::decode(&bytes), Some(head));
            Header::seal(&mut bytes, 11, true);
            assert_eq!(Header::decode(&bytes), Some(Header { credits: 11, counted: true, ..head }));
            assert_eq!(Header::decode(&bytes[..HEAD - 1]), None);
        }
        assert_eq!(Header::decode(&[0; HEAD]), None);
    }
}
