//! Records of fixed size, and answers.

use super::script::Script;
use crate::net::frame::{Frame, HEADER};
use crate::net::tcp::fuzzing as sockets;

/// The header of a frame.
pub fn frame(bytes: &[u8]) {
    let Some(header) = bytes.first_chunk::<HEADER>() else { return };
    if let Some(frame) = Frame::decode(header) {
        assert_eq!(Frame::decode(&frame.encode()), Some(frame));
        let _ = (frame.class(), frame.announces());
    }
}

/// What a caller says first.
pub fn hello(bytes: &[u8]) {
    sockets::hello(bytes);
}

/// What ranks answer that are asked how far they are.
pub fn straggler_query(bytes: &[u8]) {
    sockets::straggler_query(&mut Script::new(bytes));
}
