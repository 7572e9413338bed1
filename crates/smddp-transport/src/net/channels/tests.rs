//! What a rank does that waits, by a time of the test's own.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{HAIL, Net, Uplink};
use crate::fuzzing::{endpoint, line};
use crate::net::wiring::NetWiring;
use crate::{Head, Inlet};

/// Rank 0 of two, over a wire on which nothing comes by itself.
fn rank() -> (Net, line::Shared) {
    let line = line::Shared::new(2);
    let uplink = Uplink { wire: Box::new(line.clone()), listeners: None, watches: None };
    (Net::new(0, 2, uplink, endpoint(), 99), line)
}

fn begin(net: &mut Net, seq: u64) {
    let inlet = Inlet { rank: 1, channel: 0, reader: 0, cell: 64, messages: 1, bytes: 8 };
    net.wire_up(&Arc::new(NetWiring::new(0, Vec::new(), &[inlet], 1, 1)));
    assert!(net.reserve());
    net.begin(seq, Head { what: 7, count: 1 });
}

#[test]
fn who_keeps_a_rank_waiting_is_told_what_for_once_the_time_is_up_and_once_for_each_operation() {
    let (mut net, line) = rank();
    let sent = || line.with(|line| line.going.len());
    let mut now = Instant::now();
    for seq in 0..2 {
        begin(&mut net, seq);
        let before = sent();
        for waited in [Duration::ZERO, HAIL - Duration::from_nanos(1)] {
            assert_eq!(net.faults(now + waited), []);
            assert_eq!(sent(), before, "{waited:?}");
        }
        for waited in [HAIL, 2 * HAIL, 90 * HAIL] {
            assert_eq!(net.faults(now + waited), []);
            assert_eq!(sent(), before + 1, "{waited:?}");
        }
        net.end();
        now += 100 * HAIL;
    }
}
