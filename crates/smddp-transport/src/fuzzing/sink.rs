//! Frames in any order, from several peers, for a rank that is in the middle of something.

use super::line::{Item, Order, Shared};
use super::rank::{Rank, SIZE, peer};
use super::script::Script;
use crate::net::frame::{CLASSES, Frame, Kind};

/// Frames of all kinds.
pub fn sink(bytes: &[u8]) {
    run(bytes, |script, seq| script.frame(seq));
}

/// Mostly messages of P2P, on few streams.
pub fn messages(bytes: &[u8]) {
    run(bytes, |script, seq| {
        let stream = script.below(4) as u64;
        let kind =
            [Kind::Announce, Kind::Announce, Kind::Grant, Kind::Fragment, Kind::Fragment][script.below(5)];
        let short = script.yes();
        let (bytes, index) = (script.number(), script.number() & 7);
        match kind {
            _ if script.below(16) == 0 => script.frame(seq),
            Kind::Announce => {
                Frame { index: u64::from(short), what: 2, count: 1, total: bytes, ..Frame::new(kind, stream) }
            }
            Kind::Grant => {
                Frame { channel: u32::from(short), index, total: bytes, ..Frame::new(kind, stream) }
            }
            _ => Frame { index, bytes, ..Frame::new(kind, stream) },
        }
    });
}

fn run(bytes: &[u8], frame: impl Fn(&mut Script<'_>, u64) -> Frame) {
    let mut script = Script::new(bytes);
    let line = Shared::new(SIZE);
    let copies = script.yes();
    line.with(|line| line.copies = copies);
    let mut rank = Rank::new(Box::new(line.clone()));
    while let Some(what) = script.step() {
        match what % 8 {
            0..3 => {
                let peer = peer(&mut script);
                let frame = frame(&mut script, rank.seq());
                // Whether a wire holds frames to their classes is its own affair.
                let class =
                    if script.below(4) == 0 { script.below(CLASSES) } else { frame.class() % CLASSES };
                line.with(|line| line.inbound[peer][class].push_back(Item { frame, target: None }));
                line.with(|line| line.orders.push(Order::Place(peer, class)));
            }
            3 | 4 => {
                let (peer, class) = (peer(&mut script), script.below(CLASSES));
                line.with(|line| line.orders.push(Order::Place(peer, class)));
                line.with(|line| line.orders.push(Order::Arrive(peer, class)));
            }
            5 => {
                let which = script.below(8);
                line.with(|line| line.orders.push(Order::Sent(which)));
            }
            _ => rank.act(&mut script),
        }
        // Places are held against the rank's memory before anything is written there.
        let orders = line.with(|line| std::mem::take(&mut line.orders));
        for order in orders {
            line.with(|line| line.orders.push(order));
            rank.net.poll();
            for (at, bytes) in line.with(|line| line.under_way()) {
                rank.check_owned(at, bytes, "a payload on its way");
            }
        }
    }
    // Everything that was sent gets out; otherwise the memory would be left to it.
    line.with(|line| line.outbound.clear());
}
