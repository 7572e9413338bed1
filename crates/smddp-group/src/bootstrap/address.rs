//! Address records: addresses of ranks in the store while their group is created.

use std::net::SocketAddr;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use smddp_base::fork::PerProcess;
use smddp_base::random::bytes as random;
use smddp_net::handshake::{PROTOCOL, ProcessUid};
use smddp_net::token::Token;

/// The address record of a rank in the store, by which its children connect to it.
#[derive(Serialize, Deserialize)]
pub(super) struct TreeAddress {
    pub(super) protocol: u32,
    pub(super) version: String,
    /// Host and process, for error texts.
    pub(super) host: String,
    pub(super) pid: u32,
    /// Random id of its process: processes of different pid namespaces may have the same pid.
    pub(super) process_id: [u8; 8],
    /// Size of its group.
    pub(super) size: u32,
    /// Random id of this rank in this attempt.
    pub(super) id: ProcessUid,
    /// Creation time in nanoseconds since the boot.
    pub(super) created: u64,
    /// Reach of its unix socket: kernel boot, network namespace and user id.
    pub(super) boot: String,
    pub(super) netns: u64,
    pub(super) uid: u32,
    pub(super) socket: Vec<u8>,
    pub(super) tcp: Option<SocketAddr>,
    /// Rank 0's: the group token, which a job secret still changes where there is one.
    pub(super) shared_token: Option<Token>,
}

impl TreeAddress {
    /// Returns "pid 812 on host h1".
    pub(super) fn process(&self) -> String {
        format!("pid {} on host {}", self.pid, self.host)
    }

    /// Returns true if this record is not older than `other`, and so does not belong to an earlier attempt. The times are comparable on
    /// one host only.
    pub(super) fn is_not_older_than(&self, other: &Self) -> bool {
        self.is_local(other) && self.created >= other.created
    }

    /// Returns true if both ranks use the same loopback interface and the same abstract unix sockets.
    fn shares_network(&self, other: &Self) -> bool {
        (&self.boot, self.netns) == (&other.boot, other.netns)
    }

    /// Returns true if its unix socket can be reached from there and accepts that rank's user.
    pub(super) fn is_local(&self, other: &Self) -> bool {
        self.shares_network(other) && self.uid == other.uid
    }

    /// Its TCP address, if that can be reached from there: a loopback address leads to the own network namespace.
    pub(super) fn tcp_from(&self, other: &Self) -> Option<SocketAddr> {
        self.tcp.filter(|tcp| !tcp.ip().is_loopback() || self.shares_network(other))
    }
}

/// Authenticates and verifies the address records of one group with the job secret. Without a job secret, records are not
/// authenticated.
pub(super) struct Records {
    pub(super) size: usize,
    pub(super) key: Option<Token>,
}

impl Records {
    fn parts<'a>(size: &'a [u8; 8], rank: &'a [u8; 8], record: &'a [u8]) -> [&'a [u8]; 4] {
        [b"smddp address record", size, rank, record]
    }

    /// Encodes the record of `rank` for the store, followed by its authentication code.
    pub(super) fn seal(&self, rank: usize, address: &TreeAddress) -> Vec<u8> {
        let mut record = postcard::to_allocvec(address).unwrap_or_default();
        if let Some(key) = &self.key {
            let (size, rank) = ((self.size as u64).to_le_bytes(), (rank as u64).to_le_bytes());
            let tag = key.tag(&Self::parts(&size, &rank, &record));
            record.extend(tag);
        }
        record
    }

    /// Decodes and verifies a record of `rank`. An error text continues "rank 3 has ...".
    pub(super) fn open(&self, rank: usize, bytes: &[u8]) -> Result<TreeAddress, String> {
        let (address, tag) = parse_address(bytes)?;
        let record = &bytes[..bytes.len() - tag.len()];
        let (size, rank) = ((self.size as u64).to_le_bytes(), (rank as u64).to_le_bytes());
        let differs = match &self.key {
            None if tag.is_empty() => return Ok(address),
            Some(key) if key.verifies(&Self::parts(&size, &rank, record), tag) => return Ok(address),
            None => "SMDDP_JOB_TOKEN_FILE is set there and not here",
            Some(_) if tag.is_empty() => "SMDDP_JOB_TOKEN_FILE is set here and not there",
            Some(_) => {
                "its address record does not verify under SMDDP_JOB_TOKEN_FILE of this rank: the files differ, or the record was \
                 changed in the store"
            }
        };
        Err(format!("another job token: {differs}"))
    }
}

/// Splits a record into address and authentication code. Compares the versions before it decodes the rest.
pub(super) fn parse_address(bytes: &[u8]) -> Result<(TreeAddress, &[u8]), String> {
    let malformed = |_| format!("a malformed address record ({} bytes)", bytes.len());
    let ((protocol, version), _) = postcard::take_from_bytes::<(u32, &str)>(bytes).map_err(malformed)?;
    let mine = env!("CARGO_PKG_VERSION");
    if (protocol, version) != (PROTOCOL, mine) {
        return Err(format!(
            "another version of smddp: {version} with protocol {protocol} there, {mine} with protocol {PROTOCOL} here"
        ));
    }
    postcard::take_from_bytes(bytes).map_err(malformed)
}

/// Decodes a record without verification, for error texts.
pub(super) fn parse_unverified(bytes: &[u8]) -> Option<TreeAddress> {
    parse_address(bytes).ok().map(|(address, _)| address)
}

struct ProcessId([u8; 8]);

impl Default for ProcessId {
    fn default() -> Self {
        Self(random())
    }
}

/// Returns the random id of this process. A forked child has another one.
pub(super) fn process_id() -> [u8; 8] {
    static PROCESS_ID: PerProcess<ProcessId> = PerProcess::new();
    PROCESS_ID.get().0
}

/// Returns the nanoseconds since the boot.
pub(super) fn now() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Duration::try_from(now).map_or(0, |now| now.as_nanos() as u64)
}

/// Returns "rank 3 (host h1, pid 812)" from its address record.
pub fn rank_label(rank: usize, address: &[u8]) -> String {
    match parse_address(address) {
        Ok((TreeAddress { host, pid, .. }, _)) => format!("rank {rank} (host {host}, pid {pid})"),
        Err(_) => format!("rank {rank}"),
    }
}
