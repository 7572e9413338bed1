//! Header of every payload between nodes: 64 bytes, little endian.
//!
//! ```text
//! magic (u32) | kind (u32) | channel (u32) | 0 (u32) | seq | index | bytes | what | count | total
//! ```
//!
//! With `SMDDP_AUDIT=wire`, the CRC32C of the header's other bytes replaces the magic number, and the CRC32C of the
//! payload follows the channel.

use crc32c::{crc32c, crc32c_append};

/// Size of an encoded header, in bytes.
pub const HEADER: usize = 64;

/// Type of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// Message `index` of `channel` in operation `seq`. `what` and `count` are the sender's call fingerprint.
    /// `total` is the channel's size in the whole operation, in bytes.
    Data = 1,
    /// The sender has read `index` messages in total of the receiver's send channel `channel` in operation `seq`.
    Credit = 2,
    /// Start of message `seq`: `what` is the element type, `count` the tag, `total` its size in bytes. `channel` is
    /// unused. `index` is [`Frame::FOLLOWS`] if the message's only fragment is the next frame.
    Announce = 3,
    /// The receiver of message `seq` has room for `index` fragments in total.
    Grant = 4,
    /// Fragment `index` of message `seq`.
    Fragment = 5,
    /// The sender aborts the group; the payload is the reason.
    Abort = 6,
    /// The sender leaves the group: its last frame on class `channel`. `index` is the bit set of the classes that it
    /// used. On the class of messages the payload is the last error of its process, if any, and `total` its age in
    /// nanoseconds.
    Leave = 7,
    /// The sender waits for the receiver in operation `seq`; `what` is its call.
    WaitNotice = 8,
    /// Last frame of the sender over this connection.
    Move = 9,
    /// First frame of the sender over this connection; `Move` is its last frame over another one.
    Moved = 10,
    /// The sender leaves together with all other ranks, and has announced its last message.
    LastMessage = 11,
}

impl Kind {
    /// All kinds, in the order of their numbers.
    pub const ALL: [Self; 11] = [
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

/// Decoded frame header. [`Kind`] defines the fields of each type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame {
    /// Kind of the frame.
    pub kind: Kind,
    /// Channel of the operation.
    pub channel: u32,
    /// Sequence number of the operation, or number of the point-to-point message.
    pub seq: u64,
    /// Number of the message in its channel.
    pub index: u64,
    /// Size of the payload that follows, in bytes.
    pub bytes: u64,
    /// First half of a fingerprint, or a tag.
    pub what: u64,
    /// Second half of a fingerprint, or a data type.
    pub count: u64,
    /// Bytes of all payloads of the channel or message.
    pub total: u64,
    /// CRC32C of the payload, if the group's frames have checksums.
    pub checksum: Option<u32>,
}

/// Magic number and version. They detect a stream that is not at a frame boundary.
const MAGIC: u32 = 0x5d0d_0001;
/// Size of the magic number, or of the header's checksum, in bytes.
const CHECK: usize = 4;

/// Number of frame classes between two ranks.
pub const CLASSES: usize = 2;
/// Class of point-to-point messages. Abort and leave frames use every class in use, and always this one.
pub const MESSAGES: usize = 1;
/// Class of collectives.
pub const COLLECTIVES: usize = 0;
/// Bit set of classes: class `c` has bit `1 << c`.
pub type Classes = u8;
/// Set of all classes.
pub const ALL_CLASSES: Classes = (1 << CLASSES) - 1;

impl Frame {
    /// Returns the class of the frame. Classes do not block each other: data of a collective may have to wait until its
    /// receiver makes that call, while messages between the two ranks proceed.
    pub const fn class(&self) -> usize {
        match self.kind {
            Kind::Data | Kind::Credit | Kind::WaitNotice | Kind::Move | Kind::Moved => 0,
            // Sent on every class that was used.
            Kind::Leave | Kind::Abort => self.channel as usize,
            Kind::Announce | Kind::Grant | Kind::Fragment | Kind::LastMessage => MESSAGES,
        }
    }

    /// Value of `index` in an `Announce` whose only fragment is the next frame.
    pub const FOLLOWS: u64 = 1;

    /// Returns true if the next frame on the class follows at once, so that both can be sent together.
    pub const fn announces(&self) -> bool {
        matches!(self.kind, Kind::Announce) && self.index == Self::FOLLOWS && self.total > 0
    }

    /// Returns a frame without payload whose other fields are zero.
    pub const fn new(kind: Kind, seq: u64) -> Self {
        Self { kind, channel: 0, seq, index: 0, bytes: 0, what: 0, count: 0, total: 0, checksum: None }
    }

    /// Encodes the header.
    pub fn encode(&self) -> [u8; HEADER] {
        let mut out = [0; HEADER];
        let fields = [
            u64::from(MAGIC) | (self.kind as u64) << 32,
            u64::from(self.channel) | u64::from(self.checksum.unwrap_or(0)) << 32,
            self.seq,
            self.index,
            self.bytes,
            self.what,
            self.count,
            self.total,
        ];
        for (chunk, field) in out.chunks_exact_mut(8).zip(fields) {
            chunk.copy_from_slice(&field.to_le_bytes());
        }
        if self.checksum.is_some() {
            let check = header_checksum(&out);
            out[..CHECK].copy_from_slice(&check.to_le_bytes());
        }
        out
    }

