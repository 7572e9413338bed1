//! Tests of the exchange of rank information over the tree.

#[allow(unsafe_code)]
mod identity;

use std::io::Write;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::UnixStream;

use smddp_net::handshake::{GREETING_BYTES, HandshakeEnd};

use super::children::GREETING_TIMEOUT;
use super::*;
use crate::fuzzing::feed::options;
use crate::joint::Prepared;

/// The smallest time step.
const MOMENT: Duration = Duration::from_nanos(1);

fn trees(size: usize) -> Vec<RankTree> {
    let rank = |rank| Prepared::new(rank, size, Vec::new(), &options(rank)).unwrap();
    (0..size).map(|one| rank(one).tree().unwrap()).collect()
}

/// Polls all ranks repeatedly until each has a result.
fn outcomes(trees: &mut [RankTree]) -> Vec<TreeResult> {
    let begun = Instant::now();
    let mut found = vec![None; trees.len()];
    while found.iter().any(Option::is_none) {
        assert!(begun.elapsed() < Duration::from_secs(60), "the exchange does not end");
        for (tree, found) in trees.iter_mut().zip(&mut found) {
            let now = Instant::now();
            tree.wait(Duration::from_micros(100), now);
            *found = tree.poll(now).cloned().or(found.take());
        }
    }
    found.into_iter().flatten().collect()
}

fn call_parents(trees: &mut [RankTree]) {
    for rank in 1..trees.len() {
        let parent = trees[rank].parent().unwrap();
        let address = trees[parent].address();
        let token = trees[0].token.clone().unwrap();
        assert!(trees[rank].set_parent(token, &address, Instant::now()).unwrap());
    }
}

fn unauthenticated_stream(tree: &RankTree) -> UnixStream {
    let address = std::os::unix::net::SocketAddr::from_abstract_name(&tree.address.socket).unwrap();
    UnixStream::connect_addr(&address).unwrap()
}

#[test]
fn unauthenticated_connections_do_not_block_the_exchange() {
    let mut trees = trees(12);
    let mut incoming = Vec::new();
    let token = trees[0].token.clone().unwrap();
    for length in 0..GREETING_BYTES + 8 {
        let mut stream = unauthenticated_stream(&trees[0]);
        // An empty greeting, a part of it, all of it, and more than that.
        let handshake = link::initiator(1, &trees[0].address.id, &token).unwrap();
        let mut bytes = handshake.output().to_vec();
        bytes.truncate(length);
        bytes.resize(2 * length, 0xff);
        stream.write_all(&bytes).unwrap();
        incoming.push(stream);
    }
    call_parents(&mut trees);
    for outcome in outcomes(&mut trees) {
        assert_eq!(outcome.unwrap().len(), 12);
    }
}

#[test]
fn malformed_message_of_a_child_fails_all_ranks() {
    for malformed in [&[0xff; 40][..], &[0], &[0, 3, 1, 2], &[1, 0, 200]] {
        let mut trees = trees(10);
        call_parents(&mut trees);
        // Connects as rank 9, whose parent is rank 8.
        let (token, address) = (trees[0].token.clone().unwrap(), trees[8].address());
        let address = trees[8].records.open(8, &address).unwrap();
        let mut child = TreeLink::connect(&address, &trees[9].address, 9, &token, Instant::now()).unwrap();
        child.send_text(malformed);
        trees.truncate(9);
        while !(child.handshake(&address.id, None).unwrap() && child.is_flushed()) {
            child.write().unwrap();
            for tree in &mut trees {
                let _ = tree.poll(Instant::now());
            }
        }
        for outcome in outcomes(&mut trees) {
            let reason = format!("rank 9 sent a malformed message ({} bytes)", malformed.len());
            assert_eq!(outcome.unwrap_err(), StartupFailure::of(reason), "{malformed:?}");
        }
    }
}

#[test]
fn death_of_a_child_ends_the_exchange_immediately() {
    let mut trees = trees(10);
    call_parents(&mut trees);
    while !matches!(&trees[9].parent_link, ParentLink::Connected { link, .. } if link.is_authenticated()) {
        // Rank 0 waits for the other ranks, which are not polled.
        for rank in [0, 8, 9] {
            let _ = trees[rank].poll(Instant::now());
        }
    }
    trees[8].poll(Instant::now());
    trees.truncate(9);
    for outcome in outcomes(&mut trees) {
        assert_eq!(outcome.unwrap_err().lost, Some(9));
    }
}

