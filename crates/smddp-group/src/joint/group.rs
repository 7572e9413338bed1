//! One rank's part of a group: shared memory with the ranks of its node, and a wire to the ranks of other nodes.

use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Instant;

use smddp_base::{CallFingerprint, Channels, Fault, Mismatch};
use smddp_shm::{LocalChannels, ZeroCopySource};

use super::info::GroupInfo;
use super::local_queries::LocalQueries;
use super::routes::{ChannelRoutes, RecvRoute, RoutedChannels, Routes, SendRoute};
use crate::channels::RemoteChannels;

/// Memory of the call that receives the messages of a channel: `bytes` bytes at `at`, with `stride` bytes from one message to the
/// next.
pub struct RecvTarget {
    /// Index of the receive channel.
    pub channel: usize,
    /// Address of the first message.
    pub at: *mut u8,
    /// Size of the memory in bytes.
    pub bytes: usize,
    /// Distance between the starts of consecutive messages in bytes.
    pub stride: usize,
}

/// One rank's end of a communicator.
///
/// Messages pass through the *slots* of channels: a writer fills its next slot and publishes it, a reader reads it in place and
/// releases it. `leave` may block. All other methods return at once: `None` or `false` means "not yet", and the only error is a mismatched call. A group has one owner at a time.
pub struct Group {
    info: Arc<GroupInfo>,
    pub(super) routes: Arc<Routes>,
    pub(super) local: LocalChannels,
    /// Remote half of a group that spans nodes.
    pub(super) remote: Option<Remote>,
    pub(super) local_queries: LocalQueries,
}

pub(super) struct Remote {
    pub(super) net: RemoteChannels,
    /// Routes of the operation begun last.
    routes: Arc<ChannelRoutes>,
    /// Local and remote slot that the writer fills, by channel, for channels with readers on this node and on others.
    filling: Vec<Option<(*mut u8, *mut u8)>>,
}

// SAFETY: `filling` contains addresses of slots that this group owns, and one thread at a time owns the group.
unsafe impl Send for Remote {}

impl Group {
    pub(super) fn new(
        routes: Routes,
        (names, id): (Arc<[String]>, Option<[u8; 16]>),
        local: LocalChannels,
        net: Option<RemoteChannels>,
    ) -> Self {
        let (me, size, routes) = (routes.me, routes.size(), Arc::new(routes));
        let info = GroupInfo {
            rank: me,
            size,
            id,
            names,
            routes: routes.clone(),
            inline_bytes: if net.is_none() { smddp_shm::HEADER_PAYLOAD_BYTES } else { 0 },
            spans_nodes: net.is_some(),
            network_path: net.as_ref().map_or_else(String::new, RemoteChannels::name),
            doorbell: local.sleeper(),
            shared_page: local.shared_page(routes.places()),
            endpoint: local.home().map(|(endpoint, _)| endpoint),
        };
        let remote = net.map(|net| Remote { net, routes: Arc::default(), filling: Vec::new() });
        Self { info: Arc::new(info), routes, local, remote, local_queries: LocalQueries::default() }
    }

    /// Returns the facts about the group that do not change.
    #[inline]
    pub fn info(&self) -> &Arc<GroupInfo> {
        &self.info
    }

    /// Sends and receives what is ready between nodes; once before each progress pass. Returns true if it made progress.
    #[inline]
    pub fn poll(&mut self) -> bool {
        self.remote.as_mut().is_some_and(|remote| remote.net.poll())
    }

    /// Returns true if all data of operations that have ended here has left this process. Otherwise the group needs further polls.
    #[inline]
    pub fn is_flushed(&self) -> bool {
        self.remote.as_ref().is_none_or(|remote| !remote.net.busy())
    }

