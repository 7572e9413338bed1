//! What a link finds out about a bound call stays with it.

use super::join::Means;
use super::offer::Between;
use super::route::MADE;
use super::simulated;
use crate::net::fabric::srd::SrdScript;
use crate::net::interface::{Family, Wanted};
use crate::{Head, Inlet, Link, Outlet, Ways, Wiring};

fn links() -> Vec<Box<dyn Link>> {
    let means = Means {
        staging: 4 << 20,
        shm: true,
        node: None,
        interface: Wanted { value: None, from: "" },
        family: Family::Any,
        between: Between::Fabric,
        library: None,
        provider: None,
        local: None,
        require: None,
    };
    let (_, joined) = simulated(2, &means, |rank| format!("node {rank}"), SrdScript::default()).unwrap();
    joined.into_iter().map(|joined| joined.link).collect()
}

/// One message each way, of so many bytes.
fn call(rank: usize, bytes: usize) -> Wiring {
    let peer = 1 - rank;
    let (cell, messages, total) = (bytes, 1, bytes as u64);
    Wiring {
        outlets: vec![Outlet { readers: vec![peer], cell, messages, bytes: total }],
        inlets: vec![Inlet { rank: peer, channel: 0, reader: 0, cell, messages, bytes: total }],
        inline: false,
        depth: (1, 1),
        window: 1,
        ways: Ways::default(),
    }
}

fn operate(links: &mut [Box<dyn Link>], seq: u64, wirings: &[Wiring; 2], bytes: usize) {
    let head = Head { what: 7, count: bytes as u64 };
    for (rank, link) in links.iter_mut().enumerate() {
        while !link.begin(seq, head, &wirings[rank]) {
            link.turn();
        }
        let cell = link.cell(0).unwrap();
        // SAFETY: the cell is this link's and has `bytes` bytes.
        unsafe { cell.write_bytes(seq as u8 + rank as u8, bytes) };
        link.publish(0, bytes);
    }
    let mut left = vec![0, 1];
    let mut read = [false; 2];
    while !left.is_empty() {
        for link in links.iter_mut() {
            link.turn();
        }
        left.retain(|&rank| {
            let link = &mut links[rank];
            if !read[rank]
                && let Some(message) = link.message(0).unwrap()
            {
                // SAFETY: the message holds `bytes` bytes until it is released.
                let last = unsafe { message.add(bytes - 1).read() };
                assert_eq!(last, seq as u8 + 1 - rank as u8);
                link.release(0);
                read[rank] = true;
            }
            let over = read[rank] && link.settle().unwrap();
            if over {
                link.end();
            }
            !over
        });
    }
}

#[test]
fn calls_in_turns_find_their_ways_once_each() {
    let mut links = links();
    let sizes = [100, 50_000];
    let calls = sizes.map(|bytes| [call(0, bytes), call(1, bytes)]);
    let before = MADE.get();
    for seq in 0..20 {
        let which = seq as usize % 2;
        operate(&mut links, seq, &calls[which], sizes[which]);
    }
    assert_eq!(MADE.get() - before, 4, "two calls of two ranks, made ten times each");
}
