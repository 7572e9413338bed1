//! State of the processes of other nodes in the groups of this process, for `smddp status`.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use serde_json::{Value, json};
use smddp_group::status_query::{self, StatusPeers, StatusReply};

use super::{Recorder, live};

/// Identity and members of a group.
#[derive(Default)]
pub(crate) struct Members {
    /// Identity of the group, equal on all of its ranks; `None` for a group of one rank.
    pub(crate) id: Option<[u8; 16]>,
    /// "rank 3 (host h1, pid 812)", by rank.
    pub(crate) names: Arc<[String]>,
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

/// Rank of another process in a group of this process.
type Contact<'a> = (&'a Recorder, &'a StatusPeers, usize);

/// Queries each process of other nodes, and returns the members of the groups, the replies and the ranks without a reply. It
/// takes as long as the slowest reply.
pub(super) fn job() -> Value {
    let mut recorders = live();
    recorders.retain(|recorder| !recorder.closed.load(Ordering::Relaxed));
    recorders.sort_by_key(|recorder| std::cmp::Reverse(recorder.size));
    let groups: Vec<Value> = recorders.iter().map(|recorder| members(recorder)).collect();
    let until = Instant::now() + status_query::TOTAL_LIMIT;
    let query = |contacts: &[Contact<'_>]| {
        let ranks: Vec<_> = contacts.iter().map(|&(_, peers, rank)| (peers, rank)).collect();
        status_query::query_until(&ranks, until)
    };
    let (mut answers, mut silent) = (Vec::new(), Vec::new());
    for ((recorder, _, rank), reply) in query_all(contacts(&recorders), query) {
        let mut entry = json!({ "group": recorder.members.id(), "rank": rank });
        match reply {
            Ok(text) => {
                entry["text"] = text.into();
                answers.push(entry);
            }
            Err(reason) => {
                entry["reason"] = reason.into();
                silent.push(entry);
            }
        }
    }
    json!({ "groups": groups, "answers": answers, "silent": silent })
}

/// Returns the ranks of each process of other nodes, in all groups that it shares with this process.
fn contacts(recorders: &[Arc<Recorder>]) -> Vec<VecDeque<Contact<'_>>> {
    let mut places = HashMap::new();
    let mut contacts: Vec<VecDeque<Contact<'_>>> = Vec::new();
    for recorder in recorders {
        let Some(peers) = &recorder.members.peers else { continue };
        for (rank, socket) in peers.ranks() {
            let place = *places.entry(socket).or_insert_with(|| {
                contacts.push(VecDeque::new());
                contacts.len() - 1
            });
            contacts[place].push_back((recorder, peers, rank));
        }
    }
    contacts
}

/// Queries each process through its first contact. A process that has closed that group is queried through the next one.
fn query_all<C: Copy>(
    mut left: Vec<VecDeque<C>>,
    query: impl Fn(&[C]) -> Vec<StatusReply>,
) -> Vec<(C, StatusReply)> {
    let mut replies = Vec::new();
    while !left.is_empty() {
        let asked: Vec<C> = left.iter_mut().filter_map(VecDeque::pop_front).collect();
        let mut next = Vec::new();
        for ((reply, contact), further) in query(&asked).into_iter().zip(asked).zip(left) {
            match &reply {
                Err(reason) if reason == status_query::CLOSED && !further.is_empty() => next.push(further),
                _ => replies.push((contact, reply)),
            }
        }
        left = next;
    }
    replies
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closed_group_is_not_in_the_answer() {
        let name = "closed group of a job query";
        let topology = smddp_plan::Topology::single(2);
        let recorder = Recorder::new((name, "shm", Members::default()), 0, &topology, Arc::default(), 4);
        let is_listed = || job()["groups"].as_array().unwrap().iter().any(|group| group["name"] == name);
        assert!(is_listed());
        recorder.closed();
        assert!(!is_listed());
    }

    #[test]
    fn process_that_closed_a_group_is_queried_through_the_next_one() {
        let closed = || Err(status_query::CLOSED.to_owned());
        let query = |asked: &[&'static str]| {
            let reply = |name: &&str| match *name {
                "open" => Ok("state".to_owned()),
                "silent" => Err("its host does not respond".to_owned()),
                _ => closed(),
            };
            asked.iter().map(reply).collect::<Vec<_>>()
        };
        let left = [vec!["open", "x"], vec!["closed", "open"], vec!["silent", "open"], vec!["a", "b"]];
        let mut replies = query_all(left.map(VecDeque::from).to_vec(), query);
        replies.sort();
        let silent = ("silent", Err("its host does not respond".to_owned()));
        let open = || ("open", Ok("state".to_owned()));
        assert_eq!(replies, [("b", closed()), open(), open(), silent]);
        assert!(query_all(Vec::new(), query).is_empty());
    }
}
