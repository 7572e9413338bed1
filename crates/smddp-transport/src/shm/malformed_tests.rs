//! What another process writes into shared memory is its own affair until it is believed.

use std::sync::Arc;

use std::sync::atomic::Ordering;

use super::channels::{LocalChannels, ZeroCopySource};
use super::prepare::Prepared;
use crate::process::layout::*;
use crate::process::{SingleCopy, SymmetricBuffer};
use crate::{CallFingerprint, Channels, Envelope, Fault, RecvChannel, SendChannel};

const CAP: usize = 4 << 20;
const BYTES: usize = 20_000;
const HEAD: CallFingerprint = CallFingerprint { what: 7, count: 1 };
const END: usize = STAGING + CAP + RESERVE_BYTES + SYMMETRIC_BYTES;
/// Offsets, sizes and counts that nobody means well with, and some that are merely wrong.
const EVIL: [u64; 12] = [
    0,
    1,
    3,
    64,
    4097,
    (STAGING + CAP) as u64,
    END as u64 - 8,
    END as u64 + 64,
    1 << 40,
    1 << 63,
    u64::MAX - 63,
    u64::MAX,
];

fn pair() -> [LocalChannels; 2] {
    let [a, b] = [0, 1].map(|r| Prepared::new(r, 2, CAP, Vec::new()).unwrap());
    let rank_infos = vec![a.rank_info().clone(), b.rank_info().clone()];
    [a, b].map(|p| p.connect(rank_infos.clone()).unwrap())
}

/// One channel each way, of messages of `cell` bytes.
fn channel_layout(peer: usize, cell: usize) -> Channels {
    let messages = BYTES.div_ceil(cell) as u64;
    let bytes = BYTES as u64;
    Channels {
        send_channels: vec![SendChannel { readers: vec![peer], cell, messages, bytes }],
        recv_channels: vec![RecvChannel { rank: peer, channel: 0, reader: 0, cell, messages, bytes }],
        inline: false,
        depth: (2, 1),
        window: 1,
    }
}

/// Both ranks have begun, and rank 1 has published a message of `cell` bytes.
fn begun(cell: usize) -> [LocalChannels; 2] {
    let mut links = pair();
    for (rank, link) in links.iter_mut().enumerate() {
        assert!(link.begin(0, HEAD, &Arc::new(channel_layout(1 - rank, cell)), &[]));
    }
    links[1].cell(0).unwrap();
    links[1].publish(0);
    links
}

/// Where rank 1's block lies; both ranks are of this process.
fn set(link: &LocalChannels, offset: usize, value: u64) {
    let (endpoint, _) = link.home().unwrap();
    endpoint.memory.flag64(offset).store(value, Ordering::Release);
}

fn get(link: &LocalChannels, offset: usize) -> usize {
    let (endpoint, _) = link.home().unwrap();
    endpoint.memory.flag64(offset).load(Ordering::Acquire) as usize
}

/// All that a reader does with what it finds.
fn read(link: &mut LocalChannels) {
    for _ in 0..4 {
        match link.message(0) {
            Ok(Some(_)) => link.release(0),
            Ok(None) => {}
            Err(_) => break,
        }
    }
    let _ = link.settle();
    link.flush();
}

fn names_rank_1(link: &mut LocalChannels) -> bool {
    link.faults().iter().any(|f| matches!(f, Fault::Lost { rank: 1, how } if how.contains("invalid values")))
}

#[test]
fn no_word_of_a_channel_makes_its_reader_panic() {
    let mut told = 0;
    for field in 0..6 {
        for value in EVIL {
            let mut links = begun(BYTES / 2);
            let slot = links[1].block() + slot_at(2, 0);
            let entry = get(&links[1], slot + STAGE);
            // The place of the channels, then the fields of the first.
            set(&links[1], if field == 0 { slot + STAGE } else { entry + 8 * (field - 1) }, value);
            read(&mut links[0]);
            told += usize::from(names_rank_1(&mut links[0]));
            // What is not undone would be found when the block is given back.
            if field == 0 {
                set(&links[1], slot + STAGE, entry as u64);
            }
        }
    }
    assert!(told > 20, "{told} of them were told");
}

