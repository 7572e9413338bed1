//! Frame of a deadlock probe, and its delivery in the receiving process. The core defines the content.

use std::io;
use std::sync::OnceLock;

/// First bytes of a framed probe. The length of the content follows as a `u32`.
const MAGIC: &[u8; 8] = b"smddp-d1";
/// Bytes before the content.
const HEADER_BYTES: usize = 8 + 4;
/// Maximum bytes of a probe's content.
pub const MAX_PROBE_BYTES: usize = 32 << 10;
/// Maximum bytes of a framed probe.
pub const MAX_FRAME_BYTES: usize = HEADER_BYTES + MAX_PROBE_BYTES;
/// Reply after the receiving process has queued a probe.
pub const QUEUED: &str = "k";

static RECEIVER: OnceLock<fn(Vec<u8>)> = OnceLock::new();

/// Registers the function that receives probes. It must return at once. Later registrations are ignored.
pub fn set_probe_receiver(receiver: fn(Vec<u8>)) {
    let _ = RECEIVER.set(receiver);
}

/// Passes the content of a probe to the registered function. A process without one ignores probes.
fn receive(content: Vec<u8>) {
    if let Some(receiver) = RECEIVER.get() {
        receiver(content);
    }
}

/// Returns a probe with its header.
///
/// # Errors
/// The content has more than [`MAX_PROBE_BYTES`].
pub fn frame(content: &[u8]) -> io::Result<Vec<u8>> {
    let length = u32::try_from(content.len()).map_err(io::Error::other)?;
    if content.len() > MAX_PROBE_BYTES {
        return Err(io::Error::other("the deadlock probe is too long"));
    }
    Ok([&MAGIC[..], &length.to_le_bytes(), content].concat())
}

/// Returns true if the received bytes may be the beginning of a framed probe.
pub fn is_probe(received: &[u8]) -> bool {
    let compared = received.len().min(MAGIC.len());
    received[..compared] == MAGIC[..compared]
}

/// Passes a complete probe to the registered function, and returns true. Returns false while it is incomplete.
///
/// # Errors
/// The bytes are not a probe.
pub fn take(received: &[u8]) -> io::Result<bool> {
    let invalid = |reason: &str| io::Error::new(io::ErrorKind::InvalidData, reason);
    if !is_probe(received) {
        return Err(invalid("its bytes are not a deadlock probe"));
    }
    let Some(length) = received.get(MAGIC.len()..).and_then(<[u8]>::first_chunk) else { return Ok(false) };
    let length = u32::from_le_bytes(*length) as usize;
    let content = &received[HEADER_BYTES..];
    if length > MAX_PROBE_BYTES || content.len() > length {
        return Err(invalid("its deadlock probe is too long"));
    }
    if content.len() < length {
        return Ok(false);
    }
    receive(content.to_vec());
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probe_is_complete_at_its_last_byte_and_other_bytes_are_rejected() {
        let framed = frame(b"content").unwrap();
        for end in 0..framed.len() {
            assert!(!take(&framed[..end]).unwrap(), "{end}");
        }
        assert!(take(&framed).unwrap());
        assert!(take(&[&framed[..], b"x"].concat()).is_err());
        let mut other = framed.clone();
        other[0] = b'S';
        assert!(take(&other).is_err());
        let mut long = framed;
        long[8..12].copy_from_slice(&(MAX_PROBE_BYTES as u32 + 1).to_le_bytes());
        assert!(take(&long[..12]).is_err());
        assert!(frame(&vec![0; MAX_PROBE_BYTES + 1]).is_err());
    }
}
