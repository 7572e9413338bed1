//! The first bytes of a connection: who calls whom, and in which version.

use crate::shm::{Id, PROTOCOL};

pub(super) const HELLO: usize = 40;
const MAGIC: &[u8; 8] = b"smddp-tc";

/// The caller is rank `from` of the group whose end at the listener has this token.
pub(super) fn hello(token: &Id, from: usize) -> [u8; HELLO] {
    let mut bytes = [0; HELLO];
    bytes[..8].copy_from_slice(MAGIC);
    bytes[8..12].copy_from_slice(&PROTOCOL.to_le_bytes());
    bytes[12..16].copy_from_slice(&(from as u32).to_le_bytes());
    bytes[16..32].copy_from_slice(token);
    bytes
}

/// (token, rank of the caller); `None`: a stranger, or another version. Versions were compared when the group was
/// made, so there is nobody to tell.
pub(super) fn parse(bytes: &[u8; HELLO]) -> Option<(Id, usize)> {
    let number = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    if &bytes[..8] != MAGIC || number(8) != PROTOCOL {
        return None;
    }
    let mut token = Id::default();
    token.copy_from_slice(&bytes[16..32]);
    Some((token, number(12) as usize))
}
