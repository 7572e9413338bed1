//! Connections without the token, and connections with it that claim a rank that is already connected.

use std::io::Write;

use smddp_net::handshake::{GREETING_BYTES, HandshakeEnd, PROOF_BYTES, REPLY_BYTES};
pub(super) use smddp_tcp::address::Purpose;

use super::*;
use crate::fuzzing::feed::header;

/// Returns a greeting of rank 0 to rank `to` at that listener, under that token.
fn greeting(address: &TcpAddress, token: &Arc<Token>, to: usize, purpose: Purpose) -> Vec<u8> {
    feed::initiator(address, token, (0, to), purpose).output().to_vec()
}

/// Returns frames of an unauthenticated peer: abort, leave, data of the next operation, switch to another connection.
fn frames(seq: u64) -> Vec<(usize, Vec<u8>)> {
    let frame =
        |kind, channel, fields, payload: &[u8]| [&header(kind, channel, fields)[..], payload].concat();
    vec![
        (0, Vec::new()),
        (1, Vec::new()),
        (0, (0..200).map(|i| (i * 37 + 11) as u8).collect()),
        (1, frame(6, 0, [seq, 0, 5, 0, 0, 0], b"C\nbad")),
        (0, frame(7, 0, [seq, 1, 0, 0, 0, 0], b"")),
        (1, frame(7, 1, [seq, 2, 0, 0, 0, 0], b"")),
        (0, frame(1, 0, [seq, 0, 8, 7, 1, 8], &999u64.to_le_bytes())),
        (0, frame(9, 0, [0; 6], b"")),
        (0, frame(8, 0, [seq, 0, 0, 9, 9, 0], b"")),
    ]
}

#[test]
fn second_connection_of_a_rank_is_rejected_and_the_first_is_kept() {
    for case in 0..frames(0).len() {
        for (from, to) in [(0, 1), (1, 0)] {
            let mut pair = Pair::new();
            pair.check_exchanges();
            let (class, bytes) = frames(pair.seq).swap_remove(case);
            // The connection for messages opens on first use.
            let first = (class == 1).then(|| pair.call(to, from, class));
            let mut second = pair.call(to, from, class);
            let _ = second.write_all(&bytes);
            for group in &mut pair.groups {
                group.poll();
            }
            pair.check_exchanges();
            assert!(is_closed_by_peer(&second), "case {case}: it is accepted");
            pair.check_exchanges();
            drop((first, second));
        }
    }
}

#[test]
fn unfinished_frames_on_many_connections_of_one_rank_do_no_harm() {
    for round in 0..40 {
        let mut pair = Pair::new();
        pair.check_exchanges();
        let bytes = 1000 - round * 16;
        let mut connections: Vec<TcpStream> = Vec::new();
        for _ in 0..5 {
            let mut connection = pair.call(1, 0, 1);
            let _ = connection.write_all(&header(6, 1, [0, 0, bytes, 0, 0, 0]));
            let _ = connection.write_all(&[b'x'; 10]);
            pair.groups[1].poll();
            connections.push(connection);
        }
        for part in 0..5 {
            for connection in &mut connections {
                // Writes on rejected connections fail here.
                let _ = connection.write_all(&[0xa5; 60]);
                pair.groups[1].poll();
            }
            drop(vec![vec![1u8; bytes as usize]; part]);
        }
        pair.check_exchanges();
        let refused = connections[1..].iter().filter(|connection| is_closed_by_peer(connection)).count();
        assert_eq!(refused, connections.len() - 1, "round {round}");
    }
}

#[test]
fn connection_that_claims_an_invalid_rank_is_rejected() {
    let mut pair = Pair::new();
    pair.check_exchanges();
    for from in [1, 2, 7, usize::from(u16::MAX), u32::MAX as usize] {
        assert!(is_closed_by_peer(&pair.call(1, from, 0)), "rank {from} is accepted");
    }
    pair.check_exchanges();
}

#[test]
fn silent_connections_are_limited_and_do_not_block_others() {
    let mut pair = Pair::new();
    let address = pair.addresses[1].clone();
    let mut silent: Vec<TcpStream> = (0..300).map(|_| TcpStream::connect(address.socket).unwrap()).collect();
    // A greeting without its last byte does not count.
    let half = greeting(&address, &pair.token, 1, Purpose::Frames(0));
    let _ = silent[299].write_all(&half[..GREETING_BYTES - 1]);
    pair.check_exchanges();
    assert!(is_closed_by_peer(&silent[0]), "the oldest of 300 silent connections is kept");
    pair.check_exchanges();
}