#[test]
fn no_count_of_a_reader_makes_its_writer_panic() {
    for value in EVIL {
        let mut links = begun(BYTES / 10);
        let entry = get(&links[1], links[1].block() + slot_at(2, 0) + STAGE);
        let lines = entry + get(&links[1], entry);
        set(&links[1], lines + LINE, value);
        for _ in 0..8 {
            if links[1].cell(0).is_some() {
                links[1].publish(0);
            }
        }
    }
}

#[test]
fn no_word_of_a_message_makes_its_receiver_panic() {
    let mut told = 0;
    for (field, bytes) in (0..8).flat_map(|field| [8, BYTES].map(|bytes| (field, bytes))) {
        for value in EVIL {
            let mut links = pair();
            let envelope = Envelope { tag: 1, what: 0, bytes: bytes as u64 };
            let stream = links[1].p2p().open(0, envelope).unwrap();
            links[1].p2p().cell(stream).unwrap();
            links[1].p2p().publish(stream, bytes);
            let place = links[1].block() + MESSAGE_RINGS;
            let ring = get(&links[1], place);
            // The ring's place, how much of it is read, and the words of the announcement.
            let at =
                if field == 0 { place } else { ring + if field == 1 { 0 } else { LINE + 8 * (field - 2) } };
            set(&links[1], at, value);
            if let Some((_, stream)) = links[0].p2p().next(1) {
                for _ in 0..3 {
                    if links[0].p2p().piece(1, stream).is_some() {
                        links[0].p2p().release(1, stream);
                    }
                }
            }
            let _ = links[1].p2p().open(0, envelope);
            told += usize::from(names_rank_1(&mut links[0]));
            set(&links[1], place, ring as u64);
        }
    }
    assert!(told > 20, "{told} of them were told");
}

#[test]
fn a_card_that_names_a_block_outside_of_its_memory_is_refused() {
    let mut refused = 0;
    for block in EVIL {
        let [a, b] = [0, 1].map(|r| Prepared::new(r, 2, CAP, Vec::new()).unwrap());
        let mut wrong = b.rank_info().clone();
        wrong.block = block;
        let rank_infos = vec![a.rank_info().clone(), wrong];
        match a.connect(rank_infos) {
            // In the memory, though nobody's block.
            Ok(mut link) => {
                assert!(block < 1 << 40, "{block:#x} is outside of any");
                drop(link.faults());
            }
            Err(error) => {
                let text = error.to_string();
                assert!(text.contains("rank 1") && text.contains("control block"), "{text}");
                refused += 1;
            }
        }
    }
    // More may lie in it where another test of this process made it, with a higher cap.
    assert!(refused >= 6, "{refused} of them were refused");
}

#[test]
fn a_writer_with_smaller_cells_is_a_mismatch() {
    let mut links = pair();
    assert!(links[0].begin(0, HEAD, &Arc::new(channel_layout(1, BYTES)), &[]));
    // As many bytes in two messages.
    assert!(links[1].begin(0, HEAD, &Arc::new(channel_layout(0, BYTES / 2)), &[]));
    links[1].cell(0).unwrap();
    links[1].publish(0);
    let found = links[0].message(0).unwrap_err();
    assert_eq!((found.rank, found.theirs, found.bytes), (1, HEAD, None));
}

/// Rank 1 sends from `memory`, which it does not share.
fn lent(memory: &[u8]) -> [LocalChannels; 2] {
    let mut links = pair();
    let stay =
        ZeroCopySource { channel: 0, at: memory.as_ptr(), stride: BYTES, single_copy: SingleCopy::Always };
    assert!(links[0].begin(0, HEAD, &Arc::new(channel_layout(1, BYTES)), &[]));
    assert!(links[1].begin(0, HEAD, &Arc::new(channel_layout(0, BYTES)), &[stay]));
    assert_eq!(links[1].cell(0).map(<*mut u8>::cast_const), Some(memory.as_ptr()));
    links[1].publish(0);
    links[0].cell(0).unwrap();
    links[0].publish(0);
    links
}

