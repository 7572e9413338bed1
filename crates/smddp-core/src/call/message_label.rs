//! Names of sends and recvs, for errors and for the recorder, which stores them as a fingerprint.

use smddp_base::CallFingerprint;

use crate::call::types::DType;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Direction {
    To(usize),
    From(usize),
    FromAny,
}

impl Direction {
    fn operation(self) -> &'static str {
        match self {
            Self::To(_) => "send",
            Self::From(_) | Self::FromAny => "recv",
        }
    }

    fn endpoint(self) -> String {
        match self {
            Self::To(rank) => format!("to rank {rank}"),
            Self::From(rank) => format!("from rank {rank}"),
            Self::FromAny => "from any rank".to_owned(),
        }
    }

    /// Returns the peer; `None` for a recv from any rank.
    pub(crate) fn peer(self) -> Option<usize> {
        match self {
            Self::To(rank) | Self::From(rank) => Some(rank),
            Self::FromAny => None,
        }
    }
}

impl std::fmt::Display for Direction {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.operation(), self.endpoint())
    }
}

/// A send or recv with its number among those of its direction, from 0: send #3 to rank 1 is the fourth.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct MessageLabel {
    pub(crate) direction: Direction,
    pub(crate) number: u64,
    pub(crate) dtype: DType,
    pub(crate) tag: u64,
}

impl MessageLabel {
    /// Returns the name with its number: "send #3 to rank 1".
    pub(crate) fn numbered(&self) -> String {
        format!("{} #{} {}", self.direction.operation(), self.number, self.direction.endpoint())
    }

    /// Returns the call: "send(5 elements of float32 to rank 1, tag 0)".
    pub(crate) fn call(&self, bytes: u64) -> String {
        let (operation, peer) = (self.direction.operation(), self.direction.endpoint());
        let (count, dtype) = (bytes / self.dtype.size() as u64, self.dtype.name());
        format!("{operation}({count} elements of {dtype} {peer}, tag {})", self.tag)
    }

    /// Encodes the label. Numbers are stored modulo 2^32.
    pub(crate) fn fingerprint(&self) -> CallFingerprint {
        let (kind, peer) = match self.direction {
            Direction::To(rank) => (0, rank),
            Direction::From(rank) => (1, rank),
            Direction::FromAny => (2, 0),
        };
        let what = kind | (self.dtype as u64) << 8 | (peer as u64 & 0xffff) << 16 | self.number << 32;
        CallFingerprint { call: what, count: self.tag }
    }

    /// Decodes a label. `None`: this version has no send or recv with this fingerprint.
    pub(crate) fn of(fingerprint: CallFingerprint) -> Option<Self> {
        let peer = (fingerprint.call >> 16 & 0xffff) as usize;
        let direction = match fingerprint.call & 0xff {
            0 => Direction::To(peer),
            1 => Direction::From(peer),
            2 => Direction::FromAny,
            _ => return None,
        };
        let dtype = DType::from_u8((fingerprint.call >> 8) as u8)?;
        Some(Self { direction, number: fingerprint.call >> 32, dtype, tag: fingerprint.count })
    }
}

/// Next numbers of sends and recvs, per direction.
pub(crate) struct MessageNumbers {
    to: Vec<u64>,
    from: Vec<u64>,
    from_any: u64,
}

impl MessageNumbers {
    pub(crate) fn new(size: usize) -> Self {
        Self { to: vec![0; size], from: vec![0; size], from_any: 0 }
    }

    pub(crate) fn next(&mut self, direction: Direction) -> u64 {
        let number = match direction {
            Direction::To(rank) => &mut self.to[rank],
            Direction::From(rank) => &mut self.from[rank],
            Direction::FromAny => &mut self.from_any,
        };
        *number += 1;
        *number - 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fingerprint_preserves_the_label() {
        let directions = [Direction::To(0), Direction::From(4095), Direction::FromAny];
        for direction in directions {
            for (number, tag) in [(0, 0), (7, u64::MAX), (u64::from(u32::MAX), 1)] {
                let label = MessageLabel { direction, number, dtype: DType::BF16, tag };
                assert_eq!(MessageLabel::of(label.fingerprint()), Some(label));
            }
        }
        assert_eq!(MessageLabel::of(CallFingerprint { call: 3, count: 0 }), None);
        let label = MessageLabel { direction: Direction::To(1), number: 3, dtype: DType::F32, tag: 9 };
        assert_eq!(label.numbered(), "send #3 to rank 1");
        assert_eq!(label.call(20), "send(5 elements of float32 to rank 1, tag 9)");
    }
}
