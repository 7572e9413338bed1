//! What a rank does that waits, by a time of the test's own.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{HAIL, RemoteChannels, RemoteParts};
use crate::fuzzing::{endpoint, line};
use crate::net::frame::{Frame, Kind, MESSAGES};
use crate::net::layout::RemoteLayout;
use crate::net::messages::RemoteMessages;
use crate::net::wire::{Sink, Target};
use crate::process::layout::MAX_ERROR_BYTES;
use crate::{CallFingerprint, Envelope, Fault, RecvChannel};

/// Rank 0 of two, over a wire on which nothing comes by itself.
fn rank() -> (RemoteChannels, line::Shared) {
    let line = line::Shared::new(2);
    let uplink = RemoteParts { wire: Box::new(line.clone()), listeners: None, watches: None };
    (RemoteChannels::new(0, 2, uplink, endpoint(), 99), line)
}

fn begin(net: &mut RemoteChannels, seq: u64) {
    let recv_channel = RecvChannel { rank: 1, channel: 0, reader: 0, cell: 64, messages: 1, bytes: 8 };
    net.wire_up(&Arc::new(RemoteLayout::new(0, Vec::new(), &[recv_channel], 1, 1)));
    assert!(net.reserve());
    net.begin(seq, CallFingerprint { what: 7, count: 1 });
}

