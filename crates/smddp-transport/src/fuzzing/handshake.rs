//! Fuzzing of the handshake, between its ends and over the unix socket of a process.

use super::script::Script;
use crate::handshake::fuzzing::both_ends;
use crate::process::fuzzing::{incoming_connections, memory_reply};

/// Runs handshakes over a network that changes arbitrary bytes.
pub fn handshake(bytes: &[u8]) {
    let mut script = Script::new(bytes);
    match script.below(3) {
        0 => memory_reply(&mut script),
        1 => incoming_connections(&mut script),
        _ => both_ends(&mut script),
    }
}
