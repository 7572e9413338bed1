//! What a rank writes that no rank writes.

use std::io::Write;
use std::net::Shutdown;

use super::super::wire::GOODBYE;
use super::*;
use crate::fuzzing::feed::{BYTES, CELL, FINGERPRINT, Feed, header};

const DATA: u8 = 1;
const CREDIT: u8 = 2;
const LETTER: u8 = 3;
const READY: u8 = 4;
const PIECE: u8 = 5;
const POISON: u8 = 6;
const LEAVE: u8 = 7;
const HAIL: u8 = 8;
const MOVE: u8 = 9;
const MOVED: u8 = 10;

/// Message `index` of the operation under way, of so many bytes.
fn data(seq: u64, index: u64, bytes: u64) -> Vec<u8> {
    frame(DATA, 0, [seq, index, bytes, FINGERPRINT.what, FINGERPRINT.count, BYTES])
}

/// A frame and as many bytes as it says, if they are few.
fn frame(kind: u8, channel: u32, fields: [u64; 6]) -> Vec<u8> {
    let bytes = if fields[2] <= 200_000 { fields[2] as usize } else { 1000 };
    [&header(kind, channel, fields)[..], &vec![0x5a; bytes]].concat()
}

/// What comes of bytes on a class.
fn after(class: usize, bytes: &[Vec<u8>]) -> (Feed, Vec<Fault>) {
    let mut feed = Feed::new();
    let mut stream = feed.connect(class);
    feed.poll();
    for part in bytes {
        let _ = stream.write_all(part);
    }
    let begun = Instant::now();
    loop {
        let faults = feed.settle(std::slice::from_ref(&stream));
        if !faults.is_empty() || begun.elapsed() > DEADLINE {
            return (feed, faults);
        }
    }
}

#[test]
fn what_no_rank_sends_is_an_error_that_names_who_sent_it() {
    let (cell, most) = (CELL as u64, u64::MAX);
    let long = 200_000;
    let cases: Vec<(&str, usize, Vec<Vec<u8>>)> = vec![
        ("a later message first", 0, vec![data(0, 1, cell)]),
        ("the last number", 0, vec![data(0, most, cell)]),
        ("a message twice", 0, vec![data(0, 0, cell), data(0, 0, cell)]),
        (
            "one message too many",
            0,
            vec![data(0, 0, cell), data(0, 1, cell), data(0, 2, 4000), data(0, 3, 1)],
        ),
        ("data on the class of messages", 1, vec![data(0, 0, cell)]),
        ("poison on the other class", 0, vec![frame(POISON, 1, [0, 0, 5, 0, 0, 0])]),
        ("a credit with bytes", 0, vec![frame(CREDIT, 0, [0, 1, 5, 0, 0, 0])]),
        ("a credit with endless bytes", 0, vec![frame(CREDIT, 0, [0, 1, most, 0, 0, 0])]),
        ("endless words", 1, vec![frame(POISON, 1, [0, 0, most, 0, 0, 0])]),
        ("long words", 1, vec![frame(POISON, 1, [0, 0, 1 << 20, 0, 0, 0])]),
        ("a goodbye of another class", 0, vec![frame(LEAVE, 7, [0, 1, 0, 0, 0, 0])]),
        ("a goodbye of no class", 1, vec![frame(LEAVE, u32::MAX, [0, 1, 0, 0, 0, 0])]),
        ("an endless short message", 1, vec![frame(LETTER, 0, [5, 1, 0, 0, 3, most])]),
        ("a long short message", 1, vec![frame(LETTER, 0, [5, 1, 0, 0, 3, long])]),
        (
            "a stream twice",
            1,
            vec![frame(LETTER, 0, [5, 0, 0, 0, 3, long]), frame(LETTER, 0, [5, 0, 0, 0, 3, 9])],
        ),
        ("a piece of nothing", 1, vec![frame(PIECE, 0, [5, 0, 9, 0, 0, 0])]),
        (
            "a piece that nobody asked for",
            1,
            vec![frame(LETTER, 0, [5, 0, 0, 0, 3, 1 << 40]), frame(PIECE, 0, [5, 40, 128 << 10, 0, 0, 0])],
        ),
        (
            "a piece out of order",
            1,
            vec![frame(LETTER, 0, [5, 1, 0, 0, 3, 90]), frame(PIECE, 0, [5, most, 90, 0, 0, 0])],
        ),
        (
            "a short piece",
            1,
            vec![frame(LETTER, 0, [5, 1, 0, 0, 3, 90]), frame(PIECE, 0, [5, 0, 89, 0, 0, 0])],
        ),
        ("a turn with bytes", 0, vec![frame(MOVE, 0, [0, 0, 3, 0, 0, 0])]),
        ("a turn where there is no other way", 0, vec![frame(MOVE, 0, [0; 6])]),
        ("no frame", 0, vec![vec![0xee; 64]]),
    ];
    for (name, class, bytes) in cases {
        let (feed, faults) = after(class, &bytes);
        assert!(
            matches!(&faults[..], [Fault::Lost { rank: 0, .. }, ..]),
            "{name}: {faults:?}, {} messages read",
            feed.read
        );
    }
}

