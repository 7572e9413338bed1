//! Messages of the tree: rank information upwards and downwards, or the failure of the group.

use std::io;

use serde::{Deserialize, Serialize};
use smddp_net::handshake::is_unauthenticated;

/// Reason why the group cannot be created.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartupFailure {
    /// Ranks that did not join in time, if that is the reason.
    pub missing: Vec<usize>,
    /// Rank that was lost after it had joined, if that is the reason. `reason` then describes how the loss was detected.
    pub lost: Option<usize>,
    /// Description of the failure, for error messages.
    pub reason: String,
}

impl StartupFailure {
    /// Creates a failure that names no missing or lost rank.
    pub fn of(reason: String) -> Self {
        Self { missing: Vec::new(), lost: None, reason }
    }

    /// Creates a failure caused by the loss of `rank`.
    pub fn lost(rank: usize, reason: String) -> Self {
        Self { missing: Vec::new(), lost: Some(rank), reason }
    }

    /// Encodes the failure, reported by `rank`, for the store.
    pub fn encode(&self, rank: usize) -> Vec<u8> {
        postcard::to_allocvec(&(rank, self)).unwrap_or_default()
    }

    /// Decodes a failure and the rank that reported it. Other bytes become the reason of a failure without a rank.
    pub fn decode(bytes: &[u8]) -> (Option<usize>, Self) {
        match postcard::from_bytes(bytes) {
            Ok((rank, failure)) => (Some(rank), failure),
            Err(_) => (None, Self::of(String::from_utf8_lossy(bytes).into_owned())),
        }
    }
}

/// Payload of a message: upwards the information of a rank and of its subtree, downwards that of all ranks; or a failure.
pub(super) type Payload = Result<Vec<(u32, Vec<u8>)>, StartupFailure>;

/// Information of all ranks in rank order, or a failure.
pub type TreeResult = Result<Vec<Vec<u8>>, StartupFailure>;

pub(super) fn encode_payload(payload: &Payload) -> Vec<u8> {
    postcard::to_allocvec(payload).unwrap_or_default()
}

/// Decodes a message of rank `from`.
pub(super) fn parse(from: usize, bytes: &[u8]) -> Payload {
    let malformed =
        || StartupFailure::of(format!("rank {from} sent a malformed message ({} bytes)", bytes.len()));
    postcard::from_bytes(bytes).unwrap_or_else(|_| Err(malformed()))
}

/// Labels in the authentication code of a message that is relayed from a child to its parent, and of the reply.
pub(super) const UP: &[u8] = b"smddp carried up";

pub(super) const DOWN: &[u8] = b"smddp carried down";

pub(super) fn tampered(rank: usize) -> StartupFailure {
    StartupFailure::of(format!(
        "messages of rank {rank} in the store do not verify under the group's token: they were changed there"
    ))
}

pub(super) fn connection_lost(rank: usize, error: &io::Error) -> StartupFailure {
    if is_unauthenticated(error) {
        return StartupFailure::of(format!("message of rank {rank}: {error}"));
    }
    StartupFailure::lost(
        rank,
        format!(
            "closed its connection before the exchange of rank information was complete ({error}): it ended, or gave up"
        ),
    )
}

pub(super) fn encode_downward(outcome: &TreeResult) -> Vec<u8> {
    let numbered = |rank_infos: &Vec<Vec<u8>>| {
        rank_infos.iter().enumerate().map(|(rank, rank_info)| (rank as u32, rank_info.clone())).collect()
    };
    encode_payload(&outcome.as_ref().map(numbered).map_err(Clone::clone))
}
