//! Tests of a live endpoint with raw sockets that send malformed data.

mod bytes;
mod calls;
mod onlooker;
mod status;
mod unauthenticated;

use std::io::{ErrorKind, Read};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use smddp_base::{CallFingerprint, Channels, Fault, RecvChannel, SendChannel};
use smddp_net::token::Token;
use smddp_tcp::TcpAddress;

use crate::fuzzing::feed::{self, address_of, options};
use crate::joint::{Prepared, TransportOptions};
use crate::{Group, RankInfo};

const DEADLINE: Duration = Duration::from_secs(60);

/// Two ranks of this process, each as a separate node.
struct Pair {
    groups: [Group; 2],
    addresses: [TcpAddress; 2],
    token: Arc<Token>,
    seq: u64,
}

impl Pair {
    fn new() -> Self {
        Self::with(|_| {}, |_| {})
    }

    /// Creates the ranks with changed options and rank infos.
    fn with(options_of: impl Fn(&mut TransportOptions), rank_info_of: impl Fn(&mut RankInfo)) -> Self {
        let prepared = [0, 1].map(|rank| {
            let mut options = options(rank);
            options_of(&mut options);
            Prepared::new(rank, 2, Vec::new(), &options).unwrap()
        });
        let addresses = [address_of(&prepared[0]), address_of(&prepared[1])];
        let token = feed::token(&prepared[0]);
        let mut rank_infos = prepared.iter().map(|p| p.rank_info().clone()).collect::<Vec<_>>();
        rank_infos.iter_mut().for_each(rank_info_of);
        let groups = prepared.map(|p| p.connect(rank_infos.clone()).unwrap().group);
        Self { groups, addresses, token, seq: 0 }
    }

    /// Exchanges one number in each direction, as in an all_reduce of one element. Returns the number that each rank
    /// received.
    fn exchange(&mut self) -> Result<[u64; 2], Fault> {
        let (seq, begun) = (self.seq, Instant::now());
        self.seq += 1;
        let (mut opened, mut got) = ([false; 2], [None; 2]);
        let mut ended = [false; 2];
        while ended != [true; 2] {
            assert!(begun.elapsed() < DEADLINE, "the exchange does not end: {got:?}");
            for (rank, group) in self.groups.iter_mut().enumerate() {
                group.poll();
                if let Some(fault) = group.faults(Instant::now()).pop() {
                    return Err(fault);
                }
                if !opened[rank] {
                    let routed = group.info().routes.route(&Arc::new(channel_layout(1 - rank)));
                    let fingerprint = CallFingerprint { call: 7, count: 1 };
                    // SAFETY: no memory.
                    opened[rank] = unsafe { group.begin(seq, fingerprint, &routed, &[], std::iter::empty()) };
                    if opened[rank] {
                        let slot = group.send_slot(0).unwrap().cast::<u64>();
                        // SAFETY: the slot belongs to this group, is aligned, and has eight bytes.
                        unsafe { slot.write(number(rank, seq)) };
                        group.publish(0, 8);
                    }
                } else if got[rank].is_none() {
                    if let Some(message) = group.recv_slot(0).unwrap() {
                        // SAFETY: the message has eight bytes until it is released.
                        got[rank] = Some(unsafe { message.cast::<u64>().read() });
                        group.release(0);
                    }
                } else if !ended[rank] && group.settle().unwrap() {
                    ended[rank] = true;
                    group.end();
                }
            }
        }
        Ok(got.map(Option::unwrap))
    }

    /// Opens an authenticated connection.
    fn call(&self, to: usize, from: usize, class: usize) -> TcpStream {
        feed::connect(&self.addresses[to], &self.token, (from, to), class)
    }

    /// Checks that exchanges succeed and return the numbers that were sent.
    fn check_exchanges(&mut self) {
        for _ in 0..3 {
            let expected = [number(1, self.seq), number(0, self.seq)];
            assert_eq!(self.exchange(), Ok(expected));
        }
    }
}

fn number(rank: usize, seq: u64) -> u64 {
    1000 * (seq + 1) + rank as u64
}

fn channel_layout(peer: usize) -> Channels {
    Channels {
        send_channels: vec![SendChannel { readers: vec![peer], slot_bytes: 64, messages: 1, bytes: 8 }],
        recv_channels: vec![RecvChannel {
            rank: peer,
            channel: 0,
            reader: 0,
            slot_bytes: 64,
            messages: 1,
            bytes: 8,
        }],
        inline: false,
        depth: (1, 1),
        window: 1,
    }
}

/// Returns true if the other end closes the connection.
fn is_closed_by_peer(stream: &TcpStream) -> bool {
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let mut rest = [0; 64];
    loop {
        match (&mut &*stream).read(&mut rest) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe),
        }
    }
}
