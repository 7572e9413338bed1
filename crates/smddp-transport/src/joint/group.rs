//! One rank's part of a group: shared memory with the ranks of its node, and a wire to the ranks of other nodes.

use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::routes::{ChannelRoutes, RecvRoute, RoutedChannels, Routes, SendRoute};
use crate::net::channels::RemoteChannels;

use crate::process::{Sleeper, last_error, status};
use crate::shm::{LocalChannels, SharedPage, ZeroCopySource};
use crate::{CallFingerprint, Channels, Envelope, Fault, MessageId, MessageTransport, Mismatch};

/// Description of a rank of another node whose process does not run.
const MUTE: &str = "does not answer, though its host does: its process is stopped, or has no time";

/// One rank's end of a communicator.
///
/// Messages pass through the *cells* of channels: a writer fills its next cell and publishes it, a reader reads it in place and
/// releases it. `straggler_query`, `straggler_query_of`, `activity`, `abort` (50 ms) and `leave` may block. All other methods return at
/// once: `None` or `false` means "not yet", and the only error is a mismatched call. A group has one owner at a time.
pub struct Group {
    routes: Arc<Routes>,
    /// "rank 3 (host h1, pid 812)", by rank.
    names: Vec<String>,
    local: LocalChannels,
    /// Remote half of a group that spans nodes.
    remote: Option<Remote>,
}

struct Remote {
    net: RemoteChannels,
    /// Routes of the operation begun last.
    routes: Arc<ChannelRoutes>,
    /// Local and remote cell that the writer fills, by channel, for channels with readers on this node and on others.
    filling: Vec<Option<(*mut u8, *mut u8)>>,
}

// SAFETY: `filling` contains addresses of cells that this group owns, and one thread at a time owns the group.
unsafe impl Send for Remote {}

impl Group {
    pub(super) fn new(
        routes: Routes,
        names: Vec<String>,
        local: LocalChannels,
        net: Option<RemoteChannels>,
    ) -> Self {
        let remote = net.map(|net| Remote { net, routes: Arc::default(), filling: Vec::new() });
        Self { routes: Arc::new(routes), names, local, remote }
    }

    pub fn rank(&self) -> usize {
        self.routes.me
    }

    pub fn size(&self) -> usize {
        self.routes.size()
    }

    /// Returns the payload bytes that fit a header slot; 0 if the group spans nodes, because slots reach ranks of one node only.
    pub fn slot_bytes(&self) -> usize {
        if self.remote.is_none() { crate::shm::SLOT_BYTES } else { 0 }
    }

    /// Returns the location of the group's ranks, which determines the routes of channels.
    pub fn routes(&self) -> &Arc<Routes> {
        &self.routes
    }

    pub fn route(&self, channel_layout: Channels) -> RoutedChannels {
        self.routes.route(&Arc::new(channel_layout))
    }

    /// Polls the wire for incoming data; once before each progress pass. Returns true if it made progress.
    #[inline]
    pub fn poll_network(&mut self) -> bool {
        self.remote.as_mut().is_some_and(|remote| remote.net.poll())
    }

    /// Returns true if the group has ranks on other nodes.
    pub fn spans_nodes(&self) -> bool {
        self.remote.is_some()
    }

    /// Sends queued data without polling for incoming data.
    pub fn push(&mut self) {
        if let Some(remote) = &mut self.remote {
            remote.net.push();
        }
    }

    /// Returns true if data of operations that have ended here is still to be sent, so that the group needs further progress.
    #[inline]
    pub fn busy(&self) -> bool {
        self.remote.as_ref().is_some_and(|remote| remote.net.busy())
    }

