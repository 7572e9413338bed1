//! Fuzzing of the handshake, between its ends and over the unix socket of a process.

use smddp_net::fuzzing::{Script, both_ends};
use smddp_process::fuzzing::{incoming_connections, memory_reply};

/// Runs handshakes over a network that changes arbitrary bytes.
pub fn handshake(bytes: &[u8]) {
    let mut script = Script::new(bytes);
    match script.below(3) {
        0 => memory_reply(&mut script),
        1 => incoming_connections(&mut script),
        _ => both_ends(&mut script),
    }
}
