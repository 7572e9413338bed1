//! State of the processes of other nodes in the groups of this process, for `smddp status`.

use std::collections::HashSet;

use serde_json::{Value, json};
use smddp_group::status_query::{self, StatusPeers};

use super::{Recorder, live};

/// Identity and members of a group.
#[derive(Default)]
pub(crate) struct Members {
    /// Identity of the group, equal on all of its ranks; `None` for a group of one rank.
    pub(crate) id: Option<[u8; 16]>,
    /// "rank 3 (host h1, pid 812)", by rank.
    pub(crate) names: std::sync::Arc<[String]>,
    /// Ranks of other nodes; `None` for a group of one node.
    pub(crate) peers: Option<StatusPeers>,
}

impl Members {
    /// Returns the identity of the group as text.
    pub(super) fn id(&self) -> Option<String> {
        let id = self.id?;
        Some(id.iter().map(|byte| format!("{byte:02x}")).collect())
    }
}

/// Queries each process of other nodes once, and returns the members of the groups, the replies and the ranks without a
/// reply. It takes as long as the slowest reply.
pub(super) fn job() -> Value {
    let mut recorders = live();
    recorders.sort_by_key(|recorder| std::cmp::Reverse(recorder.size));
    let mut known = HashSet::new();
    let mut subjects: Vec<(&Recorder, usize)> = Vec::new();
    let mut ranks: Vec<(&StatusPeers, usize)> = Vec::new();
    for recorder in &recorders {
        let Some(peers) = &recorder.members.peers else { continue };
        for (rank, _) in peers.ranks().filter(|(_, socket)| known.insert(*socket)) {
            subjects.push((recorder, rank));
            ranks.push((peers, rank));
        }
    }
    let (mut answers, mut silent) = (Vec::new(), Vec::new());
    for ((recorder, rank), reply) in subjects.into_iter().zip(status_query::query(&ranks)) {
        let mut entry = json!({ "group": recorder.members.id(), "rank": rank });
        match reply {
            Ok(text) => {
                entry["text"] = text.into();
                answers.push(entry);
            }
            Err(reason) => {
                entry["why"] = reason.into();
                silent.push(entry);
            }
        }
    }
    let groups: Vec<Value> = recorders.iter().map(|recorder| members(recorder)).collect();
    json!({ "groups": groups, "answers": answers, "silent": silent })
}

fn members(recorder: &Recorder) -> Value {
    json!({
        "name": recorder.name,
        "id": recorder.members.id(),
        "rank": recorder.rank,
        "size": recorder.size,
        "members": &*recorder.members.names,
    })
}
