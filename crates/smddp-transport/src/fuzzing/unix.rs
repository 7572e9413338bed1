//! Fuzzing of the unix socket handshake, from both sides.

use super::script::Script;
use crate::process::fuzzing::{handshake_reply, incoming_connections};

pub fn unix(bytes: &[u8]) {
    let mut script = Script::new(bytes);
    if script.below(3) == 0 { handshake_reply(&mut script) } else { incoming_connections(&mut script) }
}
