//! Tests of malformed values in another process's shared memory: they must be reported and must not cause a panic.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use smddp_base::{CallFingerprint, Channels, Envelope, Fault, RecvChannel, SendChannel};
use smddp_process::layout::*;
use smddp_process::{SingleCopy, SymmetricBuffer};

use super::channels::{LocalChannels, ZeroCopySource};
use super::prepare::Prepared;

const CAP: usize = 4 << 20;
const BYTES: usize = 20_000;
const HEAD: CallFingerprint = CallFingerprint { call: 7, count: 1 };
const END: usize = STAGING + CAP + RESERVE_BYTES + SYMMETRIC_BYTES;
/// Malicious offsets, sizes and counts, and some that are only wrong.
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
    let [a, b] = [0, 1].map(|r| Prepared::new(r, 2, CAP).unwrap());
    let addresses = vec![a.address().clone(), b.address().clone()];
    [a, b].map(|p| p.connect(addresses.clone()).unwrap())
}

/// One channel each way, of messages of `slot_bytes` bytes.
fn channel_layout(peer: usize, slot_bytes: usize) -> Channels {
    let messages = BYTES.div_ceil(slot_bytes) as u64;
    let bytes = BYTES as u64;
    Channels {
        send_channels: vec![SendChannel { readers: vec![peer], slot_bytes, messages, bytes }],
        recv_channels: vec![RecvChannel { rank: peer, channel: 0, reader: 0, slot_bytes, messages, bytes }],
        inline: false,
        depth: (2, 1),
        window: 1,
    }
}

/// Returns both ranks after they have begun an operation and rank 1 has published a message of `slot_bytes` bytes.
fn begun(slot_bytes: usize) -> [LocalChannels; 2] {
    let mut links = pair();
    for (rank, link) in links.iter_mut().enumerate() {
        assert!(link.begin(0, HEAD, &Arc::new(channel_layout(1 - rank, slot_bytes)), &[]));
    }
    links[1].send_slot(0).unwrap();
    links[1].publish(0);
    links
}

/// Writes a flag of this process's shared memory, which contains the blocks of both ranks.
fn set(link: &LocalChannels, offset: usize, value: u64) {
    let (endpoint, _) = link.home().unwrap();
    endpoint.memory.flag64(offset).store(value, Ordering::Release);
}

fn get(link: &LocalChannels, offset: usize) -> usize {
    let (endpoint, _) = link.home().unwrap();
    endpoint.memory.flag64(offset).load(Ordering::Acquire) as usize
}

