//! Interface of a wire: sends the frames of one communicator from this rank to ranks of other nodes.

use std::os::fd::RawFd;
use std::time::{Duration, Instant};

use super::frame::{ALL_CLASSES, Classes, Frame};

/// Number of a sent payload, assigned by the sender. The wire reports it when the payload's memory is free.
pub type Ticket = u64;

/// Time to wait for frames that a process sent before its end was detected.
pub const DRAIN_GRACE: Duration = Duration::from_millis(250);

/// Largest payload in bytes that every wire copies or sends before `send` returns; it may be in any memory.
pub const INLINE_PAYLOAD: usize = 8 << 10;

/// Properties of a wire that do not change.
#[derive(Clone, Debug)]
pub struct Capabilities {
    /// Name for logs and errors: "tcp eth0 10.77.0.1", "fabric efa (libfabric 2.4), 4 rails".
    pub name: String,
    /// The transport copies payloads, so that a payload's memory is free before its receiver has it. Payloads may then
    /// be sent from any memory and received into any memory.
    pub copies_payloads: bool,
    /// Time after a peer was found broken in which frames that it sent before may still arrive. They may have the
    /// abort reason of its group.
    pub drain_grace: Duration,
}

/// Memory of the payload of a frame to send, and the time at which it is free again.
#[derive(Clone, Copy, Debug)]
pub enum Payload {
    /// The frame has no payload.
    None,
    /// Memory that must not change until `Sink::sent` reports `ticket` or until [`Wire::release_user_buffers`]. It may
    /// be free earlier, but the ticket is reported in a later `poll` in any case. More than [`INLINE_PAYLOAD`] bytes
    /// are in the process's staging memory, or in any memory if the wire copies payloads.
    Borrowed {
        /// First byte.
        at: *const u8,
        /// Number that `Sink::sent` reports.
        ticket: Ticket,
    },
    /// Memory that is free when `send` returns. More than [`INLINE_PAYLOAD`] bytes only if the wire copies payloads.
    Copied {
        /// First byte.
        at: *const u8,
    },
}

/// Destination of a received payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// Write it to this address, which has room for the whole payload. For more than [`INLINE_PAYLOAD`] bytes the
    /// address is in the staging memory, or in any memory if the wire copies payloads.
    At(*mut u8),
    /// No target yet: the wire asks again at a later poll. Until then it delivers no later frame of that class and
    /// peer.
    Later,
    /// Discard the payload. The frame is still delivered.
    Discard,
}

/// Owner of a wire: receives its frames and completions.
///
/// # Safety
/// A wire writes the payload to the address that [`Sink::target`] returns as [`Target::At`]. That address has room for
/// `frame.bytes` bytes of writable memory. The memory remains valid, and only the wire accesses it, until one of these
/// events:
/// - the wire delivers the frame with [`Sink::received`];
/// - [`Wire::release_user_buffers`] or [`Wire::relocate`] returns, for memory outside the staging memory. After
///   `relocate` the same rules apply to the new address;
/// - the wire is dropped.
pub unsafe trait Sink {
    /// Returns the target of the frame's payload.
    fn target(&mut self, peer: usize, frame: &Frame) -> Target;
    /// Delivers a frame whose payload is at its target. Called once for each frame, in the order of its class.
    fn received(&mut self, peer: usize, frame: &Frame);
    /// Reports that the memory of a sent payload is free.
    fn sent(&mut self, ticket: Ticket);
    /// Returns the classes on which this rank expects frames. The wire may read other classes less often.
    fn expected(&self) -> Classes {
        ALL_CLASSES
    }
}

/// State of the connections with one peer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeerState {
    /// Reason why the peer is no longer reachable. A peer that leaves in good order has sent its `Kind::Leave` frame
    /// before.
    pub broken: Option<String>,
    /// Local error because of which this process cannot reach the peer. The peer may be alive.
    pub local_error: Option<String>,
    /// A received frame has a wrong checksum: its description. Set only by a wire that checks them, which then delivers
    /// no later frame of that connection.
    pub corrupted: Option<String>,
    /// Classes that have a connection with the peer, whichever rank opened it. Empty on a wire without connections.
    pub connected: Classes,
    /// A connection for frames to the peer is not established yet.
    pub connecting: bool,
}