    /// Decodes a header with the magic number, or with a valid checksum. Returns `None` for an invalid header.
    pub fn decode(encoded: &[u8; HEADER]) -> Option<Self> {
        let mut fields = [0; HEADER / 8];
        for (field, chunk) in fields.iter_mut().zip(encoded.chunks_exact(8)) {
            let mut eight = [0; 8];
            eight.copy_from_slice(chunk);
            *field = u64::from_le_bytes(eight);
        }
        let [first, channel, seq, index, bytes, what, count, total] = fields;
        let kind = Kind::ALL.into_iter().find(|&k| k as u64 == first >> 32)?;
        let checksum = match first as u32 {
            MAGIC if channel >> 32 == 0 => None,
            check if check == header_checksum(encoded) => Some((channel >> 32) as u32),
            _ => return None,
        };
        Some(Self { kind, channel: channel as u32, seq, index, bytes, what, count, total, checksum })
    }

    /// Returns a description of the frame's content for errors about its checksum.
    pub fn content(&self) -> String {
        match self.kind {
            Kind::Data => format!("message {} of channel {} of call #{}", self.index, self.channel, self.seq),
            Kind::Fragment => format!("fragment {} of message #{}", self.index, self.seq),
            kind => format!("frame of kind {kind:?}"),
        }
    }
}

/// Returns the CRC32C of a header without its first [`CHECK`] bytes. The magic number comes first, so that a header of
/// zeros is invalid. Differs from the magic number, which marks a header without a checksum.
fn header_checksum(header: &[u8; HEADER]) -> u32 {
    match crc32c_append(crc32c(&MAGIC.to_le_bytes()), &header[CHECK..]) {
        MAGIC => !MAGIC,
        other => other,
    }
}

/// Returns the checksum of a payload.
pub fn payload_checksum(payload: &[u8]) -> u32 {
    crc32c(payload)
}

/// Description of a received frame whose header has no valid checksum.
pub const CORRUPTED_HEADER: &str = "a frame header without a valid CRC32C";

/// Checks the payload of a received frame. The error describes the difference.
///
/// # Errors
/// The frame has no checksum, or the payload's checksum differs from it.
pub fn check_payload(frame: &Frame, payload: &[u8]) -> Result<(), String> {
    let Some(expected) = frame.checksum else { return Err(CORRUPTED_HEADER.to_owned()) };
    let found = payload_checksum(payload);
    if found == expected {
        return Ok(());
    }
    let (bytes, content) = (frame.bytes, frame.content());
    Err(format!(
        "{bytes} bytes, {content}: CRC32C {expected:#010x} at the sender, {found:#010x} at the receiver"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decoding_an_encoded_frame_returns_it() {
        for kind in Kind::ALL {
            for checksum in [None, Some(0), Some(u32::MAX)] {
                let frame = sample(kind, checksum);
                assert_eq!(Frame::decode(&frame.encode()), Some(frame));
            }
        }
        assert_eq!(Frame::decode(&[0; HEADER]), None);
    }

    fn sample(kind: Kind, checksum: Option<u32>) -> Frame {
        Frame {
            kind,
            channel: 7,
            seq: u64::MAX,
            index: 3,
            bytes: 1 << 40,
            what: 5,
            count: 6,
            total: 9,
            checksum,
        }
    }

    #[test]
    fn header_with_any_one_or_two_changed_bits_is_invalid_with_a_checksum() {
        let header = sample(Kind::Data, Some(0x1234_5678)).encode();
        let flipped = |bits: &[usize]| {
            let mut changed = header;
            bits.iter().for_each(|bit| changed[bit / 8] ^= 1 << (bit % 8));
            changed
        };
        for first in 0..8 * HEADER {
            assert_eq!(Frame::decode(&flipped(&[first])), None, "bit {first}");
            for second in 0..first {
                assert_eq!(Frame::decode(&flipped(&[first, second])), None, "bits {first} and {second}");
            }
        }
    }

    #[test]
    fn header_whose_crc_is_the_magic_number_has_a_checksum() {
        let frame = Frame {
            channel: 2,
            index: 154,
            checksum: Some(payload_checksum(&[])),
            ..Frame::new(Kind::Credit, 425_496)
        };
        let header = frame.encode();
        assert_eq!(crc32c_append(crc32c(&MAGIC.to_le_bytes()), &header[CHECK..]), MAGIC);
        assert_eq!(Frame::decode(&header), Some(frame));
    }

    #[test]
    fn checksum_is_crc32c() {
        // Check value of CRC-32/ISCSI in the catalogue of parametrised CRC algorithms.
        assert_eq!((payload_checksum(b"123456789"), payload_checksum(&[])), (0xe306_9283, 0));
    }
}
