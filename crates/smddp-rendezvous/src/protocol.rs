//! Wire format of the rendezvous store.
//!
//! A connection begins with a fixed greeting in both directions, so that another program on the port (torch's own store, for
//! example) is recognised. A request is `operation, key length, number, key, value`; the number is the value's length (set), the
//! milliseconds to wait (get) or nothing (delete). The answer to a get is `found, length, value`; the other requests have none. All
//! numbers are little-endian. The first request is a get, and a client
//! sends nothing between a get and its answer.

use std::time::Duration;

pub(crate) const GREETING: &[u8; 16] = b"smddp kv store 3";
pub(crate) const SET: u8 = 1;
pub(crate) const GET: u8 = 2;
pub(crate) const DELETE: u8 = 3;
/// Bytes of a request before the key.
pub(crate) const HEAD: usize = 7;
pub(crate) const MAX_KEY: usize = 256;
/// The address records of all ranks of a large job.
pub(crate) const MAX_VALUE: usize = 64 << 20;
/// Time that the server allows for the first request, and that a client allows for an answer beyond the time it asked to wait.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);