#[test]
fn who_keeps_a_rank_waiting_is_told_what_for_once_the_time_is_up_and_once_for_each_operation() {
    let (mut net, line) = rank();
    let sent = || line.with(|line| line.outbound.len());
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

/// Rank 1's goodbye on a class, with an error of so many bytes; where those are to go.
fn goodbye(net: &mut RemoteChannels, class: usize, bytes: usize) -> Target {
    let (channel, index, bytes) = (class as u32, 3, bytes as u64);
    let frame = Frame { channel, index, bytes, total: 5_000_000_000, ..Frame::new(Kind::Leave, 0) };
    let place = net.state.place(1, &frame);
    if let Target::Here(at) = place {
        // SAFETY: what lies there has room for the payload.
        unsafe { at.write_bytes(b'x', bytes as usize) };
    }
    net.state.arrived(1, &frame);
    place
}

#[test]
fn who_leaves_tells_its_last_error_once_and_no_longer_one_than_there_is_room_for() {
    let (mut net, _line) = rank();
    assert!(matches!(goodbye(&mut net, MESSAGES, MAX_ERROR_BYTES), Target::Here(_)));
    // Neither a second time nor elsewhere.
    assert_eq!(goodbye(&mut net, MESSAGES, 1), Target::Drop);
    assert_eq!(goodbye(&mut net, 0, 1), Target::Drop);
    assert_eq!(net.faults(Instant::now()), [Fault::Left { rank: 1 }]);
    let (ago, text) = net.last_error(1).unwrap();
    assert_eq!(text, "x".repeat(MAX_ERROR_BYTES));
    assert!(ago >= Duration::from_secs(5) && ago < Duration::from_secs(60), "{ago:?}");

    let (mut net, _line) = rank();
    assert_eq!(goodbye(&mut net, MESSAGES, MAX_ERROR_BYTES + 1), Target::Drop);
    assert_eq!(net.last_error(1), None);
    assert!(matches!(&net.faults(Instant::now())[..], [Fault::Lost { rank: 1, .. }]));
}

/// A connection that is there brings the reason at once; one that is still to be made may come later than this rank's end.
#[test]
fn why_a_group_is_dead_goes_over_the_connection_on_which_a_rank_was_heard_too() {
    for (heard, told) in [(false, 1), (true, 2)] {
        let (mut net, line) = rank();
        if heard {
            let wait_notice = Frame::new(Kind::WaitNotice, 0);
            assert_eq!(net.state.place(1, &wait_notice), Target::Drop);
            net.state.arrived(1, &wait_notice);
        }
        net.abort("calls differ", &[1]);
        assert_eq!(line.with(|line| line.outbound.len()), told, "heard: {heard}");
    }
}

/// A frame of rank 1's comes; where its payload goes.
fn comes(net: &mut RemoteChannels, frame: Frame) -> Target {
    let place = net.state.place(1, &frame);
    if place != Target::Later {
        net.state.arrived(1, &frame);
    }
    place
}

const PIECE: usize = 128 << 10;

#[test]
fn a_message_leaves_from_where_it_lies_and_arrives_where_it_belongs_until_that_is_let_go() {
    let (mut net, line) = rank();
    line.with(|line| line.copies = true);
    net.state.messages = RemoteMessages::new(2, net.state.owner.sibling(), true);
    let going =
        || line.with(|line| line.outbound.iter().map(|&(_, at, bytes)| (at, bytes)).collect::<Vec<_>>());
    let (bytes, piece) =
        (PIECE + 5, |index, bytes: usize| Frame { index, bytes: bytes as u64, ..Frame::new(Kind::Piece, 0) });
    let mut memory = vec![0u8; bytes];
    let at = memory.as_mut_ptr();
    for release_user_buffers in [false, true] {
        // It comes.
        let total = bytes as u64;
        assert_eq!(comes(&mut net, Frame { total, ..Frame::new(Kind::Announce, 0) }), Target::Drop);
        let (_, stream) = net.p2p(|mail| mail.next(1)).unwrap();
        assert!(net.p2p(|mail| mail.land(1, stream, at)));
        assert_eq!(comes(&mut net, piece(0, PIECE)), Target::Here(at));
        assert!(!net.p2p(|mail| mail.landed(1, stream)));
        // Another one goes, as far as its receiver has said.
        let envelope = Envelope { tag: 0, what: 0, bytes: total };
        let sent = net.p2p(|mail| mail.open(1, envelope)).unwrap();
        assert!(net.p2p(|mail| mail.lend(sent, at)));
        assert!(!net.p2p(|mail| mail.gone(sent)));
        comes(&mut net, Frame { index: 1, ..Frame::new(Kind::Ready, sent) });
        assert!(!net.p2p(|mail| mail.gone(sent)));
        assert_eq!(going().last(), Some(&(at.cast_const(), PIECE)));
        if release_user_buffers {
            net.release_user_buffers();
            comes(&mut net, Frame { index: 2, ..Frame::new(Kind::Ready, sent) });
            net.p2p(|mail| mail.gone(sent));
            assert_eq!(going().last().map(|&(_, bytes)| bytes), Some(0), "it is copied, and no more is sent");
            assert_eq!(comes(&mut net, piece(1, 5)), Target::Drop);
            break;
        }
        comes(&mut net, Frame { index: 2, ..Frame::new(Kind::Ready, sent) });
        assert!(!net.p2p(|mail| mail.gone(sent)));
        assert_eq!(going().last(), Some(&(at.wrapping_add(PIECE).cast_const(), 5)));
        line.with(|line| std::mem::take(&mut line.outbound))
            .iter()
            .for_each(|&(ticket, ..)| net.state.sent(ticket));
        assert!(net.p2p(|mail| mail.gone(sent)), "all of it is out of hands");
        net.p2p(|mail| mail.close(sent));
        assert_eq!(comes(&mut net, piece(1, 5)), Target::Here(at.wrapping_add(PIECE)));
        assert!(net.p2p(|mail| mail.landed(1, stream)));
    }
    assert_eq!(net.faults(Instant::now()), []);
}

/// Whoever waits for a short message may say where it belongs before it has a place; whoever does not keeps nothing waiting.
#[test]
fn a_short_message_that_is_waited_for_is_put_off_once() {
    for waits in [false, true] {
        let (mut net, _line) = rank();
        net.state.messages = RemoteMessages::new(2, net.state.owner.sibling(), true);
        let mut memory = vec![0u8; 50_000];
        if waits {
            assert!(net.p2p(|mail| mail.next(1)).is_none());
        }
        let total = memory.len() as u64;
        comes(&mut net, Frame { index: Frame::FOLLOWS, total, ..Frame::new(Kind::Announce, 4) });
        let piece = Frame { bytes: total, ..Frame::new(Kind::Piece, 4) };
        if waits {
            assert_eq!(comes(&mut net, piece), Target::Later);
            let (_, stream) = net.p2p(|mail| mail.next(1)).unwrap();
            assert!(net.p2p(|mail| mail.land(1, stream, memory.as_mut_ptr())));
            assert_eq!(comes(&mut net, piece), Target::Here(memory.as_mut_ptr()));
            assert!(net.p2p(|mail| mail.landed(1, stream)));
        } else {
            assert!(matches!(comes(&mut net, piece), Target::Here(at) if at != memory.as_mut_ptr()));
            let (_, stream) = net.p2p(|mail| mail.next(1)).unwrap();
            assert!(!net.p2p(|mail| mail.land(1, stream, memory.as_mut_ptr())), "it lies elsewhere already");
            assert_eq!(net.p2p(|mail| mail.piece(1, stream)).map(|(_, bytes)| bytes), Some(50_000));
        }
    }
}
