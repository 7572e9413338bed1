//! Fuzzing of the frame sink: frames in any order from several peers, during operations of a rank.

use smddp_net::frame::{CLASSES, Frame, Kind};
use smddp_net::fuzzing::Script;

use super::line::{Item, Order, Shared};
use super::rank::{Rank, SIZE, peer};

/// Sends frames of all kinds.
pub fn sink(bytes: &[u8]) {
    run(bytes, |script, seq| script.frame(seq));
}

/// Sends mostly point-to-point frames on few streams.
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
    let line = Shared::new(SIZE, script.yes());
    let mut rank = Rank::new(Box::new(line.clone()));
    while let Some(action) = script.step() {
        match action % 8 {
            0..3 => {
                let peer = peer(&mut script);
                let frame = frame(&mut script, rank.seq());
                // The sink does not depend on the wire to check the class of a frame.
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
        // Executes one order at a time, so that targets are checked before they are written.
        let orders = line.with(|line| std::mem::take(&mut line.orders));
        for order in orders {
            line.with(|line| line.orders.push(order));
            rank.net.poll();
            for (at, bytes) in line.with(|line| line.in_transfer()) {
                rank.check_owned(at, bytes, "a payload in transfer");
            }
        }
    }
    // Completes all sends; otherwise their memory would be abandoned.
    line.with(|line| line.outbound.clear());
}
