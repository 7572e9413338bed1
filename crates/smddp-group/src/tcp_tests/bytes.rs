//! Malformed frames of an authenticated peer.

use std::io::Write;
use std::net::Shutdown;

use smddp_tcp::wire::LEAVE_GRACE;

use super::*;
use crate::fuzzing::feed::{BYTES, FINGERPRINT, Feed, SLOT_BYTES, header};

const DATA: u8 = 1;
const CREDIT: u8 = 2;
const ANNOUNCE: u8 = 3;
const GRANT: u8 = 4;
const FRAGMENT: u8 = 5;
const ABORT: u8 = 6;
const LEAVE: u8 = 7;
const WAIT_NOTICE: u8 = 8;
const MOVE: u8 = 9;
const MOVED: u8 = 10;

/// Encodes message `index` of operation `seq`, with a payload of `bytes` bytes.
fn data(seq: u64, index: u64, bytes: u64) -> Vec<u8> {
    frame(DATA, 0, [seq, index, bytes, FINGERPRINT.call, FINGERPRINT.count, BYTES])
}

/// Encodes a frame and its payload. A payload of more than 200,000 bytes is cut to 1,000.
fn frame(kind: u8, channel: u32, fields: [u64; 6]) -> Vec<u8> {
    let bytes = if fields[2] <= 200_000 { fields[2] as usize } else { 1000 };
    [&header(kind, channel, fields)[..], &vec![0x5a; bytes]].concat()
}