    /// Begins operation `seq`: allocates its memory and publishes its fingerprint. `false`: not yet, or the group has failed;
    /// [`super::Health::observe`] then finds the reason.
    ///
    /// `sources`: zero-copy sources of channels for which [`RoutedChannels::may_be_source`] holds, ascending. Their memory must remain
    /// unchanged until the operation ends. [`Self::send_slot`] returns that memory if the readers can read it, else an ordinary slot.
    ///
    /// `targets`: memory of channels with [`RoutedChannels::receives_in_place`] or [`RoutedChannels::may_be_target`].
    ///
    /// # Safety
    /// The memory of `targets` is valid for writes, and belongs to the operation until that ends or [`Self::release_user_buffers`] is
    /// called.
    #[inline]
    pub unsafe fn begin(
        &mut self,
        seq: u64,
        fingerprint: CallFingerprint,
        routed: &RoutedChannels,
        sources: &[ZeroCopySource],
        targets: impl Iterator<Item = RecvTarget>,
    ) -> bool {
        let begun = match (&mut self.remote, &routed.remote) {
            (Some(remote), Some(routes)) => {
                let begun = remote.begin(&mut self.local, seq, fingerprint, (&routed.local, sources), routes);
                if begun && !routed.unannounced {
                    remote.net.publish_begun();
                }
                begun
            }
            _ => self.local.begin(seq, fingerprint, &routed.local, sources),
        };
        if begun {
            targets.for_each(|target| self.set_recv_target(&target));
        }
        begun
    }

    /// Returns the next free slot of a send channel.
    #[inline]
    pub fn send_slot(&mut self, channel: usize) -> Option<*mut u8> {
        match &mut self.remote {
            None => self.local.send_slot(channel),
            Some(remote) => remote.send_slot(&mut self.local, channel),
        }
    }

    /// Publishes the next message of a send channel, of `bytes` bytes in its slot.
    #[inline]
    pub fn publish(&mut self, channel: usize, bytes: usize) {
        match &mut self.remote {
            None => self.local.publish(channel),
            Some(remote) => remote.publish(&mut self.local, channel, bytes),
        }
    }

    /// Publishes the next message of a send channel, of `bytes` bytes at `at`. The channel has
    /// [`RoutedChannels::sends_in_place`].
    ///
    /// # Safety
    /// The memory is valid for reads and remains unchanged until the operation ends or [`Self::release_user_buffers`] is called.
    #[inline]
    pub unsafe fn publish_in_place(&mut self, channel: usize, at: *const u8, bytes: usize) {
        let Some(remote) = &mut self.remote else { return self.local.publish(channel) };
        if let Some(net) = remote.routes.sends[channel].net {
            remote.net.publish_from(net, at, bytes);
        }
    }

    /// Sets a receive target of the operation just begun.
    fn set_recv_target(&mut self, &RecvTarget { channel, at, bytes, stride }: &RecvTarget) {
        let Some(remote) = &mut self.remote else {
            // SAFETY: `begin` requires that the memory belongs to the operation until that ends or the buffers are released. The owner
            // of the group reads no message of the operation afterwards.
            return unsafe { self.local.set_recv_target(channel, at, bytes, stride) };
        };
        match remote.routes.recvs[channel] {
            // SAFETY: as above.
            RecvRoute::Local(channel) => unsafe { self.local.set_recv_target(channel, at, bytes, stride) },
            RecvRoute::Remote(channel) => remote.net.recv_in_place(channel, at, bytes, stride),
        }
    }

    /// Releases the callers' memory of the operation and messages in progress, which end without completing.
    pub fn release_user_buffers(&mut self) {
        if let Some(remote) = &mut self.remote {
            remote.net.release_user_buffers();
        }
    }

    /// Adjusts addresses after the memory of the collective in progress has moved to `moved(address)`, with all received data.
    ///
    /// # Safety
    /// The rules of [`Self::begin`] and [`Self::publish_in_place`] apply to the new memory.
    pub unsafe fn relocate(&mut self, moved: &dyn Fn(*mut u8) -> *mut u8) {
        // SAFETY: the new memory follows the rules of `begin` for targets, as the old memory did.
        unsafe { self.local.relocate(moved) };
        if let Some(remote) = &mut self.remote {
            remote.net.relocate(moved);
        }
    }

