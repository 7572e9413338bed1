//! Tests of a waiting rank, with a clock that the test controls.

use std::sync::Arc;
use std::time::{Duration, Instant};

use smddp_base::{CallFingerprint, Envelope, Fault, RecvChannel};
use smddp_net::frame::{Frame, Kind, MESSAGES};
use smddp_net::wire::{Sink, Target};
use smddp_process::fuzzing::endpoint;
use smddp_process::layout::MAX_ERROR_BYTES;

use super::health::WAIT_NOTICE_DELAY;
use super::{RemoteChannels, RemoteParts};
use crate::fuzzing::line;
use crate::layout::RemoteLayout;

/// Rank 0 of two, over a wire without incoming frames.
fn rank() -> (RemoteChannels, line::Shared) {
    rank_over(line::Shared::new(2, false))
}

fn rank_over(line: line::Shared) -> (RemoteChannels, line::Shared) {
    let parts =
        RemoteParts { wire: Box::new(line.clone()), sideband: None, liveness: None, checksums: false };
    (RemoteChannels::new(0, 2, parts, endpoint(), 99), line)
}

fn begin(net: &mut RemoteChannels, seq: u64) {
    let recv_channel = RecvChannel { rank: 1, channel: 0, reader: 0, slot_bytes: 64, messages: 1, bytes: 8 };
    net.set_layout(&Arc::new(RemoteLayout::new(0, Vec::new(), &[recv_channel], 1, 1)));
    assert!(net.reserve());
    net.begin(seq, CallFingerprint { call: 7, count: 1 });
}

#[test]
fn wait_notice_is_sent_once_per_operation_after_the_delay() {
    let (mut net, line) = rank();
    let sent = || line.with(|line| line.outbound.len());
    let mut now = Instant::now();
    for seq in 0..2 {
        begin(&mut net, seq);
        let before = sent();
        for waited in [Duration::ZERO, WAIT_NOTICE_DELAY - Duration::from_nanos(1)] {
            assert_eq!(net.faults(now + waited), []);
            assert_eq!(sent(), before, "{waited:?}");
        }
        for waited in [WAIT_NOTICE_DELAY, 2 * WAIT_NOTICE_DELAY, 90 * WAIT_NOTICE_DELAY] {
            assert_eq!(net.faults(now + waited), []);
            assert_eq!(sent(), before + 1, "{waited:?}");
        }
        net.end();
        now += 100 * WAIT_NOTICE_DELAY;
    }
}

/// Delivers `Leave` of rank 1 on a class, with an error of `bytes` bytes; returns the target of the payload.
fn receive_leave(net: &mut RemoteChannels, class: usize, bytes: usize) -> Target {
    let (channel, index, bytes) = (class as u32, 3, bytes as u64);
    let frame = Frame { channel, index, bytes, total: 5_000_000_000, ..Frame::new(Kind::Leave, 0) };
    let target = net.state.target(1, &frame);
    if let Target::At(at) = target {
        // SAFETY: the target has room for the payload.
        unsafe { at.write_bytes(b'x', bytes as usize) };
    }
    net.state.received(1, &frame);
    target
}

#[test]
fn last_error_of_a_leaving_rank_is_accepted_once_and_within_the_size_limit() {
    let (mut net, _line) = rank();
    assert!(matches!(receive_leave(&mut net, MESSAGES, MAX_ERROR_BYTES), Target::At(_)));
    // Rejected a second time, and on the other class.
    assert_eq!(receive_leave(&mut net, MESSAGES, 1), Target::Discard);
    assert_eq!(receive_leave(&mut net, 0, 1), Target::Discard);
    assert_eq!(net.faults(Instant::now()), [Fault::Left { rank: 1 }]);
    let (ago, text) = net.last_error(1).unwrap();
    assert_eq!(text, "x".repeat(MAX_ERROR_BYTES));
    assert!(ago >= Duration::from_secs(5) && ago < Duration::from_secs(60), "{ago:?}");

    let (mut net, _line) = rank();
    assert_eq!(receive_leave(&mut net, MESSAGES, MAX_ERROR_BYTES + 1), Target::Discard);
    assert_eq!(net.last_error(1), None);
    assert!(matches!(&net.faults(Instant::now())[..], [Fault::Lost { rank: 1, .. }]));
}

