//! Tests of one rank's connections with raw sockets as peers.

mod again;
mod calls;
mod quiet;
use std::time::Duration;

const DEADLINE: Duration = Duration::from_secs(60);
/// Longer than any delay in these tests.
const PEER_TIMEOUT: Duration = Duration::from_secs(20);