    /// Begins operation `seq`: allocates its memory and publishes its fingerprint. `false`: not yet, or the group has failed;
    /// [`Self::faults`] then returns the reason.
    ///
    /// `sources`: zero-copy sources of channels for which [`RoutedChannels::may_be_source`] holds, ascending. Their memory must remain
    /// unchanged until the operation ends. [`Self::cell`] returns that memory if the readers can read it, else an ordinary cell.
    #[inline]
    pub fn begin(
        &mut self,
        seq: u64,
        fingerprint: CallFingerprint,
        routed: &RoutedChannels,
        sources: &[ZeroCopySource],
    ) -> bool {
        match (&mut self.remote, &routed.remote) {
            (Some(remote), Some(routes)) => {
                let begun = remote.begin(&mut self.local, seq, fingerprint, (&routed.local, sources), routes);
                if begun && !routed.unannounced {
                    remote.net.publish_begun();
                }
                begun
            }
            _ => self.local.begin(seq, fingerprint, &routed.local, sources),
        }
    }

    /// Returns true if this process has symmetric memory, which zero-copy sources may use.
    #[inline]
    pub fn has_symmetric(&self) -> bool {
        self.local.has_symmetric()
    }

    /// Returns the next free cell of send channel `channel`.
    #[inline]
    pub fn cell(&mut self, channel: usize) -> Option<*mut u8> {
        match &mut self.remote {
            None => self.local.cell(channel),
            Some(remote) => remote.cell(&mut self.local, channel),
        }
    }

    /// Publishes the cell filled last as a message of `bytes` bytes.
    #[inline]
    pub fn publish(&mut self, channel: usize, bytes: usize) {
        match &mut self.remote {
            None => self.local.publish(channel),
            Some(remote) => remote.publish(&mut self.local, channel, bytes),
        }
    }

    /// Sends `bytes` bytes at `payload` instead of a cell. They must remain unchanged until the operation ends or
    /// [`Self::release_user_buffers`] is called. For send channels with [`RoutedChannels::sends_in_place`].
    #[inline]
    pub fn publish_from(&mut self, channel: usize, payload: *const u8, bytes: usize) {
        if let Some(remote) = &mut self.remote
            && let Some(net) = remote.routes.sends[channel].net
        {
            remote.net.publish_from(net, payload, bytes);
        }
    }

    /// Sets the receive target of a channel: `bytes` bytes at `at`, with `stride` bytes from one message to the next. The memory
    /// belongs to the operation just begun, until it ends or [`Self::release_user_buffers`] is called. For receive channels with
    /// [`RoutedChannels::receives_in_place`] or [`RoutedChannels::may_be_target`].
    pub fn set_recv_target(&mut self, recv_channel: usize, at: *mut u8, bytes: usize, stride: usize) {
        let Some(remote) = &mut self.remote else {
            return self.local.set_recv_target(recv_channel, at, bytes, stride);
        };
        match remote.routes.recvs[recv_channel] {
            RecvRoute::Local(recv_channel) => self.local.set_recv_target(recv_channel, at, bytes, stride),
            RecvRoute::Remote(recv_channel) => remote.net.recv_in_place(recv_channel, at, bytes, stride),
        }
    }

    /// Releases the callers' memory of the operation and messages in progress, which end without completing.
    pub fn release_user_buffers(&mut self) {
        if let Some(remote) = &mut self.remote {
            remote.net.release_user_buffers();
        }
    }

    /// Adjusts addresses after the memory of the collective in progress has moved to `moved(address)`, with all received data.
    pub fn relocate(&mut self, moved: &dyn Fn(*mut u8) -> *mut u8) {
        self.local.relocate(moved);
        if let Some(remote) = &mut self.remote {
            remote.net.relocate(moved);
        }
    }

    /// Returns the address of the next unread message of `recv_channel`.
    #[inline]
    pub fn message(&mut self, recv_channel: usize) -> Result<Option<*const u8>, Mismatch> {
        let Some(remote) = &mut self.remote else { return self.local.message(recv_channel) };
        match remote.routes.recvs[recv_channel] {
            RecvRoute::Local(recv_channel) => {
                self.local.message(recv_channel).map_err(|found| self.routes.globally(found))
            }
            RecvRoute::Remote(recv_channel) => remote.net.next_message(recv_channel),
        }
    }

    /// Releases that message after it has been read.
    #[inline]
    pub fn release(&mut self, recv_channel: usize) {
        let Some(remote) = &mut self.remote else { return self.local.release(recv_channel) };
        match remote.routes.recvs[recv_channel] {
            RecvRoute::Local(recv_channel) => self.local.release(recv_channel),
            RecvRoute::Remote(recv_channel) => remote.net.release(recv_channel),
        }
    }