/// An established connection delivers the reason at once; a new one may be established only after this rank's exit.
#[test]
fn abort_reason_is_sent_on_every_class_with_a_connection() {
    for (connected, frames) in [(false, 1), (true, 2)] {
        let (mut net, line) = rank();
        if connected {
            let wait_notice = Frame::new(Kind::WaitNotice, 0);
            assert_eq!(net.state.target(1, &wait_notice), Target::Discard);
            net.state.received(1, &wait_notice);
        }
        net.abort("calls differ", &[1]);
        assert_eq!(line.with(|line| line.outbound.len()), frames, "connected: {connected}");
    }
}

/// A connection that is established late sends the reason in the next poll.
#[test]
fn aborted_group_waits_for_a_connection_and_then_for_its_data() {
    let (mut net, line) = rank();
    let begun = Instant::now();
    let after = |millis| begun + Duration::from_millis(millis);
    line.with(|line| line.connecting = true);
    net.abort("calls differ", &[1]);
    assert!(!net.leave(begun));
    assert!(!net.leave(after(400)), "the connection is not established");
    line.with(|line| line.connecting = false);
    assert!(!net.leave(after(401)), "the reason is not sent");
    assert!(net.leave(after(500)), "the peer does not read");
}

#[test]
fn leave_is_over_once_everything_is_sent_or_after_its_time_limit() {
    let (mut net, line) = rank();
    let begun = Instant::now();
    receive(&mut net, Frame::new(Kind::WaitNotice, 0));
    assert!(!net.leave(begun));
    line.with(|line| line.outbound.clear());
    assert!(net.leave(begun));

    for aborted in [false, true] {
        let (mut net, line) = rank();
        line.with(|line| line.connecting = true);
        receive(&mut net, Frame::new(Kind::WaitNotice, 0));
        if aborted {
            net.abort("calls differ", &[1]);
        }
        for (waited, over) in [(0, false), (1999, false), (2000, true)] {
            assert_eq!(net.leave(begun + Duration::from_millis(waited)), over, "{waited} ms, {aborted}");
        }
    }
}

/// Delivers a frame of rank 1; returns the target of its payload.
fn receive(net: &mut RemoteChannels, frame: Frame) -> Target {
    let target = net.state.target(1, &frame);
    if target != Target::Later {
        net.state.received(1, &frame);
    }
    target
}

const FRAGMENT: usize = 128 << 10;

