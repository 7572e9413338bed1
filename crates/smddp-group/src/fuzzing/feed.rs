//! Rank under test whose peer writes arbitrary bytes; for tests and fuzz targets.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use smddp_base::{CallFingerprint, Channels, Envelope, Fault, MessageId, RecvChannel, SendChannel};
#[cfg(test)]
use smddp_net::frame::{Frame, Kind};
use smddp_net::handshake::{HandshakeEnd, Initiator};
use smddp_net::interface::{AddressFamily, InterfaceFilter};
use smddp_net::socket_io::advance;
use smddp_net::token::Token;
use smddp_tcp::TcpAddress;
pub(crate) use smddp_tcp::address::{Credential, Purpose};

use crate::Group;
use crate::joint::{InterNode, Prepared, TransportOptions};

/// Of the current operation: bytes of its largest message, number of messages, total bytes.
pub(crate) const SLOT_BYTES: usize = 5_000;
pub(crate) const MESSAGES: u64 = 3;
pub(crate) const BYTES: u64 = 14_000;
/// Fingerprint of the operation.
pub(crate) const FINGERPRINT: CallFingerprint = CallFingerprint { call: 7, count: 1 };

/// Transport options for ranks of one process that act as separate nodes.
pub(crate) fn options(rank: usize) -> TransportOptions {
    TransportOptions {
        staging: 8 << 20,
        shm: true,
        node: Some(format!("node {rank}")),
        interface: InterfaceFilter { value: Some("=lo".to_owned()), from: "a test" },
        family: AddressFamily::Any,
        peer_timeout: std::time::Duration::from_secs(20),
        inter_node: InterNode::Tcp,
        encrypts: false,
        checksums: false,
        library: None,
        provider: None,
        separate_endpoint: false,
        local: None,
    }
}

/// Returns the token of the group of this rank 0.
pub(crate) fn token(first: &Prepared) -> Arc<Token> {
    match &first.rank_info().token {
        Some(token) => Arc::new(token.clone()),
        None => panic!("rank 0 has no token"),
    }
}

/// Returns the address of that rank's listener.
pub(crate) fn address_of(prepared: &Prepared) -> TcpAddress {
    match &prepared.rank_info().offer.tcp {
        Ok((address, _)) => address.clone(),
        Err(reason) => panic!("{reason}"),
    }
}

/// Opens an authenticated connection to the listener, accepted on return.
pub(crate) fn connect(
    address: &TcpAddress,
    token: &Arc<Token>,
    (from, to): (usize, usize),
    class: usize,
) -> TcpStream {
    let stream = authenticate(address, token, (from, to), Purpose::Frames(class)).0;
    // The listener accepts connections in order, so the reply to the second one confirms the first.
    let mut query = authenticate(address, token, (from, to), Purpose::Query).0;
    let _ = query.read(&mut [0; 8]);
    stream
}

/// Starts a handshake with that listener.
pub(crate) fn initiator(
    address: &TcpAddress,
    token: &Arc<Token>,
    (from, to): (usize, usize),
    purpose: Purpose,
) -> Initiator {
    let credential = Credential { rank: from, token: token.clone(), encrypts: false };
    credential.initiator((to, address), purpose).unwrap_or_else(|error| panic!("{error}"))
}

/// Returns an authenticated connection and the bytes that the initiator sent.
pub(crate) fn authenticate(
    address: &TcpAddress,
    token: &Arc<Token>,
    ranks: (usize, usize),
    purpose: Purpose,
) -> (TcpStream, Vec<u8>) {
    let mut initiator = initiator(address, token, ranks, purpose);
    let (stream, mut sent) = (connect_with(address, &[]), Vec::new());
    while !initiator.is_complete() {
        if initiator.begins_message() {
            sent.extend(initiator.output());
        }
        match advance(&stream, &mut initiator) {
            Ok(moved) => assert!(moved, "no reply of {address:?}"),
            // The connection is rejected.
            Err(_) if initiator.proof_sent() => break,
            Err(error) => panic!("no connection to {address:?}: {error}"),
        }
    }
    (stream, sent)
}

fn connect_with(address: &TcpAddress, bytes: &[u8]) -> TcpStream {
    let connected = TcpStream::connect(address.socket).and_then(|mut stream| {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(Duration::from_secs(20)))?;
        stream.write_all(bytes)?;
        Ok(stream)
    });
    connected.unwrap_or_else(|error| panic!("no connection to {address:?}: {error}"))
}

/// Rank 1 of two ranks in an operation in which each sends messages to the other. The test acts as rank 0.
pub(crate) struct Feed {
    group: Group,
    address: TcpAddress,
    token: Arc<Token>,
    /// Keeps the address in rank 0's rank info valid.
    _other: Prepared,
    streams: Vec<(Envelope, MessageId)>,
    /// Received and released messages.
    pub(crate) read: u64,
    written: u64,
}