    /// Compares the headers of all writers, including writers without a message here, with this rank's. `false`: headers are missing,
    /// zero-copy messages are unread, or sends are not complete.
    #[inline]
    pub fn settle(&mut self) -> Result<bool, Mismatch> {
        let Some(remote) = &mut self.remote else { return self.local.settle() };
        let here = self.local.settle().map_err(|found| self.routes.globally(found))?;
        Ok(here && remote.net.settle()?)
    }

    /// Ends the operation at this rank. Its memory is reused once its readers have finished.
    #[inline]
    pub fn end(&mut self) {
        self.local.end();
        if let Some(remote) = &mut self.remote {
            remote.net.end();
        }
    }

    /// Returns true if the readers' caches are distant from this rank's: large cells are then faster with streaming stores.
    #[inline]
    pub fn has_distant_readers(&self) -> bool {
        self.local.has_distant_readers()
    }

    /// Assumes distant caches of the readers and ignores measurements. For tests.
    pub fn assume_distant_readers(&mut self) {
        self.local.assume_distant_readers();
    }

    /// Wakes sleeping ranks after data was published. Call it before this rank does other work.
    #[inline]
    pub fn flush(&mut self) {
        self.local.flush();
    }

    /// Returns the node index of a rank of this node, or the remote channels for a rank of another node.
    fn path_to(&self, rank: usize) -> Result<usize, &RemoteChannels> {
        match (self.routes.local_index(rank), &self.remote) {
            (None, Some(remote)) => Err(&remote.net),
            (local, _) => Ok(local.unwrap_or(rank)),
        }
    }

    /// Returns true if `rank` has begun operation `seq` or a later one; `None` if that is unknown.
    pub fn arrived(&self, rank: usize, seq: u64) -> Option<bool> {
        self.path_to(rank)
            .map_or_else(|net| net.arrived(rank, seq), |local| Some(self.local.arrived(local, seq)))
    }

    /// Returns true if operation `seq` cannot end here without `rank`, and `rank` is not known to have begun it.
    pub fn waits_for(&self, rank: usize, seq: u64) -> bool {
        self.path_to(rank)
            .map_or_else(|net| net.waits_for(rank, seq), |local| !self.local.arrived(local, seq))
    }

    /// Returns true if operation `seq` cannot end here before `rank`, of another node, has accepted this rank's data.
    pub fn has_unfinished_sends(&self, rank: usize, seq: u64) -> bool {
        self.path_to(rank).err().is_some_and(|net| net.has_pending_sends_to(rank, seq))
    }

    /// Returns the ranks of other nodes that the operation in progress waits for: for their data, or until they accept data.
    pub fn missing_peers(&self) -> Vec<usize> {
        self.remote.as_ref().map_or_else(Vec::new, |remote| remote.net.pending_ranks())
    }

    /// Returns the fingerprint of operation `seq` at `rank`, if that is among the operations that `rank` has begun most recently.
    pub fn fingerprint_of(&self, rank: usize, seq: u64) -> Option<CallFingerprint> {
        self.path_to(rank)
            .map_or_else(|net| net.fingerprint_of(rank, seq), |local| self.local.fingerprint_of(local, seq))
    }

    /// Queries after an expired deadline which ranks have begun the operation, if that is unknown. Takes a few seconds at most, and
    /// ends early once another rank aborts the group.
    pub fn straggler_query(&mut self) {
        let Some(remote) = &mut self.remote else { return };
        let (local, routes) = (&self.local, &self.routes);
        let node_indices = || (0..routes.size()).filter_map(|rank| routes.local_index(rank));
        remote.net.query_stragglers(&routes.remote_ranks(), |seq| {
            node_indices().any(|index| !local.arrived(index, seq))
        });
    }

