//! Callers without the token, and callers that have it, in the name of a rank that is connected already.

use std::io::Write;

use super::super::address::{HELLO, Hello, Purpose};
use super::*;
use crate::fuzzing::feed::header;
use crate::token::{Initiator, NONCE, PROOF, REPLY};

/// First message of rank 0 to rank 1 at that endpoint.
fn to_rank_1(group_listener: &TcpAddress, purpose: Purpose) -> Hello {
    Hello { group_listener: group_listener.group_listener, from: 0, to: 1, purpose }
}

/// Frames of a stranger: poison, goodbye, data of the next operation, a stream that turns elsewhere.
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
fn a_second_connection_in_a_ranks_name_is_refused_and_the_first_goes_on() {
    for case in 0..frames(0).len() {
        for (from, to) in [(0, 1), (1, 0)] {
            let mut pair = Pair::new();
            pair.goes_on();
            let (class, bytes) = frames(pair.seq).swap_remove(case);
            // The class of messages is connected when it is first used.
            let first = (class == 1).then(|| pair.call(to, from, class));
            let mut second = pair.call(to, from, class);
            let _ = second.write_all(&bytes);
            for group in &mut pair.groups {
                group.poll_network();
            }
            pair.goes_on();
            assert!(is_hung_up_on(&second), "case {case}: it is listened to");
            pair.goes_on();
            drop((first, second));
        }
    }
}

#[test]
fn unfinished_words_on_many_connections_in_one_name_harm_nobody() {
    for round in 0..40 {
        let mut pair = Pair::new();
        pair.goes_on();
        let bytes = 1000 - round * 16;
        let mut callers: Vec<TcpStream> = Vec::new();
        for _ in 0..5 {
            let mut caller = pair.call(1, 0, 1);
            let _ = caller.write_all(&header(6, 1, [0, 0, bytes, 0, 0, 0]));
            let _ = caller.write_all(&[b'x'; 10]);
            pair.groups[1].poll_network();
            callers.push(caller);
        }
        for part in 0..5 {
            for caller in &mut callers {
                // Those that were sent away notice it here.
                let _ = caller.write_all(&[0xa5; 60]);
                pair.groups[1].poll_network();
            }
            drop(vec![vec![1u8; bytes as usize]; part]);
        }
        pair.goes_on();
        let refused = callers[1..].iter().filter(|caller| is_hung_up_on(caller)).count();
        assert_eq!(refused, callers.len() - 1, "round {round}");
    }
}

#[test]
fn nobody_is_a_rank_that_the_group_does_not_have_there() {
    let mut pair = Pair::new();
    pair.goes_on();
    for from in [1, 2, 7, usize::from(u16::MAX), u32::MAX as usize] {
        assert!(is_hung_up_on(&pair.call(1, from, 0)), "rank {from} is listened to");
    }
    pair.goes_on();
}

#[test]
fn silent_callers_keep_nobody_from_being_heard_and_are_bounded() {
    let mut pair = Pair::new();
    let group_listener = pair.group_listeners[1].clone();
    let mut silent: Vec<TcpStream> =
        (0..300).map(|_| TcpStream::connect(group_listener.socket).unwrap()).collect();
    // Whoever says all but the last byte has said nothing.
    let half = to_rank_1(&group_listener, Purpose::Frames(0)).to_bytes();
    let _ = silent[299].write_all(&half[..39]);
    pair.goes_on();
    assert!(is_hung_up_on(&silent[0]), "the oldest of 300 silent callers is kept");
    pair.goes_on();
}

/// What somebody says who connects there, and what he hears, up to the end of it.
fn told(group_listener: &TcpAddress, words: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(group_listener.socket).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let _ = stream.write_all(words);
    let mut heard = Vec::new();
    let _ = stream.read_to_end(&mut heard);
    heard
}