/// Returns rank 8 of ten, and the address record of rank 9, which has ended. The record is older than rank 8, so it may belong to
/// an earlier attempt.
fn without_the_last(seen: Option<Instant>) -> (RankTree, Vec<u8>) {
    let mut trees = trees(10);
    trees[9].address.created = 0;
    let address = trees[9].address();
    assert!(trees[8].suspects().contains(&9));
    if let Some(now) = seen {
        trees[8].probe(9, &address, Duration::MAX, now).unwrap();
        assert!(!trees[8].suspects().contains(&9), "its end would be seen");
    }
    (trees.swap_remove(8), address)
}

fn lost(tree: &RankTree) -> Option<usize> {
    tree.failure().and_then(|failure| failure.lost)
}

#[test]
fn probed_rank_that_ends_before_it_connects_is_lost_immediately() {
    let now = Instant::now();
    let (mut tree, address) = without_the_last(Some(now));
    for _ in 0..4 {
        let _ = tree.poll(now);
        if tree.suspects().contains(&9) {
            tree.probe(9, &address, Duration::MAX, now).unwrap();
        }
    }
    assert_eq!(lost(&tree), Some(9));
}

#[test]
fn unseen_rank_is_lost_after_its_patience_and_not_before() {
    let (now, patience) = (Instant::now(), Duration::from_secs(5));
    let (mut tree, address) = without_the_last(None);
    for waited in [Duration::ZERO, patience - MOMENT] {
        tree.probe(9, &address, patience, now + waited).unwrap();
        assert_eq!(lost(&tree), None, "{waited:?}");
    }
    tree.probe(9, &address, patience, now + patience).unwrap();
    assert_eq!(lost(&tree), Some(9));
}

#[test]
fn silent_parent_is_unreachable_after_the_timeout_and_not_before() {
    let (mut trees, now) = (trees(2), Instant::now());
    let (token, address) = (trees[0].token.clone().unwrap(), trees[0].address());
    assert!(trees[1].set_parent(token.clone(), &address, now).unwrap());
    for (waited, lost) in [(SUSPECT_AFTER - MOMENT, false), (SUSPECT_AFTER, true)] {
        assert_eq!(
            trees[1].needs_addresses(now + waited),
            lost,
            "its address must be read again: {waited:?}"
        );
    }
    // The same address, read again, does not restart the timeouts.
    assert!(!trees[1].set_parent(token, &address, now + SUSPECT_AFTER).unwrap());
    assert!(!trees[1].needs_addresses(now + SUSPECT_AFTER));
    for waited in [SUSPECT_AFTER, PARENT_TIMEOUT - MOMENT] {
        assert_eq!(trees[1].poll(now + waited), None);
        assert_eq!(trees[1].take_relay(), None, "{waited:?}");
    }
    assert_eq!(trees[1].poll(now + PARENT_TIMEOUT), None);
    assert_eq!(trees[1].take_relay().unwrap().1, "it does not answer");
}

#[test]
fn unauthenticated_connections_at_the_limit_are_closed_after_the_timeout_and_not_before() {
    let (mut trees, now) = (trees(2), Instant::now());
    let mut unauthenticated = Vec::new();
    for _ in 0..MAX_INCOMING {
        unauthenticated.push(unauthenticated_stream(&trees[0]));
        let _ = trees[0].poll(now);
    }
    for (waited, left) in [
        (Duration::ZERO, MAX_INCOMING),
        (GREETING_TIMEOUT - MOMENT, MAX_INCOMING),
        (GREETING_TIMEOUT, 0),
        (2 * GREETING_TIMEOUT, 0),
    ] {
        let _ = trees[0].poll(now + waited);
        assert_eq!(trees[0].incoming.len(), left, "{waited:?}");
    }
    drop(unauthenticated);
}

#[test]
fn newer_record_of_the_same_host_belongs_to_this_attempt() {
    let mut trees = trees(10);
    let address = trees[9].address();
    trees.truncate(9);
    for _ in 0..2 {
        trees[8].probe(9, &address, Duration::MAX, Instant::now()).unwrap();
    }
    assert_eq!(trees[8].failure().and_then(|failure| failure.lost), Some(9));
}

#[test]
fn restarted_rank_is_not_lost() {
    let mut trees = trees(10);
    let address = trees[9].address();
    trees[8].probe(9, &address, Duration::MAX, Instant::now()).unwrap();
    trees.truncate(9);
    let again = Prepared::new(9, 10, Vec::new(), &options(9)).unwrap().tree().unwrap();
    for _ in 0..4 {
        let _ = trees[8].poll(Instant::now());
        trees[8].probe(9, &again.address(), Duration::MAX, Instant::now()).unwrap();
    }
    assert_eq!(trees[8].failure(), None);
    assert!(!trees[8].suspects().contains(&9));
}