    /// Queries only `ranks`, when this rank waits for something else than an operation.
    pub fn straggler_query_of(&mut self, ranks: &[usize]) {
        let Some(remote) = &mut self.remote else { return };
        let peers: Vec<usize> =
            ranks.iter().copied().filter(|&rank| self.routes.local_index(rank).is_none()).collect();
        remote.net.query_ranks(&peers);
    }

    /// Sets the number by which status queries refer to this rank.
    pub fn set_status_id(&self, about: u64) {
        if let Some(remote) = &self.remote {
            remote.net.set_query_subject(about);
        }
    }

    /// Returns the activity that `rank` reports: queried now for a rank of this node, else from the last straggler query. Empty if it
    /// reported none. `about`: number for status queries about it. May take a second.
    pub fn activity(&self, rank: usize, about: u64) -> String {
        match self.path_to(rank) {
            Err(net) => net.activity(rank).to_owned(),
            Ok(local) => {
                let process = self.local.process(local);
                process.map_or_else(String::new, |one| status::activity(one, self.local.pid(local), about))
            }
        }
    }

    /// Returns the last error of the process of `rank` and its age; the text names the rank that had it. `None` if there was none,
    /// or if `rank` is on another node and has not sent its last message.
    pub fn last_error(&self, rank: usize) -> Option<(Duration, String)> {
        if rank == self.rank() {
            return last_error::own();
        }
        self.path_to(rank).map_or_else(|net| net.last_error(rank), |local| self.local.last_error(local))
    }

    /// Returns the ranks whose processes do not run although their hosts do, with a description. For ranks of other nodes it is the
    /// result of the last straggler query.
    pub fn stalled(&self) -> Vec<(usize, &'static str)> {
        let local = (0..self.routes.size()).filter(|&rank| {
            let pid = self.routes.local_index(rank).and_then(|local| self.local.pid(local));
            pid.is_some_and(status::is_stopped)
        });
        let remote = self.remote.iter().flat_map(|remote| remote.net.unresponsive());
        local.map(|rank| (rank, status::STOPPED)).chain(remote.map(|rank| (rank, MUTE))).collect()
    }

    /// Returns the ranks of other nodes whose hosts did not reply to the last straggler query.
    pub fn silent(&self) -> Vec<usize> {
        self.remote.as_ref().map_or_else(Vec::new, |remote| remote.net.silent_hosts())
    }

    /// Calls `call` with the message transport to `rank` and its number in that transport.
    fn p2p<T>(&mut self, rank: usize, call: impl FnOnce(&mut dyn MessageTransport, usize) -> T) -> T {
        match (self.routes.local_index(rank), &mut self.remote) {
            (None, Some(remote)) => remote.net.p2p(|transport| call(transport, rank)),
            (local, _) => call(self.local.p2p(), local.unwrap_or(rank)),
        }
    }

    /// See [`MessageTransport::announce`]; the other `p2p_` methods correspond to its methods, too.
    pub fn p2p_announce(&mut self, to: usize, envelope: Envelope) -> Option<MessageId> {
        self.p2p(to, |transport, to| transport.announce(to, envelope))
    }

    pub fn p2p_send_slot(&mut self, to: usize, message: MessageId) -> Option<(*mut u8, usize)> {
        self.p2p(to, |transport, _| transport.send_slot(message))
    }

    pub fn p2p_send_in_place(&mut self, to: usize, message: MessageId, at: *const u8) -> bool {
        self.p2p(to, |transport, _| transport.send_in_place(message, at))
    }

    pub fn p2p_is_sent(&mut self, to: usize, message: MessageId) -> bool {
        self.p2p(to, |transport, _| transport.is_sent(message))
    }

    pub fn p2p_publish(&mut self, to: usize, message: MessageId, bytes: usize) {
        self.p2p(to, |transport, _| transport.publish(message, bytes));
    }

    pub fn p2p_close(&mut self, to: usize, message: MessageId) {
        self.p2p(to, |transport, _| transport.close(message));
    }

    pub fn p2p_next_announced(&mut self, from: usize) -> Option<(Envelope, MessageId)> {
        self.p2p(from, |transport, from| transport.next_announced(from))
    }

    pub fn p2p_receive_into(&mut self, from: usize, message: MessageId, at: *mut u8) -> bool {
        self.p2p(from, |transport, from| transport.receive_into(from, message, at))
    }