#[test]
fn without_the_token_nothing_that_is_said_reaches_the_group() {
    let mut pair = Pair::new();
    pair.goes_on();
    let group_listener = pair.group_listeners[1].clone();
    // The rank itself is connected for the class of data, so the recording takes nobody's place.
    let purposes = [Purpose::Frames(0), Purpose::Query, Purpose::Watch];
    for (_, frame) in frames(pair.seq) {
        // Frames alone, and behind a hello with which a rank would begin: they are no proof.
        let (class, later) = (frame.len() % 2, frame.clone());
        for words in [
            frame,
            [&to_rank_1(&group_listener, Purpose::Frames(class)).to_bytes()[..], &[0; NONCE], &later]
                .concat(),
        ] {
            let stream = TcpStream::connect(group_listener.socket).unwrap();
            (&stream).write_all(&words).unwrap();
            // It may be sent away before.
            let _ = stream.shutdown(std::net::Shutdown::Write);
            assert!(is_hung_up_on(&stream));
        }
        pair.goes_on();
    }
    for purpose in purposes {
        // A whole exchange that was recorded, said again: as it was, and to another door.
        let (recorded, said) = feed::authenticate(&group_listener, &pair.token, (0, 1), purpose);
        drop(recorded);
        assert_eq!(said.len(), HELLO + NONCE + PROOF);
        assert_eq!(
            told(&group_listener, &said).len(),
            REPLY,
            "{purpose:?}: heard more than the listener's own proof"
        );
        assert_eq!(told(&pair.group_listeners[0], &said).len(), REPLY);
        // Another token, and one that is right for another purpose, another rank, another door.
        let claim =
            Initiator::new(&feed::known_token(), &to_rank_1(&group_listener, purpose).to_bytes()).unwrap();
        assert_eq!(told(&group_listener, &[claim.greeting(), &[9; PROOF]].concat()).len(), REPLY);
        let unknown = Hello { group_listener: [9; 16], ..to_rank_1(&group_listener, purpose) };
        let unknown = Initiator::new(&pair.token, &unknown.to_bytes()).unwrap();
        assert_eq!(told(&group_listener, unknown.greeting()).len(), 0, "a door that nobody has");
        for to in [0, 2, u32::MAX as usize] {
            let other = Hello { to, ..to_rank_1(&group_listener, purpose) };
            let other = Initiator::new(&pair.token, &other.to_bytes()).unwrap();
            assert_eq!(told(&group_listener, other.greeting()).len(), 0, "rank 1 answers for rank {to}");
        }
    }
    // The rank itself is not shut out by all that, nor taken for connected.
    pair.goes_on();
}

#[test]
fn a_crowd_of_strangers_leaves_the_job_as_it_is() {
    let mut pair = Pair::new();
    pair.goes_on();
    let group_listener = pair.group_listeners[1].clone();
    let half = [&to_rank_1(&group_listener, Purpose::Watch).to_bytes()[..], &[1; NONCE]].concat();
    let callers: Vec<TcpStream> = (0..500)
        .map(|one| {
            let mut stream = TcpStream::connect(group_listener.socket).unwrap();
            // Silent, garbage, a hello without an end, one without a proof, and one in pieces.
            let words: &[u8] = match one % 5 {
                0 => &[],
                1 => &[0xa5; 4000],
                2 => &half[..30],
                3 => &half,
                _ => &half[..1],
            };
            let _ = stream.write_all(words);
            stream
        })
        .collect();
    // A trickle: a byte with each exchange.
    for at in 1..20 {
        for mut stream in callers.iter().skip(4).step_by(5) {
            let _ = stream.write(&half[at..=at]);
        }
        pair.goes_on();
    }
    // Whoever has the token comes in beside them.
    let mut asked = feed::authenticate(&group_listener, &pair.token, (0, 1), Purpose::Query).0;
    asked.read_exact(&mut [0; 8]).unwrap();
    drop(callers);
    pair.goes_on();
}