#[test]
fn memory_that_is_not_shared_is_read_into_its_place_and_once() {
    for placed in [false, true] {
        let (mut from, mut to) = (vec![1; BYTES], vec![0; BYTES]);
        let mut links = lent(&from);
        if placed {
            links[0].land(0, to.as_mut_ptr(), BYTES, BYTES);
        }
        let at = links[0].message(0).unwrap().unwrap();
        assert_eq!(at == to.as_ptr(), placed);
        // SAFETY: the message is so long, and this thread's.
        assert!(unsafe { std::slice::from_raw_parts(at, BYTES) } == from);
        from.fill(2);
        assert_eq!(links[0].message(0).unwrap(), Some(at));
        // SAFETY: as above.
        assert!(unsafe { std::slice::from_raw_parts(at, BYTES) } == vec![1; BYTES], "it is read once");
        assert!(!links[1].settle().unwrap(), "not before its reader says so");
        links[0].release(0);
        links[1].message(0).unwrap().unwrap();
        links[1].release(0);
        assert!(links.each_mut().map(|link| link.settle().unwrap()) == [true; 2]);
    }
}

#[test]
fn no_word_of_a_channel_whose_memory_is_not_shared_makes_its_reader_panic() {
    let from = vec![1; BYTES];
    for field in 0..5 {
        for value in EVIL {
            let mut links = lent(&from);
            let entry = get(&links[1], links[1].block() + slot_at(2, 0) + STAGE);
            set(&links[1], entry + 8 * field, value);
            read(&mut links[0]);
            let told = links[0].faults().into_iter().any(|fault| match fault {
                Fault::Unable { rank: 1, reason } => reason.contains("SMDDP_SINGLE_COPY=0"),
                Fault::Lost { rank: 1, how } => how.contains("invalid values"),
                _ => false,
            });
            assert!(told || field != 1, "{value:#x}: nothing is there");
        }
    }
}

/// What was read may have been overwritten by then: the caller has its memory back.
#[test]
fn a_writer_that_gave_up_while_its_memory_was_read_is_an_error_of_the_reader() {
    let buffer = SymmetricBuffer::new(CAP, BYTES).unwrap();
    for gives_up in [false, true] {
        let mut links = pair();
        let stay = ZeroCopySource {
            channel: 0,
            at: buffer.as_mut_ptr(),
            stride: BYTES,
            single_copy: SingleCopy::Never,
        };
        assert!(links[0].begin(0, HEAD, &Arc::new(channel_layout(1, BYTES)), &[]));
        assert!(links[1].begin(0, HEAD, &Arc::new(channel_layout(0, BYTES)), &[stay]));
        assert_eq!(links[1].cell(0), Some(buffer.as_mut_ptr()));
        links[1].publish(0);
        links[0].cell(0).unwrap();
        links[0].publish(0);
        links[1].message(0).unwrap().unwrap();
        links[1].release(0);
        assert!(!links[1].settle().unwrap(), "nobody has read it");
        assert_eq!(links[0].message(0).unwrap(), Some(buffer.as_mut_ptr().cast_const()));
        if gives_up {
            links[1].abort("its deadline has passed");
        }
        links[0].release(0);
        assert_eq!(links.each_mut().map(|link| link.settle().unwrap()), [!gives_up; 2]);
        let faults = links[0].faults();
        let told = matches!(&faults[..], [Fault::Poisoned { rank: 1, reason }] if reason == "its deadline has passed");
        assert_eq!((told, faults.is_empty()), (gives_up, !gives_up), "its own reason, and nothing else");
    }
}