    pub fn p2p_is_received(&mut self, from: usize, message: MessageId) -> bool {
        self.p2p(from, |transport, from| transport.is_received(from, message))
    }

    pub fn p2p_recv_slot(&mut self, from: usize, message: MessageId) -> Option<(*const u8, usize)> {
        self.p2p(from, |transport, from| transport.recv_slot(from, message))
    }

    pub fn p2p_release(&mut self, from: usize, message: MessageId) {
        self.p2p(from, |transport, from| transport.release(from, message));
    }

    pub fn p2p_confirm(&mut self, from: usize) {
        self.p2p(from, |transport, from| transport.confirm(from));
    }

    pub fn p2p_is_confirmed(&mut self, to: usize) -> bool {
        self.p2p(to, |transport, to| transport.is_confirmed(to))
    }

    /// Returns true if `rank` is on this node.
    pub fn is_local(&self, rank: usize) -> bool {
        self.path_to(rank).is_ok()
    }

    /// Notifies `rank`, if it is on another node, that this rank announces no further messages to it, although it remains in the group.
    pub fn p2p_announce_last(&mut self, rank: usize) {
        if self.routes.local_index(rank).is_none()
            && let Some(remote) = &mut self.remote
        {
            remote.net.announce_last(rank);
        }
    }

    /// Returns true if `rank`, of another node, announces no further messages. Payload of announced messages may still be pending.
    pub fn p2p_is_finished(&self, rank: usize) -> bool {
        self.path_to(rank).is_err_and(|net| net.all_announced(rank))
    }

    /// Returns ranks that are lost, have left or have aborted the group, and mismatched calls. Call it while this rank waits: it starts
    /// watching, at `now`, the ranks that this rank waits for.
    pub fn faults(&mut self, now: Instant) -> Vec<Fault> {
        let mut faults = self.local.faults();
        if let Some(remote) = &mut self.remote {
            faults.iter_mut().for_each(|fault| self.routes.fault_globally(fault));
            faults.extend(remote.net.faults(now));
        }
        faults
    }

    /// Returns true if `rank`, which aborted the group, had ended operation `seq` before.
    pub fn failed_after(&self, rank: usize, seq: u64) -> bool {
        self.path_to(rank)
            .map_or_else(|net| net.aborted_after(rank, seq), |local| self.local.arrived(local, seq + 1))
    }

    /// Watches ranks that this rank waits for outside of this group: detects their deaths from `now` on, if called repeatedly.
    pub fn watch(&mut self, ranks: &[usize], now: Instant) {
        let Some(remote) = &mut self.remote else { return };
        let remote_ranks = ranks.iter().filter(|&&rank| self.routes.local_index(rank).is_none());
        remote_ranks.for_each(|&rank| remote.net.watch(rank, now));
    }

    /// Aborts the group and reports `reason` to the other ranks, truncated to [`crate::MAX_ABORT_REPORT`] bytes.
    pub fn abort(&mut self, reason: &str) {
        self.local.abort(reason);
        if let Some(remote) = &mut self.remote {
            remote.net.abort(reason, &self.routes.remote_ranks());
        }
    }

    /// Leaves the group in good order.
    pub fn leave(&mut self) {
        if let Some(remote) = &mut self.remote {
            remote.net.leave();
        }
        self.local.leave();
    }

    /// Returns "rank 3 (host h1, pid 812)".
    pub fn describe(&self, rank: usize) -> String {
        self.names.get(rank).cloned().unwrap_or_else(|| format!("rank {rank}"))
    }

    /// Adds the descriptors, with their poll events, that must end a sleep besides the doorbell. `false`: sleeps must be short.
    pub fn interest(&self, fds: &mut Vec<(RawFd, i16)>) -> bool {
        self.remote.as_ref().is_none_or(|remote| remote.net.interest(fds))
    }

    /// Returns the bytes of collectives that this rank has sent to ranks of other nodes.
    pub fn internode_bytes(&self) -> u64 {
        self.remote.as_ref().map_or(0, |remote| remote.net.bytes_sent())
    }

