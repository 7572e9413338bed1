//! The handshake over unix sockets, from both sides.

use super::script::Script;
use crate::process::fuzzing::{answered, callers};

pub fn unix(bytes: &[u8]) {
    let mut script = Script::new(bytes);
    if script.below(3) == 0 { answered(&mut script) } else { callers(&mut script) }
}