/// Peer that is no longer reachable, and the reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Broken {
    /// Rank of the peer.
    pub peer: usize,
    /// Reason, for error messages.
    pub reason: String,
}

impl Broken {
    /// Returns the lost peers among `states`, which are by rank.
    pub fn among(states: &[PeerState]) -> Vec<Self> {
        let lost = |(peer, state): (usize, &PeerState)| Some(Self { peer, reason: state.broken.clone()? });
        states.iter().enumerate().filter_map(lost).collect()
    }
}

/// Measurements of the operating system on the connections with one peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConnectionStats {
    /// Minimum round-trip time.
    pub round_trip: Option<Duration>,
    /// Largest payload of a packet in bytes, if the peer does not acknowledge retransmitted packets.
    pub unacknowledged_packet: Option<u32>,
}

/// Kind of [`Wire::close`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Close {
    /// The group is dead: the wire stops receiving payloads, and still sends its queued frames.
    Abort,
    /// This rank leaves the group: after the queued frames it sends nothing more. The caller continues with `poll`.
    Leave,
    /// This rank has left the group: the connections are freed, although the group may still be referenced.
    Free,
}

/// One rank's endpoint for the frames of one communicator.
///
/// Between an ordered pair of ranks, the frames of a class ([`Frame::class`]) arrive exactly once and in the order in
/// which they were sent. A wire over an unordered transport (EFA) restores the order. One thread at a time owns a wire.
/// No method blocks.
pub trait Wire: Send {
    /// Returns the properties that do not change.
    fn capabilities(&self) -> &Capabilities;
    /// Queues a frame and its payload of `frame.bytes` bytes, and sends what can be sent at once. The first frame opens
    /// the connection. Frames to a broken peer are dropped, and their tickets reported.
    ///
    /// # Safety
    /// The payload has `frame.bytes` readable bytes, or none with [`Payload::None`]. Its memory follows the rules of its
    /// variant.
    unsafe fn send(&mut self, peer: usize, frame: &Frame, payload: Payload);
    /// Sends and receives what is ready, and reports it to the sink. Returns true if there was progress. Reads no
    /// clock: work that depends on the time is in [`Wire::check`].
    fn poll(&mut self, sink: &mut dyn Sink) -> bool;
    /// Sends what can be sent at once, without receiving.
    fn flush(&mut self, sink: &mut dyn Sink);
    /// Detects lost peers and does what is due by `now`; called at intervals while this rank waits. `waiting`: peers for
    /// which it waits. Their deaths are detected even if this rank sends nothing to them. The detection continues for a
    /// while if later calls do not name them.
    fn check(&mut self, now: Instant, waiting: &[usize]);
    /// Returns the present state of each peer, by rank.
    fn peers(&mut self) -> &[PeerState];
    /// Returns measurements on the connections with `peer`. Each costs system calls.
    fn connection_stats(&self, peer: usize) -> ConnectionStats;
    /// Adds the descriptors whose readiness (`events`: libc::POLLIN, POLLOUT) ends a sleep. Returns `false` if this
    /// wire has to be polled, so that no thread may sleep long.
    fn wait_sources(&self, fds: &mut Vec<(RawFd, i16)>) -> bool;
    /// Returns true if all frames that were sent on these classes have left this process. Payloads of a dead group may
    /// remain queued for ever.
    fn is_flushed(&self, classes: Classes) -> bool;
    /// Releases memory outside the staging memory: copies payloads that are still to be sent from it, and discards
    /// payloads that still arrive for it.
    fn release_user_buffers(&mut self);
    /// Follows memory outside the staging memory that has moved: copies payloads that are still to be sent from it.
    /// Payloads that still arrive for a collective go to the new address.
    fn relocate(&mut self, moved: &dyn Fn(*mut u8) -> *mut u8);
    /// Sets the number of bytes that may be in flight to a peer at once.
    fn set_in_flight(&mut self, bytes: usize);
    /// Starts or continues closing. Returns true once everything has arrived that would be lost if this wire were
    /// dropped.
    fn close(&mut self, how: Close) -> bool;
}