    /// Returns the transport between nodes; empty for a single node.
    pub fn network_path(&self) -> String {
        self.remote.as_ref().map_or_else(String::new, |remote| remote.net.name())
    }

    /// Returns the ranks of other nodes that do not acknowledge data, with the largest packet payload to them in bytes.
    pub fn unacknowledged(&self) -> Vec<(usize, u32)> {
        self.remote.as_ref().map_or_else(Vec::new, |remote| remote.net.unacknowledged())
    }

    /// Returns the round-trip time to `rank` that the kernel of this process has measured; `None` without a measurement.
    pub fn round_trip(&self, rank: usize) -> Option<Duration> {
        self.remote.as_ref()?.net.round_trip(rank)
    }

    /// Makes the wire reserve room for `bytes` bytes in flight to one rank of another node.
    pub fn expect(&mut self, bytes: usize) {
        if let Some(remote) = &mut self.remote {
            remote.net.expect(bytes);
        }
    }

    /// Returns the shared pages and exports of the ranks of this node; `None` for a group of one rank.
    pub fn shared_page(&self) -> Option<Arc<SharedPage>> {
        self.local.shared_page(self.routes.places())
    }

    /// Returns the handle with which any thread waits for incoming data.
    pub fn sleeper(&self) -> Sleeper {
        self.local.sleeper()
    }
}

impl Routes {
    fn globally(&self, found: Mismatch) -> Mismatch {
        Mismatch { rank: self.rank(found.rank), ..found }
    }

    fn fault_globally(&self, fault: &mut Fault) {
        let (Fault::Lost { rank, .. }
        | Fault::Unreachable { rank, .. }
        | Fault::Left { rank }
        | Fault::Aborted { rank, .. }
        | Fault::Mismatch { found: Mismatch { rank, .. }, .. }) = fault;
        *rank = self.rank(*rank);
    }
}

impl Remote {
    fn begin(
        &mut self,
        local: &mut LocalChannels,
        seq: u64,
        fingerprint: CallFingerprint,
        (channel_layout, sources): (&Arc<Channels>, &[ZeroCopySource]),
        routes: &Arc<ChannelRoutes>,
    ) -> bool {
        // Its data may have arrived already, but a group that is known to have failed must not make progress.
        if self.net.has_mismatch() || self.net.is_aborted(seq) {
            return false;
        }
        if !Arc::ptr_eq(&self.routes, routes) {
            self.net.set_layout(&routes.net);
            self.filling.clear();
            self.filling.resize(routes.sends.len(), None);
            self.routes = routes.clone();
        }
        if !self.net.reserve() || !local.begin(seq, fingerprint, channel_layout, sources) {
            return false;
        }
        self.net.begin(seq, fingerprint);
        true
    }

    fn cell(&mut self, local: &mut LocalChannels, channel: usize) -> Option<*mut u8> {
        match self.routes.sends[channel] {
            SendRoute { shm: true, net: None } => local.cell(channel),
            SendRoute { shm: true, net: Some(net) } => {
                let (remote, local) = (self.net.free_slot(net)?, local.cell(channel)?);
                self.filling[channel] = Some((local, remote));
                Some(local)
            }
            SendRoute { net: Some(net), .. } => self.net.free_slot(net),
            SendRoute { .. } => None,
        }
    }

    fn publish(&mut self, local: &mut LocalChannels, channel: usize, bytes: usize) {
        let SendRoute { shm, net } = self.routes.sends[channel];
        if let Some((local, remote)) = self.filling[channel].take() {
            // SAFETY: `cell` returned both cells for this channel, with room for the message, and they are in different regions. The
            // owner of this group has written `bytes` bytes to the first.
            unsafe { std::ptr::copy_nonoverlapping(local, remote, bytes) };
        }
        if shm {
            local.publish(channel);
        }
        if let Some(net) = net {
            self.net.publish(net, bytes);
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // A forked child holds a copy: the connections belong to the parent.
        if self.local.is_owned()
            && let Some(remote) = &mut self.remote
        {
            remote.net.leave();
        }
    }
}