#[test]
fn what_a_rank_may_send_is_no_error() {
    let cell = CELL as u64;
    let cases = [
        (0, vec![data(0, 0, cell), data(0, 1, cell), data(0, 2, 4000)], 3),
        (0, vec![data(u64::MAX, 0, cell)], 0),
        (0, vec![data(1, 0, cell)], 0),
        (0, vec![frame(CREDIT, 0, [0, u64::MAX, 0, 0, 0, 0]), frame(CREDIT, 99, [7, 1, 0, 0, 0, 0])], 0),
        (1, vec![frame(READY, 0, [9, u64::MAX, 0, 0, 0, 0]), frame(READY, 1, [9, 0, 0, 0, 0, u64::MAX])], 0),
        (1, vec![frame(LETTER, 0, [5, 1, 0, 0, 3, 90]), frame(PIECE, 0, [5, 0, 90, 0, 0, 0])], 0),
        (1, vec![frame(LETTER, 0, [u64::MAX, 0, 0, 0, 3, u64::MAX])], 0),
        (0, vec![frame(MOVED, 0, [0; 6]), data(0, 0, cell)], 0),
        (0, vec![frame(HAIL, 0, [u64::MAX, 0, 0, 1, 2, 3])], 0),
    ];
    for (case, (class, bytes, read)) in cases.into_iter().enumerate() {
        let mut feed = Feed::new();
        let mut stream = feed.connect(class);
        for part in &bytes {
            stream.write_all(part).unwrap();
        }
        let begun = Instant::now();
        while feed.read < read && begun.elapsed() < DEADLINE {
            feed.poll();
        }
        let mut faults = feed.settle(std::slice::from_ref(&stream));
        // What is held back would be told by then.
        faults.extend(feed.poll_at(Instant::now() + 2 * GOODBYE));
        assert_eq!((feed.read, &faults[..]), (read, &[][..]), "case {case}");
    }
}

#[test]
fn who_hangs_up_in_the_middle_of_a_frame_is_lost_once_a_goodbye_has_had_its_time_and_no_moment_earlier() {
    let (mut feed, now) = (Feed::new(), Instant::now());
    let mut stream = feed.connect(0);
    stream.write_all(&data(0, 0, CELL as u64)[..70]).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    stream.set_nonblocking(true).unwrap();
    // Whoever has noticed hangs up, too.
    while !matches!(stream.read(&mut [0; 64]), Ok(0)) {
        assert_eq!(feed.poll_at(now), []);
    }
    for held_back in [Duration::ZERO, GOODBYE - Duration::from_nanos(1)] {
        assert_eq!(feed.poll_at(now + held_back), []);
    }
    let faults = feed.poll_at(now + GOODBYE);
    assert!(matches!(&faults[..], [Fault::Lost { rank: 0, .. }]), "{faults:?}");
}

/// The next number of a row that looks like chance.
fn next(seed: &mut u64) -> u64 {
    *seed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *seed;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[test]
fn any_frames_in_any_order_on_any_connections_are_an_error_at_worst() {
    const TELLING: [u64; 12] = [0, 1, 2, 3, 5, 8, 64, CELL as u64, BYTES, 128 << 10, 1 << 62, u64::MAX];
    for start in 0..150 {
        let mut seed = start;
        let mut feed = Feed::new();
        let mut streams: Vec<TcpStream> = [0, 1, 0, 1].into_iter().map(|class| feed.connect(class)).collect();
        for _ in 0..24 {
            let mut field = || TELLING[next(&mut seed) as usize % TELLING.len()];
            let fields = [field() % 4, field(), field(), field(), field(), field()];
            let fields = if next(&mut seed).is_multiple_of(2) {
                [0, fields[1] % 3, fields[2] % 6000, FINGERPRINT.what, FINGERPRINT.count, BYTES]
            } else {
                fields
            };
            let kind = (next(&mut seed) % 10) as u8 + 1;
            let bytes = frame(kind, (next(&mut seed) % 3) as u32, fields);
            // Cut anywhere: what is left out comes with the next frame.
            let cut = bytes.len() - (next(&mut seed) as usize % 3) * (bytes.len() / 5);
            let at = next(&mut seed) as usize % streams.len();
            let _ = streams[at].set_nonblocking(true);
            let _ = streams[at].write(&bytes[..cut]);
            feed.poll();
        }
        feed.settle(&[]);
    }
}