/// Sends bytes to a listener. Returns everything that it replies until it closes the connection.
fn replies_to(address: &TcpAddress, sent: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(address.socket).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let _ = stream.write_all(sent);
    let mut received = Vec::new();
    let _ = stream.read_to_end(&mut received);
    received
}

#[test]
fn unauthenticated_data_does_not_reach_the_group() {
    let mut pair = Pair::new();
    pair.check_exchanges();
    let address = pair.addresses[1].clone();
    // The rank itself has its connection for collectives, so the recorded handshake does not take its place.
    let purposes = [Purpose::Frames(0), Purpose::Query, Purpose::Watch, Purpose::Status];
    for (_, frame) in frames(pair.seq) {
        // Frames alone, and frames after a valid greeting: neither proves anything.
        let class = Purpose::Frames(frame.len() % 2);
        let later = [greeting(&address, &pair.token, 1, class), frame.clone()].concat();
        for bytes in [frame, later] {
            let stream = TcpStream::connect(address.socket).unwrap();
            (&stream).write_all(&bytes).unwrap();
            // The listener may close the connection earlier.
            let _ = stream.shutdown(std::net::Shutdown::Write);
            assert!(is_closed_by_peer(&stream));
        }
        pair.check_exchanges();
    }
    for purpose in purposes {
        // Replay of a recorded handshake, to the same listener and to another one.
        let (recorded, sent) = feed::authenticate(&address, &pair.token, (0, 1), purpose);
        drop(recorded);
        assert_eq!(sent.len(), GREETING_BYTES + PROOF_BYTES);
        assert_eq!(
            replies_to(&address, &sent).len(),
            REPLY_BYTES,
            "{purpose:?}: it received more than the listener's reply"
        );
        assert_eq!(replies_to(&pair.addresses[0], &sent).len(), REPLY_BYTES);
        // Another token, and the group's token with another listener id or rank.
        let other_token = greeting(&address, &smddp_net::fuzzing::known_token(), 1, purpose);
        assert_eq!(replies_to(&address, &[&other_token[..], &[9; PROOF_BYTES]].concat()).len(), REPLY_BYTES);
        let unknown = TcpAddress { listener_id: [9; 16], ..address.clone() };
        let unknown = greeting(&unknown, &pair.token, 1, purpose);
        assert_eq!(replies_to(&address, &unknown).len(), 0, "unknown listener id");
        for to in [0, 2, u32::MAX as usize] {
            let other = greeting(&address, &pair.token, to, purpose);
            assert_eq!(replies_to(&address, &other).len(), 0, "rank 1 replies for rank {to}");
        }
        // A class that does not exist, and a purpose of another listener.
        for other in [Purpose::Frames(2), Purpose::Frames(usize::MAX), Purpose::Memory, Purpose::Bootstrap] {
            let other = greeting(&address, &pair.token, 1, other);
            assert_eq!(replies_to(&address, &other).len(), 0, "a reply for another purpose");
        }
    }
    // The rank itself is neither locked out nor counted as connected.
    pair.check_exchanges();
}

#[test]
fn many_unauthenticated_connections_do_not_affect_the_group() {
    let mut pair = Pair::new();
    pair.check_exchanges();
    let address = pair.addresses[1].clone();
    let half = greeting(&address, &pair.token, 1, Purpose::Watch);
    let connections: Vec<TcpStream> = (0..500)
        .map(|index| {
            let mut stream = TcpStream::connect(address.socket).unwrap();
            // Silent, garbage, an incomplete greeting, a greeting without a proof, and a greeting byte by byte.
            let bytes: &[u8] = match index % 5 {
                0 => &[],
                1 => &[0xa5; 4000],
                2 => &half[..30],
                3 => &half[..],
                _ => &half[..1],
            };
            let _ = stream.write_all(bytes);
            stream
        })
        .collect();
    // One byte with each exchange.
    for at in 1..20 {
        for mut stream in connections.iter().skip(4).step_by(5) {
            let _ = stream.write(&half[at..=at]);
        }
        pair.check_exchanges();
    }
    // An authenticated connection is accepted at the same time.
    let mut query = feed::authenticate(&address, &pair.token, (0, 1), Purpose::Query).0;
    query.read_exact(&mut [0; 8]).unwrap();
    drop(connections);
    pair.check_exchanges();
}