/// Sends bytes on a class. Returns the receiver and its faults.
fn faults_after(class: usize, bytes: &[Vec<u8>]) -> (Feed, Vec<Fault>) {
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
fn malformed_frames_are_faults_that_name_the_sender() {
    let (slot, max) = (SLOT_BYTES as u64, u64::MAX);
    let long = 200_000;
    let cases: Vec<(&str, usize, Vec<Vec<u8>>)> = vec![
        ("a message out of order", 0, vec![data(0, 1, slot)]),
        ("the largest message number", 0, vec![data(0, max, slot)]),
        ("a message twice", 0, vec![data(0, 0, slot), data(0, 0, slot)]),
        (
            "one message too many",
            0,
            vec![data(0, 0, slot), data(0, 1, slot), data(0, 2, 4000), data(0, 3, 1)],
        ),
        ("data on the class of messages", 1, vec![data(0, 0, slot)]),
        ("an abort on the other class", 0, vec![frame(ABORT, 1, [0, 0, 5, 0, 0, 0])]),
        ("a credit with a payload", 0, vec![frame(CREDIT, 0, [0, 1, 5, 0, 0, 0])]),
        ("a credit with an endless payload", 0, vec![frame(CREDIT, 0, [0, 1, max, 0, 0, 0])]),
        ("an endless abort report", 1, vec![frame(ABORT, 1, [0, 0, max, 0, 0, 0])]),
        ("a long abort report", 1, vec![frame(ABORT, 1, [0, 0, 1 << 20, 0, 0, 0])]),
        ("a leave of another class", 0, vec![frame(LEAVE, 7, [0, 1, 0, 0, 0, 0])]),
        ("a leave of an invalid class", 1, vec![frame(LEAVE, u32::MAX, [0, 1, 0, 0, 0, 0])]),
        ("an endless inline message", 1, vec![frame(ANNOUNCE, 0, [5, 1, 0, 0, 3, max])]),
        ("a long inline message", 1, vec![frame(ANNOUNCE, 0, [5, 1, 0, 0, 3, long])]),
        (
            "a message announced twice",
            1,
            vec![frame(ANNOUNCE, 0, [5, 0, 0, 0, 3, long]), frame(ANNOUNCE, 0, [5, 0, 0, 0, 3, 9])],
        ),
        ("a fragment without an announcement", 1, vec![frame(FRAGMENT, 0, [5, 0, 9, 0, 0, 0])]),
        (
            "a fragment beyond the grant",
            1,
            vec![
                frame(ANNOUNCE, 0, [5, 0, 0, 0, 3, 1 << 40]),
                frame(FRAGMENT, 0, [5, 40, 128 << 10, 0, 0, 0]),
            ],
        ),
        (
            "a fragment out of order",
            1,
            vec![frame(ANNOUNCE, 0, [5, 1, 0, 0, 3, 90]), frame(FRAGMENT, 0, [5, max, 90, 0, 0, 0])],
        ),
        (
            "a short fragment",
            1,
            vec![frame(ANNOUNCE, 0, [5, 1, 0, 0, 3, 90]), frame(FRAGMENT, 0, [5, 0, 89, 0, 0, 0])],
        ),
        ("a switch with a payload", 0, vec![frame(MOVE, 0, [0, 0, 3, 0, 0, 0])]),
        ("a switch without another connection", 0, vec![frame(MOVE, 0, [0; 6])]),
        ("an invalid header", 0, vec![vec![0xee; 64]]),
    ];
    for (name, class, bytes) in cases {
        let (feed, faults) = faults_after(class, &bytes);
        assert!(
            matches!(&faults[..], [Fault::Lost { rank: 0, .. }, ..]),
            "{name}: {faults:?}, {} messages read",
            feed.read
        );
    }
}

#[test]
fn valid_frames_are_not_faults() {
    let slot = SLOT_BYTES as u64;
    let cases = [
        (0, vec![data(0, 0, slot), data(0, 1, slot), data(0, 2, 4000)], 3),
        (0, vec![data(u64::MAX, 0, slot)], 0),
        (0, vec![data(1, 0, slot)], 0),
        (0, vec![frame(CREDIT, 0, [0, u64::MAX, 0, 0, 0, 0]), frame(CREDIT, 99, [7, 1, 0, 0, 0, 0])], 0),
        (1, vec![frame(GRANT, 0, [9, u64::MAX, 0, 0, 0, 0]), frame(GRANT, 1, [9, 0, 0, 0, 0, u64::MAX])], 0),
        (1, vec![frame(ANNOUNCE, 0, [5, 1, 0, 0, 3, 90]), frame(FRAGMENT, 0, [5, 0, 90, 0, 0, 0])], 0),
        (1, vec![frame(ANNOUNCE, 0, [u64::MAX, 0, 0, 0, 3, u64::MAX])], 0),
        (0, vec![frame(MOVED, 0, [0; 6]), data(0, 0, slot)], 0),
        (0, vec![frame(WAIT_NOTICE, 0, [u64::MAX, 0, 0, 1, 2, 3])], 0),
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
        // A fault that is held back for the grace period would be reported by then.
        faults.extend(feed.poll_at(Instant::now() + 2 * LEAVE_GRACE));
        assert_eq!((feed.read, &faults[..]), (read, &[][..]), "case {case}");
    }
}

#[test]
fn connection_closed_within_a_frame_is_a_loss_exactly_after_the_leave_grace() {
    let (mut feed, now) = (Feed::new(), Instant::now());
    let mut stream = feed.connect(0);
    stream.write_all(&data(0, 0, SLOT_BYTES as u64)[..70]).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    stream.set_nonblocking(true).unwrap();
    // A rank that has detected the close closes its end, too.
    while !matches!(stream.read(&mut [0; 64]), Ok(0)) {
        assert_eq!(feed.poll_at(now), []);
    }
    for held_back in [Duration::ZERO, LEAVE_GRACE - Duration::from_nanos(1)] {
        assert_eq!(feed.poll_at(now + held_back), []);
    }
    let faults = feed.poll_at(now + LEAVE_GRACE);
    assert!(matches!(&faults[..], [Fault::Lost { rank: 0, .. }]), "{faults:?}");
}

/// Returns the next pseudo-random number (splitmix64).
fn next(seed: &mut u64) -> u64 {
    *seed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *seed;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[test]
fn random_frames_on_any_connections_are_faults_at_worst() {
    const INTERESTING: [u64; 12] =
        [0, 1, 2, 3, 5, 8, 64, SLOT_BYTES as u64, BYTES, 128 << 10, 1 << 62, u64::MAX];
    for start in 0..150 {
        let mut seed = start;
        let mut feed = Feed::new();
        let mut streams: Vec<TcpStream> = [0, 1, 0, 1].into_iter().map(|class| feed.connect(class)).collect();
        for _ in 0..24 {
            let mut field = || INTERESTING[next(&mut seed) as usize % INTERESTING.len()];
            let fields = [field() % 4, field(), field(), field(), field(), field()];
            let fields = if next(&mut seed).is_multiple_of(2) {
                [0, fields[1] % 3, fields[2] % 6000, FINGERPRINT.call, FINGERPRINT.count, BYTES]
            } else {
                fields
            };
            let kind = (next(&mut seed) % 10) as u8 + 1;
            let bytes = frame(kind, (next(&mut seed) % 3) as u32, fields);
            // Cut the frame; the next frame continues in its place.
            let cut = bytes.len() - (next(&mut seed) as usize % 3) * (bytes.len() / 5);
            let at = next(&mut seed) as usize % streams.len();
            let _ = streams[at].set_nonblocking(true);
            let _ = streams[at].write(&bytes[..cut]);
            feed.poll();
        }
        feed.settle(&[]);
    }
}
