//! Fuzzing of fixed-size records and replies.

use super::script::Script;
use crate::net::frame::{Frame, HEADER};
use crate::net::tcp::fuzzing as sockets;

/// Decodes a frame header.
pub fn frame(bytes: &[u8]) {
    let Some(header) = bytes.first_chunk::<HEADER>() else { return };
    if let Some(frame) = Frame::decode(header) {
        assert_eq!(Frame::decode(&frame.encode()), Some(frame));
        let _ = (frame.class(), frame.announces());
    }
}

/// Decodes replies to a straggler query.
pub fn straggler_query(bytes: &[u8]) {
    sockets::straggler_query(&mut Script::new(bytes));
}
