//! Callers in the name of a rank that is connected already.

use std::io::Write;

use super::super::hello::{Purpose, hello};
use super::*;
use crate::fuzzing::feed::{call, header};

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
            let first = (class == 1).then(|| call(&pair.doors[to], from, class));
            let mut second = call(&pair.doors[to], from, class);
            let _ = second.write_all(&bytes);
            for group in &mut pair.groups {
                group.turn();
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
            let mut caller = call(&pair.doors[1], 0, 1);
            let _ = caller.write_all(&header(6, 0, [0, 0, bytes, 0, 0, 0]));
            let _ = caller.write_all(&[b'x'; 10]);
            pair.groups[1].turn();
            callers.push(caller);
        }
        for part in 0..5 {
            for caller in &mut callers {
                // Those that were sent away notice it here.
                let _ = caller.write_all(&[0xa5; 60]);
                pair.groups[1].turn();
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
        assert!(is_hung_up_on(&call(&pair.doors[1], from, 0)), "rank {from} is listened to");
    }
    pair.goes_on();
}

#[test]
fn silent_callers_keep_nobody_from_being_heard_and_are_bounded() {
    let mut pair = Pair::new();
    let door = pair.doors[1].clone();
    let mut silent: Vec<TcpStream> = (0..300).map(|_| TcpStream::connect(door.socket).unwrap()).collect();
    // Whoever says all but the last byte has said nothing.
    let half = hello(&door.token, 0, Purpose::Class(0));
    let _ = silent[299].write_all(&half[..39]);
    pair.goes_on();
    assert!(is_hung_up_on(&silent[0]), "the oldest of 300 silent callers is kept");
    pair.goes_on();
}
