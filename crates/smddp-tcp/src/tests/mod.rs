//! Tests of one rank's connections with raw sockets as peers.

#[allow(unsafe_code)]
mod again;
mod calls;
#[allow(unsafe_code)]
mod quiet;

use std::time::Duration;

const DEADLINE: Duration = Duration::from_secs(60);
/// Longer than any delay in these tests.
const PEER_TIMEOUT: Duration = Duration::from_secs(20);
