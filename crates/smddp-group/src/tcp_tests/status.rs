//! Status queries between two ranks, with and without encryption.

use smddp_process::StatusQuery;
use smddp_tcp::status_query;

use super::Pair;

/// State of this process: more than one encrypted record and one socket buffer. Tests of this process may send other queries.
fn state(query: StatusQuery) -> String {
    match query {
        StatusQuery::Status => "state ".repeat(200_000),
        _ => String::new(),
    }
}

fn ranks_receive_the_state(encrypts: bool) {
    smddp_process::set_responder(state);
    let mut pair = Pair::with(|options| options.encrypts = encrypts, |_| {});
    let peers = [0, 1].map(|rank| pair.groups[rank].health().status_peers().unwrap());
    for (rank, peers) in peers.iter().enumerate() {
        let ranks: Vec<usize> = peers.ranks().map(|(peer, _)| peer).collect();
        assert_eq!(ranks, [1 - rank], "a rank of this node is queried");
        assert_eq!(status_query::query(&[(peers, 1 - rank)]), [Ok(state(StatusQuery::Status))]);
    }
    pair.check_exchanges();
    let [first, other] = pair.groups;
    drop(other);
    let closed = Err(status_query::CLOSED.to_owned());
    assert_eq!(status_query::query(&[(&peers[0], 1)]), [closed]);
    drop(first);
}

#[test]
fn ranks_receive_the_state_of_another_node() {
    ranks_receive_the_state(false);
}

#[test]
fn ranks_receive_the_encrypted_state_of_another_node() {
    ranks_receive_the_state(true);
}

#[test]
fn group_has_one_identity_on_all_ranks_and_another_group_has_another() {
    let identities = [Pair::new(), Pair::new()].map(|pair| pair.groups.map(|group| group.info().id));
    for [one, other] in identities {
        assert!(one.is_some() && one == other);
    }
    assert_ne!(identities[0], identities[1]);
}