    /// Returns the address of the next unread message of `recv_channel`.
    ///
    /// # Errors
    /// [`Mismatch`]: the writer made another call.
    #[inline]
    pub fn recv_slot(&mut self, recv_channel: usize) -> Result<Option<*const u8>, Mismatch> {
        let Some(remote) = &mut self.remote else { return self.local.recv_slot(recv_channel) };
        match remote.routes.recvs[recv_channel] {
            RecvRoute::Local(recv_channel) => {
                self.local.recv_slot(recv_channel).map_err(|found| self.routes.globally(found))
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
    ///
    /// # Errors
    /// [`Mismatch`]: a writer made another call.
    #[inline]
    pub fn settle(&mut self) -> Result<bool, Mismatch> {
        let Some(remote) = &mut self.remote else { return self.local.settle() };
        let here = self.local.settle().map_err(|found| self.routes.globally(found))?;
        Ok(here && remote.net.settle()?)
    }

    /// Ends the operation at this rank. Its memory is reused once its readers have finished. Returns the bytes that the operation has
    /// sent to ranks of other nodes.
    #[inline]
    pub fn end(&mut self) -> u64 {
        self.local.end();
        self.remote.as_mut().map_or(0, |remote| remote.net.end())
    }

    /// Returns true if the readers' caches are distant from this rank's: large slots are then faster with streaming stores.
    #[inline]
    pub fn has_distant_readers(&self) -> bool {
        self.local.has_distant_readers()
    }

    /// Notifies sleeping ranks of published data and sends queued announcements of messages, without polling for incoming data. Call
    /// it before this rank does other work.
    #[inline]
    pub fn flush(&mut self) {
        self.local.flush();
        if let Some(remote) = &mut self.remote {
            remote.net.flush();
        }
    }

    /// Aborts the group and reports `reason` to the other ranks, truncated to [`smddp_base::MAX_ABORT_REPORT`] bytes. Does not
    /// wait: call [`Self::poll`] until [`Self::is_abort_flushed`].
    pub fn abort(&mut self, reason: &str) {
        self.local.abort(reason);
        if let Some(remote) = &mut self.remote {
            remote.net.abort(reason, &self.routes.remote_ranks());
        }
    }

    /// Returns true if the abort reason has left this process.
    pub fn is_abort_flushed(&self) -> bool {
        self.remote.as_ref().is_none_or(|remote| remote.net.is_abort_flushed())
    }

    /// Leaves the group in good order. Returns true once everything has been sent, or the time limit has expired. Until then, the
    /// caller repeats the call and waits for [`Self::wait_sources`]. Does not block.
    pub fn leave(&mut self, now: Instant) -> bool {
        let is_over = self.remote.as_mut().is_none_or(|remote| remote.net.leave(now));
        if is_over {
            self.local.leave();
        }
        is_over
    }

    /// Adds the descriptors, with their poll events, that must end a sleep besides the doorbell. `false`: sleeps must be short.
    pub fn wait_sources(&self, fds: &mut Vec<(RawFd, i16)>) -> bool {
        self.remote.as_ref().is_none_or(|remote| remote.net.wait_sources(fds))
    }

    /// Makes the wire reserve room for `bytes` bytes in flight to one rank of another node.
    pub fn set_in_flight(&mut self, bytes: usize) {
        if let Some(remote) = &mut self.remote {
            remote.net.expect(bytes);
        }
    }
}

impl Routes {
    pub(super) fn globally(&self, found: Mismatch) -> Mismatch {
        Mismatch { rank: self.rank(found.rank), ..found }
    }

    pub(super) fn fault_globally(&self, fault: &mut Fault) {
        let (Fault::Lost { rank, .. }
        | Fault::Unreachable { rank, .. }
        | Fault::Left { rank }
        | Fault::Aborted { rank, .. }
        | Fault::Corrupted { rank, .. }
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
        // Data of the operation may have arrived already, but a group that is known to have failed must not make
        // progress.
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

    fn send_slot(&mut self, local: &mut LocalChannels, channel: usize) -> Option<*mut u8> {
        match self.routes.sends[channel] {
            SendRoute { shm: true, net: None } => local.send_slot(channel),
            SendRoute { shm: true, net: Some(net) } => {
                let (remote, local) = (self.net.free_slot(net)?, local.send_slot(channel)?);
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
            // SAFETY: `send_slot` returned both slots for this channel, with room for the message, and they are in different regions. The
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
            remote.net.leave_and_wait();
        }
    }
}
