//! Wire format of the rendezvous store.
//!
//! A connection begins with a fixed greeting in both directions, which detects another program on the port, for example
//! torch's store. A request is `operation, key length, number, key, value`. The number is the value's length (set), the
//! milliseconds to wait (get) or unused (delete). The reply to a get is `found, length, value`; other requests have no
//! reply. All numbers are little-endian. The first request is a get, and a client sends nothing between a get and its reply.

use std::time::Duration;

pub(crate) const GREETING: &[u8; 16] = b"smddp kv store 3";
pub(crate) const SET: u8 = 1;
pub(crate) const GET: u8 = 2;
pub(crate) const DELETE: u8 = 3;
/// Bytes of a request before the key.
pub(crate) const HEAD: usize = 7;
pub(crate) const MAX_KEY: usize = 256;
/// Largest value in bytes: the address records of all ranks of a large job.
pub(crate) const MAX_VALUE: usize = 64 << 20;
/// Time limit of the server for the first request, and of a client for a reply beyond the requested waiting time.
pub(crate) const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