impl Feed {
    /// # Panics
    /// If this machine has no loopback interface.
    #[must_use]
    pub(crate) fn new() -> Self {
        let [mut other, me] = [0, 1].map(|rank| {
            Prepared::new(rank, 2, Vec::new(), &options(rank)).unwrap_or_else(|error| panic!("{error}"))
        });
        // Connections to it are accepted, but not read.
        other.trust_rank_info(&other.rank_info().clone());
        let (rank_infos, address) =
            (vec![other.rank_info().clone(), me.rank_info().clone()], address_of(&me));
        let token = token(&other);
        let mut group = me.connect(rank_infos).unwrap_or_else(|error| panic!("{error}")).group;
        let channel_layout = Channels {
            send_channels: vec![SendChannel {
                readers: vec![0],
                slot_bytes: SLOT_BYTES,
                messages: MESSAGES,
                bytes: BYTES,
            }],
            recv_channels: vec![RecvChannel {
                rank: 0,
                channel: 0,
                reader: 0,
                slot_bytes: SLOT_BYTES,
                messages: MESSAGES,
                bytes: BYTES,
            }],
            inline: false,
            depth: (2, 2),
            window: 2,
        };
        let routed = group.info().routes.route(&Arc::new(channel_layout));
        // SAFETY: no memory.
        let begun = unsafe { group.begin(0, FINGERPRINT, &routed, &[], std::iter::empty()) };
        assert!(begun, "the operation did not begin");
        Self { group, address, token, _other: other, streams: Vec::new(), read: 0, written: 0 }
    }

    /// Opens a connection as rank 0 for frames of this class (0 or 1).
    #[must_use]
    pub(crate) fn connect(&self, class: usize) -> TcpStream {
        connect(&self.address, &self.token, (0, 1), class)
    }

    /// Opens a connection that begins with arbitrary bytes.
    #[must_use]
    pub(crate) fn connect_with_bytes(&self, bytes: &[u8]) -> TcpStream {
        connect_with(&self.address, bytes)
    }

    /// Returns a greeting for frames of this class, from any rank.
    #[must_use]
    pub(crate) fn greeting(&self, from: usize, class: usize) -> Vec<u8> {
        initiator(&self.address, &self.token, (from, 1), Purpose::Frames(class)).output().to_vec()
    }

    /// Runs one progress iteration of a waiting rank. Returns the detected faults.
    pub(crate) fn poll(&mut self) -> Vec<Fault> {
        self.poll_at(Instant::now())
    }

    /// Runs one progress iteration at that time.
    pub(crate) fn poll_at(&mut self, now: Instant) -> Vec<Fault> {
        self.group.poll();
        if self.written < MESSAGES
            && let Some(slot) = self.group.send_slot(0)
        {
            let left = BYTES as usize - self.written as usize * SLOT_BYTES;
            // SAFETY: this rank owns the slot of `SLOT_BYTES` bytes.
            unsafe { slot.write_bytes(7, left.min(SLOT_BYTES)) };
            self.group.publish(0, left.min(SLOT_BYTES));
            self.written += 1;
        }
        while self.read < MESSAGES
            && let Ok(Some(message)) = self.group.recv_slot(0)
        {
            // SAFETY: the message is in a slot of `SLOT_BYTES` bytes until it is released.
            std::hint::black_box(
                unsafe { std::slice::from_raw_parts(message, SLOT_BYTES) }.iter().fold(0, |a, b| a ^ b),
            );
            self.group.release(0);
            self.read += 1;
        }
        while let Some(envelope) = self.group.messages().next_announced(0) {
            self.streams.push(envelope);
        }
        for at in (0..self.streams.len()).rev() {
            let (envelope, stream) = self.streams[at];
            let mut left = envelope.bytes;
            while left > 0 {
                let Some((piece, room)) = self.group.messages().carrier(stream).recv_slot(stream) else {
                    break;
                };
                // SAFETY: the fragment has `room` bytes until it is released.
                std::hint::black_box(unsafe { piece.add(room - 1).read() });
                self.group.messages().carrier(stream).release(stream);
                left -= left.min(room as u64);
            }
            self.streams[at].0.bytes = left;
            if left == 0 {
                self.streams.swap_remove(at);
            }
        }
        self.group.faults(now)
    }

    /// Polls until a fault is detected, or until `streams` are read to the end without a fault.
    pub(crate) fn settle(&mut self, streams: &[TcpStream]) -> Vec<Fault> {
        let unread = |stream: &TcpStream| {
            let mut waiting = 0;
            // SAFETY: TIOCOUTQ writes one int; the socket is open.
            unsafe { libc::ioctl(std::os::fd::AsRawFd::as_raw_fd(stream), libc::TIOCOUTQ, &raw mut waiting) };
            waiting > 0
        };
        for round in 0..200 {
            let faults = self.poll();
            if !faults.is_empty() {
                return faults;
            }
            if round > 3 && !streams.iter().any(unread) {
                break;
            }
        }
        self.poll()
    }
}

impl Default for Feed {
    fn default() -> Self {
        Self::new()
    }
}

/// Returns an encoded frame header: number of its kind (1 to 10) and fields channel, seq, index, bytes, what, count,
/// total.
#[cfg(test)]
#[must_use]
pub(crate) fn header(kind: u8, channel: u32, [seq, index, bytes, what, count, total]: [u64; 6]) -> [u8; 64] {
    let kind = Kind::ALL[usize::from(kind.clamp(1, 10)) - 1];
    Frame { kind, channel, seq, index, bytes, what, count, total, checksum: None }.encode()
}