/// Calls every method with which a reader processes messages.
fn read(link: &mut LocalChannels) {
    for _ in 0..4 {
        match link.recv_slot(0) {
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
fn malformed_channel_fields_do_not_panic_the_reader() {
    let mut reported = 0;
    for field in 0..6 {
        for value in EVIL {
            let mut links = begun(BYTES / 2);
            let header = links[1].block() + header_at(2, 0);
            let entry = get(&links[1], header + STAGE);
            // The offset of the channel table, then the fields of its first entry.
            set(&links[1], if field == 0 { header + STAGE } else { entry + 8 * (field - 1) }, value);
            read(&mut links[0]);
            reported += usize::from(names_rank_1(&mut links[0]));
            // Restored, because the release of the block reads it.
            if field == 0 {
                set(&links[1], header + STAGE, entry as u64);
            }
        }
    }
    assert!(reported > 20, "{reported} malformed fields were reported");
}

#[test]
fn malformed_reader_counts_do_not_panic_the_writer() {
    for value in EVIL {
        let mut links = begun(BYTES / 10);
        let entry = get(&links[1], links[1].block() + header_at(2, 0) + STAGE);
        let lines = entry + get(&links[1], entry);
        set(&links[1], lines + LINE, value);
        for _ in 0..8 {
            if links[1].send_slot(0).is_some() {
                links[1].publish(0);
            }
        }
    }
}

#[test]
fn malformed_message_fields_do_not_panic_the_receiver() {
    let mut reported = 0;
    for (field, bytes) in (0..8).flat_map(|field| [8, BYTES].map(|bytes| (field, bytes))) {
        for value in EVIL {
            let mut links = pair();
            let envelope = Envelope { tag: 1, dtype: 0, bytes: bytes as u64 };
            let message = links[1].messages().announce(0, envelope).unwrap();
            links[1].messages().send_slot(message).unwrap();
            links[1].messages().publish(message, bytes);
            let place = links[1].block() + MESSAGE_RINGS;
            let ring = get(&links[1], place);
            // The offset of the ring, the number of messages read from it, and the fields of the announcement.
            let at =
                if field == 0 { place } else { ring + if field == 1 { 0 } else { LINE + 8 * (field - 2) } };
            set(&links[1], at, value);
            if let Some((_, message)) = links[0].messages().next_announced(1) {
                for _ in 0..3 {
                    if links[0].messages().recv_slot(message).is_some() {
                        links[0].messages().release(message);
                    }
                }
            }
            let _ = links[1].messages().announce(0, envelope);
            reported += usize::from(names_rank_1(&mut links[0]));
            set(&links[1], place, ring as u64);
        }
    }
    assert!(reported > 20, "{reported} malformed fields were reported");
}

#[test]
fn control_block_outside_of_memory_is_rejected() {
    let mut rejected = 0;
    for block in EVIL {
        let [a, b] = [0, 1].map(|r| Prepared::new(r, 2, CAP).unwrap());
        let mut wrong = b.address().clone();
        wrong.block = block;
        let addresses = vec![a.address().clone(), wrong];
        match a.connect(addresses) {
            // Within the memory, but not a control block of a rank.
            Ok(mut link) => {
                assert!(block < 1 << 40, "{block:#x} is outside of any memory");
                drop(link.faults());
            }
            Err(error) => {
                let text = error.to_string();
                assert!(text.contains("rank 1") && text.contains("control block"), "{text}");
                rejected += 1;
            }
        }
    }
    // More of the offsets are valid if another test of this process created the memory with a larger cap.
    assert!(rejected >= 6, "{rejected} offsets were rejected");
}

#[test]
fn smaller_slots_at_the_writer_are_a_mismatch() {
    let mut links = pair();
    assert!(links[0].begin(0, HEAD, &Arc::new(channel_layout(1, BYTES)), &[]));
    // The same number of bytes in two messages.
    assert!(links[1].begin(0, HEAD, &Arc::new(channel_layout(0, BYTES / 2)), &[]));
    links[1].send_slot(0).unwrap();
    links[1].publish(0);
    let found = links[0].recv_slot(0).unwrap_err();
    assert_eq!((found.rank, found.theirs, found.bytes), (1, HEAD, None));
}

/// Returns two ranks, of which rank 1 sends from `memory`, which is not shared memory.
fn single_copy_pair(memory: &[u8]) -> [LocalChannels; 2] {
    let mut links = pair();
    let source =
        ZeroCopySource { channel: 0, at: memory.as_ptr(), stride: BYTES, single_copy: SingleCopy::Always };
    assert!(links[0].begin(0, HEAD, &Arc::new(channel_layout(1, BYTES)), &[]));
    assert!(links[1].begin(0, HEAD, &Arc::new(channel_layout(0, BYTES)), &[source]));
    assert_eq!(links[1].send_slot(0).map(<*mut u8>::cast_const), Some(memory.as_ptr()));
    links[1].publish(0);
    links[0].send_slot(0).unwrap();
    links[0].publish(0);
    links
}

#[test]
fn single_copy_reads_each_message_once_into_its_target() {
    for placed in [false, true] {
        let (mut from, mut to) = (vec![1; BYTES], vec![0; BYTES]);
        let mut links = single_copy_pair(&from);
        if placed {
            // SAFETY: `to` has `BYTES` bytes, outlives the operation, and is not used before the message is read.
            unsafe { links[0].set_recv_target(0, to.as_mut_ptr(), BYTES, BYTES) };
        }
        let at = links[0].recv_slot(0).unwrap().unwrap();
        assert_eq!(at == to.as_ptr(), placed);
        // SAFETY: the message has `BYTES` bytes, and only this thread accesses it.
        assert!(unsafe { std::slice::from_raw_parts(at, BYTES) } == from);
        from.fill(2);
        assert_eq!(links[0].recv_slot(0).unwrap(), Some(at));
        // SAFETY: as above.
        assert!(unsafe { std::slice::from_raw_parts(at, BYTES) } == vec![1; BYTES], "it is read once");
        assert!(!links[1].settle().unwrap(), "its reader has not confirmed the message");
        links[0].release(0);
        links[1].recv_slot(0).unwrap().unwrap();
        links[1].release(0);
        assert!(links.each_mut().map(|link| link.settle().unwrap()) == [true; 2]);
    }
}

#[test]
fn malformed_single_copy_fields_do_not_panic_the_reader() {
    let from = vec![1; BYTES];
    for field in 0..5 {
        for value in EVIL {
            let mut links = single_copy_pair(&from);
            let entry = get(&links[1], links[1].block() + header_at(2, 0) + STAGE);
            set(&links[1], entry + 8 * field, value);
            read(&mut links[0]);
            let reported = links[0].faults().into_iter().any(|fault| match fault {
                Fault::Unreachable { rank: 1, reason } => reason.contains("SMDDP_SINGLE_COPY=0"),
                Fault::Lost { rank: 1, how } => how.contains("invalid values"),
                _ => false,
            });
            assert!(reported || field != 1, "{value:#x}: an unmapped address is not reported");
        }
    }
}

/// After an abort the writer's caller may overwrite its memory, so the data read may be wrong.
#[test]
fn abort_of_the_writer_during_a_zero_copy_read_fails_the_reader() {
    let buffer = SymmetricBuffer::new(CAP, BYTES).unwrap();
    for aborts in [false, true] {
        let mut links = pair();
        let source = ZeroCopySource {
            channel: 0,
            at: buffer.as_mut_ptr(),
            stride: BYTES,
            single_copy: SingleCopy::Never,
        };
        assert!(links[0].begin(0, HEAD, &Arc::new(channel_layout(1, BYTES)), &[]));
        assert!(links[1].begin(0, HEAD, &Arc::new(channel_layout(0, BYTES)), &[source]));
        assert_eq!(links[1].send_slot(0), Some(buffer.as_mut_ptr()));
        links[1].publish(0);
        links[0].send_slot(0).unwrap();
        links[0].publish(0);
        links[1].recv_slot(0).unwrap().unwrap();
        links[1].release(0);
        assert!(!links[1].settle().unwrap(), "the message is unread");
        assert_eq!(links[0].recv_slot(0).unwrap(), Some(buffer.as_mut_ptr().cast_const()));
        if aborts {
            links[1].abort("its deadline has passed");
        }
        links[0].release(0);
        assert_eq!(links.each_mut().map(|link| link.settle().unwrap()), [!aborts; 2]);
        let faults = links[0].faults();
        let reported = matches!(&faults[..], [Fault::Aborted { rank: 1, reason }] if reason == "its deadline has passed");
        assert_eq!(
            (reported, faults.is_empty()),
            (aborts, !aborts),
            "the reason of the writer, and nothing else"
        );
    }
}
