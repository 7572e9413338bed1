//! Where a rank can be found while its group is made, as the store has it.

use std::net::SocketAddr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::process::Id;
use crate::token::{PROTOCOL, Token};

/// Where a rank's children find it.
#[derive(Serialize, Deserialize)]
pub(super) struct TreeAddress {
    pub(super) protocol: u32,
    pub(super) version: String,
    /// Whose it is, for people.
    pub(super) host: String,
    pub(super) pid: u32,
    /// Ranks of its group.
    pub(super) size: u32,
    /// Which rank of which attempt this is.
    pub(super) id: Id,
    /// When it was made, in nanoseconds since the boot.
    pub(super) made: u64,
    /// Where its unix socket can be reached: kernel boot and network namespace.
    pub(super) boot: String,
    pub(super) netns: u64,
    pub(super) socket: Vec<u8>,
    pub(super) tcp: Option<SocketAddr>,
    /// Rank 0's.
    pub(super) shared: Option<Shared>,
}

impl TreeAddress {
    /// "pid 812 on host h1".
    pub(super) fn process(&self) -> String {
        format!("pid {} on host {}", self.pid, self.host)
    }

    /// Whether its rank came after the one with that address: then it is none of an earlier attempt. Only a host's own clock tells.
    pub(super) fn came_after(&self, other: &Self) -> bool {
        self.is_near(other) && self.made >= other.made
    }

    /// Whether its unix socket can be reached from there.
    pub(super) fn is_near(&self, other: &Self) -> bool {
        (&self.boot, self.netns) == (&other.boot, other.netns)
    }
}

/// What rank 0 shares with all, by way of the store.
#[derive(Clone, Serialize, Deserialize)]
pub struct Shared {
    pub(super) token: Token,
    /// Of what the token is with the job's own secret.
    pub(super) check: [u8; 32],
}

/// What rank 0 shares, out of its address.
pub(crate) fn shared(address: &[u8]) -> Result<Shared, String> {
    parse_address(address)?.shared.ok_or_else(|| "an address without a token".to_owned())
}

impl Shared {
    pub(crate) fn token(&self) -> &Token {
        &self.token
    }

    /// Whether that came of it at rank 0, too.
    pub(crate) fn came_to(&self, token: &Token) -> bool {
        token.fits(&self.check)
    }
}

/// Versions are compared before anybody is called.
pub(super) fn parse_address(bytes: &[u8]) -> Result<TreeAddress, String> {
    let nonsense = |_| format!("{} bytes that are no address", bytes.len());
    let ((protocol, version), _) = postcard::take_from_bytes::<(u32, &str)>(bytes).map_err(nonsense)?;
    let mine = env!("CARGO_PKG_VERSION");
    if (protocol, version) != (PROTOCOL, mine) {
        return Err(format!(
            "another version of smddp: {version} with protocol {protocol} there, {mine} with protocol {PROTOCOL} here"
        ));
    }
    postcard::from_bytes(bytes).map_err(nonsense)
}

/// The address as it is stored, which nothing verifies: for messages to people.
pub(super) fn stated(bytes: &[u8]) -> Option<TreeAddress> {
    parse_address(bytes).ok()
}

/// Nanoseconds since the boot.
pub(super) fn now() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Duration::try_from(now).map_or(0, |now| now.as_nanos() as u64)
}

/// "rank 3 (host h1, pid 812)", out of its address.
pub fn who(rank: usize, address: &[u8]) -> String {
    match parse_address(address) {
        Ok(TreeAddress { host, pid, .. }) => format!("rank {rank} (host {host}, pid {pid})"),
        Err(_) => format!("rank {rank}"),
    }
}