#[test]
fn message_is_zero_copy_on_both_sides_until_user_buffers_are_released() {
    let (mut net, line) = rank_over(line::Shared::new(2, true));
    let in_flight =
        || line.with(|line| line.outbound.iter().map(|&(_, at, bytes)| (at, bytes)).collect::<Vec<_>>());
    let (bytes, fragment) = (FRAGMENT + 5, |index, bytes: usize| Frame {
        index,
        bytes: bytes as u64,
        ..Frame::new(Kind::Fragment, 0)
    });
    let mut memory = vec![0u8; bytes];
    let at = memory.as_mut_ptr();
    for release_user_buffers in [false, true] {
        // A message arrives.
        let total = bytes as u64;
        assert_eq!(receive(&mut net, Frame { total, ..Frame::new(Kind::Announce, 0) }), Target::Discard);
        let (_, stream) = net.messages().next_announced(1).unwrap();
        // SAFETY: `memory` outlives the group's use of it.
        assert!(unsafe { net.messages().receive_into(stream, at) });
        assert_eq!(receive(&mut net, fragment(0, FRAGMENT)), Target::At(at));
        assert!(!net.messages().is_received(stream));
        // Another message is sent, up to the fragments that its receiver has granted.
        let envelope = Envelope { tag: 0, dtype: 0, bytes: total };
        let sent = net.messages().announce(1, envelope).unwrap();
        // SAFETY: as above.
        assert!(unsafe { net.messages().send_in_place(sent, at) });
        assert!(!net.messages().is_sent(sent));
        receive(&mut net, Frame { index: 1, ..Frame::new(Kind::Grant, sent.number) });
        assert!(!net.messages().is_sent(sent));
        assert_eq!(in_flight().last(), Some(&(at.cast_const(), FRAGMENT)));
        if release_user_buffers {
            net.release_user_buffers();
            receive(&mut net, Frame { index: 2, ..Frame::new(Kind::Grant, sent.number) });
            net.messages().is_sent(sent);
            assert_eq!(
                in_flight().last().map(|&(_, bytes)| bytes),
                Some(0),
                "no fragment follows the released buffer"
            );
            assert_eq!(receive(&mut net, fragment(1, 5)), Target::Discard);
            break;
        }
        receive(&mut net, Frame { index: 2, ..Frame::new(Kind::Grant, sent.number) });
        assert!(!net.messages().is_sent(sent));
        assert_eq!(in_flight().last(), Some(&(at.wrapping_add(FRAGMENT).cast_const(), 5)));
        line.with(|line| std::mem::take(&mut line.outbound))
            .iter()
            .filter_map(|&(ticket, ..)| ticket)
            .for_each(|ticket| net.state.sent(ticket));
        assert!(net.messages().is_sent(sent), "all fragments are sent");
        net.messages().close(sent);
        assert_eq!(receive(&mut net, fragment(1, 5)), Target::At(at.wrapping_add(FRAGMENT)));
        assert!(net.messages().is_received(stream));
    }
    assert_eq!(net.faults(Instant::now()), []);
}

/// A receiver that waits for a short message may still provide a target for it; other messages are not delayed.
#[test]
fn short_message_with_a_waiting_receiver_is_deferred_once() {
    for waits in [false, true] {
        let (mut net, _line) = rank_over(line::Shared::new(2, true));
        let mut memory = vec![0u8; 50_000];
        if waits {
            assert!(net.messages().next_announced(1).is_none());
        }
        let total = memory.len() as u64;
        receive(&mut net, Frame { index: Frame::FOLLOWS, total, ..Frame::new(Kind::Announce, 4) });
        let fragment = Frame { bytes: total, ..Frame::new(Kind::Fragment, 4) };
        if waits {
            assert_eq!(receive(&mut net, fragment), Target::Later);
            let (_, stream) = net.messages().next_announced(1).unwrap();
            // SAFETY: `memory` outlives the message.
            assert!(unsafe { net.messages().receive_into(stream, memory.as_mut_ptr()) });
            assert_eq!(receive(&mut net, fragment), Target::At(memory.as_mut_ptr()));
            assert!(net.messages().is_received(stream));
        } else {
            assert!(matches!(receive(&mut net, fragment), Target::At(at) if at != memory.as_mut_ptr()));
            let (_, stream) = net.messages().next_announced(1).unwrap();
            // SAFETY: as above.
            let is_in_place = unsafe { net.messages().receive_into(stream, memory.as_mut_ptr()) };
            assert!(!is_in_place, "it already has a region");
            assert_eq!(net.messages().recv_slot(stream).map(|(_, bytes)| bytes), Some(50_000));
        }
    }
}

#[test]
fn fingerprint_of_an_older_operation_is_not_that_of_the_newest_one() {
    let (mut net, _line) = rank_over(line::Shared::new(2, true));
    // A reply to a query.
    (net.state.peers[1].begun, net.state.peers[1].newest) = (7, None);
    for (seq, what, newest) in [(5, 3, None), (6, 4, Some(CallFingerprint { call: 4, count: 0 }))] {
        net.state.data_target(1, &Frame { what, ..Frame::new(Kind::Data, seq) });
        assert_eq!(net.fingerprint_of(1, 6), newest, "after data of operation {seq}");
    }
}
