//! Release of the shared memory of groups after they have ended.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;

use smddp_base::{CallFingerprint, Channels, Envelope, RecvChannel, SendChannel};
use smddp_process::Endpoint;
use smddp_shm::{LocalChannels, Prepared};

const CAP: usize = 4 << 20;

fn pair() -> [LocalChannels; 2] {
    let [a, b] = [0, 1].map(|r| Prepared::new(r, 2, CAP).unwrap());
    let addresses = vec![a.address().clone(), b.address().clone()];
    [a, b].map(|p| p.connect(addresses.clone()).unwrap())
}

/// Exchanges one message in each direction through slots of `bytes` bytes.
fn exchange(links: &mut [LocalChannels; 2], seq: u64, bytes: usize) {
    let channel_layout = |peer: usize| Channels {
        send_channels: vec![SendChannel {
            readers: vec![peer],
            slot_bytes: bytes,
            messages: 1,
            bytes: bytes as u64,
        }],
        recv_channels: vec![RecvChannel {
            rank: peer,
            channel: 0,
            reader: 0,
            slot_bytes: bytes,
            messages: 1,
            bytes: bytes as u64,
        }],
        inline: false,
        depth: (1, 1),
        window: 1,
    };
    let fingerprint = CallFingerprint { call: 7, count: 1 };
    for (rank, link) in links.iter_mut().enumerate() {
        assert!(link.begin(seq, fingerprint, &Arc::new(channel_layout(1 - rank)), &[]));
        let slot = link.send_slot(0).unwrap();
        // SAFETY: the slot belongs to this rank and has `bytes` bytes.
        unsafe { slot.write_bytes(rank as u8 + 1, bytes) };
        link.publish(0);
    }
    for (rank, link) in links.iter_mut().enumerate() {
        let message = link.recv_slot(0).unwrap().unwrap();
        // SAFETY: the message has `bytes` bytes and is valid until it is released.
        let ends = unsafe { (message.read(), message.add(bytes - 1).read()) };
        assert_eq!(ends, ((2 - rank) as u8, (2 - rank) as u8));
        link.release(0);
        assert!(link.settle().unwrap());
    }
    links.iter_mut().for_each(LocalChannels::end);
}

fn resident() -> usize {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    text.split(' ').nth(1).unwrap().parse().unwrap()
}

#[test]
fn ended_groups_release_control_blocks_rings_and_regions() {
    let endpoint = Endpoint::get(CAP).unwrap();
    let mut early = None;
    for round in 0..4000 {
        let mut links = pair();
        for seq in 0..3 {
            let large = if round % 40 == 0 { 2 << 20 } else { 9_000 };
            exchange(&mut links, seq, [100, 70_000, large][(round + seq as usize) % 3]);
        }
        // One message that is not received, and one that is only announced.
        let message = links[0].messages().announce(1, Envelope { tag: 1, dtype: 0, bytes: 5000 }).unwrap();
        links[0].messages().send_slot(message).unwrap();
        links[0].messages().publish(message, 5000);
        links[0].messages().close(message);
        links[1].messages().announce(0, Envelope { tag: 2, dtype: 0, bytes: 1 << 20 }).unwrap();
        drop(links);
        if round == 1000 {
            early = Some((endpoint.staging(), resident()));
        }
    }
    // 4,000 pairs of control blocks and rings fit their 256 MiB only if they are reused.
    let (staging, pages) = early.unwrap();
    assert_eq!(endpoint.staging(), staging);
    assert_eq!(endpoint.staging().2, 0, "the reserve is in use");
    assert!(resident() < pages + 256, "{pages} pages early, {} late", resident());
}
