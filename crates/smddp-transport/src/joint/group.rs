//! One rank's part in a group: memory that it shares with the ranks of its node, and a wire to those of other nodes.

use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::routes::{ChannelRoutes, RecvRoute, RoutedChannels, Routes, SendRoute};
use crate::net::channels::RemoteChannels;

use crate::process::{Sleeper, last_error, status};
use crate::shm::{LocalChannels, SharedPage, ZeroCopySource};
use crate::{CallFingerprint, Channels, Envelope, Fault, MessageId, MessageTransport, Mismatch};

/// What is said of a rank of another node whose process does not run.
const MUTE: &str = "does not answer, though its host does: its process is stopped, or has no time";

/// One rank's end of a communicator. It *lends cells*: a writer fills its next cell of a channel and publishes it, a reader
/// looks at it where it lies and releases it. Nothing here blocks but [`Group::straggler_query`] and [`Group::leave`]; what cannot be
/// done yet is `None` or `false`, never an error. One owner at a time.
pub struct Group {
    routes: Arc<Routes>,
    /// "rank 3 (host h1, pid 812)", by rank.
    names: Vec<String>,
    local: LocalChannels,
    /// What there is besides where ranks are on several nodes.
    remote: Option<Remote>,
}

struct Remote {
    net: RemoteChannels,
    /// Of the operation begun last.
    routes: Arc<ChannelRoutes>,
    /// The cell lent last, by channel, where a message goes both ways.
    lent: Vec<Option<(*mut u8, *mut u8)>>,
}

// SAFETY: `lent` holds addresses of cells that this group owns; one thread at a time owns the group.
unsafe impl Send for Remote {}

impl Group {
    pub(super) fn new(
        routes: Routes,
        names: Vec<String>,
        local: LocalChannels,
        net: Option<RemoteChannels>,
    ) -> Self {
        let remote = net.map(|net| Remote { net, routes: Arc::default(), lent: Vec::new() });
        Self { routes: Arc::new(routes), names, local, remote }
    }

    pub fn rank(&self) -> usize {
        self.routes.me
    }

    pub fn size(&self) -> usize {
        self.routes.size()
    }

    /// Payload that fits a slot. Slots reach the ranks of one node only.
    pub fn slot_bytes(&self) -> usize {
        if self.remote.is_none() { crate::shm::SLOT_BYTES } else { 0 }
    }

    /// What the ways of a call's channels depend on.
    pub fn routes(&self) -> &Arc<Routes> {
        &self.routes
    }

    pub fn wire(&self, channel_layout: Channels) -> RoutedChannels {
        self.routes.wire(&Arc::new(channel_layout))
    }

    /// Looks at what came in over wires that nobody watches otherwise; once before each round of looks.
    #[inline]
    pub fn turn(&mut self) -> bool {
        self.remote.as_mut().is_some_and(|remote| remote.net.turn())
    }

    /// Whether it has ranks on other nodes.
    pub fn spans_nodes(&self) -> bool {
        self.remote.is_some()
    }

    /// Sends what waits for a wire, without a look at what comes in.
    pub fn push(&mut self) {
        if let Some(remote) = &mut self.remote {
            remote.net.push();
        }
    }

    /// Whether something that this rank has finished with is still to be sent: then somebody has to go on driving.
    #[inline]
    pub fn busy(&self) -> bool {
        self.remote.as_ref().is_some_and(|remote| remote.net.busy())
    }

    /// Opens operation `seq`: takes what memory it needs and tells the others what it is. `false`: not yet, or not
    /// at all because of a fault (an operation that needs nothing of the others would not notice it otherwise).
    ///
    /// `stays`: messages that stay as they are until the operation is over, of outlets that [`RoutedChannels::may_stay`], ascending. Their cells
    /// are where they lie, if the others can read that; else they are as ever.
    #[inline]
    pub fn begin(
        &mut self,
        seq: u64,
        fingerprint: CallFingerprint,
        wired: &RoutedChannels,
        stays: &[ZeroCopySource],
    ) -> bool {
        match (&mut self.remote, &wired.remote) {
            (Some(remote), Some(routes)) => {
                let begun = remote.begin(&mut self.local, seq, fingerprint, (&wired.local, stays), routes);
                if begun && !wired.unannounced {
                    remote.net.tell_begun();
                }
                begun
            }
            _ => self.local.begin(seq, fingerprint, &wired.local, stays),
        }
    }

    /// Whether this process has symmetric memory, so that messages may lie there.
    #[inline]
    pub fn has_symmetric(&self) -> bool {
        self.local.has_symmetric()
    }

    /// My next free cell of outlet `channel`.
    #[inline]
    pub fn cell(&mut self, channel: usize) -> Option<*mut u8> {
        match &mut self.remote {
            None => self.local.cell(channel),
            Some(remote) => remote.cell(&mut self.local, channel),
        }
    }

    /// The cell filled last is a message of `bytes` now.
    #[inline]
    pub fn publish(&mut self, channel: usize, bytes: usize) {
        match &mut self.remote {
            None => self.local.publish(channel),
            Some(remote) => remote.publish(&mut self.local, channel, bytes),
        }
    }

    /// Instead: `bytes` at `payload`, which stay as they are until the operation is over or lets go. For an outlet that
    /// [`RoutedChannels::leaves_directly`].
    #[inline]
    pub fn publish_from(&mut self, channel: usize, payload: *const u8, bytes: usize) {
        if let Some(remote) = &mut self.remote
            && let Some(net) = remote.routes.outs[channel].net
        {
            remote.net.publish_from(net, payload, bytes);
        }
    }

    /// Messages of an inlet that [`RoutedChannels::arrives_directly`] come to lie one behind the other, `stride` bytes from one to the
    /// next, in `bytes` at `at`: memory of the operation just begun, until it is over or lets go.
    pub fn land(&mut self, recv_channel: usize, at: *mut u8, bytes: usize, stride: usize) {
        let Some(remote) = &mut self.remote else { return self.local.land(recv_channel, at, bytes, stride) };
        match remote.routes.ins[recv_channel] {
            RecvRoute::LocalChannels(recv_channel) => self.local.land(recv_channel, at, bytes, stride),
            RecvRoute::Remote(recv_channel) => remote.net.land(recv_channel, at, bytes, stride),
        }
    }

    /// The operation and the messages under way end without being over: their memory is the callers' again.
    pub fn release_user_buffers(&mut self) {
        if let Some(remote) = &mut self.remote {
            remote.net.release_user_buffers();
        }
    }

    /// The memory of the collective under way has moved to `moved(address)`, with all that has arrived in it.
    pub fn relocate(&mut self, moved: &dyn Fn(*mut u8) -> *mut u8) {
        self.local.relocate(moved);
        if let Some(remote) = &mut self.remote {
            remote.net.relocate(moved);
        }
    }

    /// The next unread message of inlet `recv_channel`, where it lies.
    #[inline]
    pub fn message(&mut self, recv_channel: usize) -> Result<Option<*const u8>, Mismatch> {
        let Some(remote) = &mut self.remote else { return self.local.message(recv_channel) };
        match remote.routes.ins[recv_channel] {
            RecvRoute::LocalChannels(recv_channel) => {
                self.local.message(recv_channel).map_err(|found| self.routes.globally(found))
            }
            RecvRoute::Remote(recv_channel) => remote.net.message(recv_channel),
        }
    }

    /// That message is read.
    #[inline]
    pub fn release(&mut self, recv_channel: usize) {
        let Some(remote) = &mut self.remote else { return self.local.release(recv_channel) };
        match remote.routes.ins[recv_channel] {
            RecvRoute::LocalChannels(recv_channel) => self.local.release(recv_channel),
            RecvRoute::Remote(recv_channel) => remote.net.release(recv_channel),
        }
    }

    /// Holds the headers of the writers that sent nothing here against mine, too; `false`: not all of them are there.
    #[inline]
    pub fn settle(&mut self) -> Result<bool, Mismatch> {
        let Some(remote) = &mut self.remote else { return self.local.settle() };
        let here = self.local.settle().map_err(|found| self.routes.globally(found))?;
        Ok(here && remote.net.settle()?)
    }

    /// The operation is over at this rank; its memory is reused when its readers are done.
    #[inline]
    pub fn end(&mut self) {
        self.local.end();
        if let Some(remote) = &mut self.remote {
            remote.net.end();
        }
    }

    /// Whether the readers' caches are far from this rank's: then large cells are better written past the caches.
    #[inline]
    pub fn remote(&self) -> bool {
        self.local.remote()
    }

    /// For tests: the readers' caches are taken for far ones, whatever is measured.
    pub fn assume_remote(&mut self) {
        self.local.assume_remote();
    }

    /// Wakes the ranks that sleep and should see what was published; called before this rank turns to other things.
    #[inline]
    pub fn flush(&mut self) {
        self.local.flush();
    }

    /// The wire, if it is what leads to that rank; or its place in this node.
    fn way_to(&self, rank: usize) -> Result<usize, &RemoteChannels> {
        match (self.routes.local_index(rank), &self.remote) {
            (None, Some(remote)) => Err(&remote.net),
            (local, _) => Ok(local.unwrap_or(rank)),
        }
    }

    /// Whether `rank` has begun operation `seq` (or a later one); `None`: not known.
    pub fn arrived(&self, rank: usize, seq: u64) -> Option<bool> {
        self.way_to(rank)
            .map_or_else(|net| net.arrived(rank, seq), |local| Some(self.local.arrived(local, seq)))
    }

    /// Whether operation `seq` cannot end here without `rank`, which is not known to have begun it.
    pub fn awaits(&self, rank: usize, seq: u64) -> bool {
        self.way_to(rank).map_or_else(|net| net.awaits(rank, seq), |local| !self.local.arrived(local, seq))
    }

    /// Whether operation `seq` cannot end here before `rank`, of another node, has taken what this one has for it.
    pub fn owes(&self, rank: usize, seq: u64) -> bool {
        self.way_to(rank).err().is_some_and(|net| net.owes(rank, seq))
    }

    /// Ranks of other nodes that the operation under way lacks something of here.
    pub fn lacking(&self) -> Vec<usize> {
        self.remote.as_ref().map_or_else(Vec::new, |remote| remote.net.lacking())
    }

    /// What `rank` says operation `seq` is, if it begun it and has not gone on far.
    pub fn fingerprint_of(&self, rank: usize, seq: u64) -> Option<CallFingerprint> {
        self.way_to(rank)
            .map_or_else(|net| net.fingerprint_of(rank, seq), |local| self.local.fingerprint_of(local, seq))
    }

    /// A deadline has passed: finds out within a few seconds which ranks have arrived, where that is not known; no longer
    /// than until another rank tells why the group is dead.
    pub fn straggler_query(&mut self) {
        let Some(remote) = &mut self.remote else { return };
        let (local, routes) = (&self.local, &self.routes);
        let mates = || (0..routes.size()).filter_map(|rank| routes.local_index(rank));
        remote.net.straggler_query(&routes.elsewhere(), |seq| mates().any(|mate| !local.arrived(mate, seq)));
    }

    /// The same for a few ranks, of which something else than an operation is waited for.
    pub fn straggler_query_of(&mut self, ranks: &[usize]) {
        let Some(remote) = &mut self.remote else { return };
        let peers: Vec<usize> =
            ranks.iter().copied().filter(|&rank| self.routes.local_index(rank).is_none()).collect();
        remote.net.survey_each(&peers);
    }

    /// Questions about this rank, in this process or from elsewhere, come with that number.
    pub fn about(&self, about: u64) {
        if let Some(remote) = &self.remote {
            remote.net.about(about);
        }
    }

    /// What `rank` does, in its own words: asked now where it shares this node, else what it said in the survey. `about`: the
    /// number of status about it. Empty where it said nothing. May take a second.
    pub fn doing(&self, rank: usize, about: u64) -> String {
        match self.way_to(rank) {
            Err(net) => net.doing(rank).to_owned(),
            Ok(local) => {
                let process = self.local.process(local);
                process.map_or_else(String::new, |one| status::activity(one, self.local.pid(local), about))
            }
        }
    }

    /// The last error of the process of `rank`, which names the one that had it, and how long ago that was; `None` if it had
    /// none, or is of another node and has not said goodbye.
    pub fn last_error(&self, rank: usize) -> Option<(Duration, String)> {
        if rank == self.rank() {
            return last_error::own();
        }
        self.way_to(rank).map_or_else(|net| net.last_error(rank), |local| self.local.last_error(local))
    }

    /// Ranks whose processes do not run, though their hosts do, and that in words: of other nodes, as the survey found them.
    pub fn stalled(&self) -> Vec<(usize, &'static str)> {
        let local = (0..self.routes.size()).filter(|&rank| {
            let pid = self.routes.local_index(rank).and_then(|local| self.local.pid(local));
            pid.is_some_and(status::is_stopped)
        });
        let remote = self.remote.iter().flat_map(|remote| remote.net.mute());
        local.map(|rank| (rank, status::STOPPED)).chain(remote.map(|rank| (rank, MUTE))).collect()
    }

    /// Ranks whose processes did not answer when they were asked so.
    pub fn silent(&self) -> Vec<usize> {
        self.remote.as_ref().map_or_else(Vec::new, |remote| remote.net.silent())
    }

    /// Messages with `rank`, and its number there.
    fn p2p<T>(&mut self, rank: usize, does: impl FnOnce(&mut dyn MessageTransport, usize) -> T) -> T {
        match (self.routes.local_index(rank), &mut self.remote) {
            (None, Some(remote)) => remote.net.p2p(|mail| does(mail, rank)),
            (local, _) => does(self.local.p2p(), local.unwrap_or(rank)),
        }
    }

    /// See [`MessageTransport`], of which these are the calls.
    pub fn p2p_open(&mut self, to: usize, what: Envelope) -> Option<MessageId> {
        self.p2p(to, |mail, to| mail.open(to, what))
    }

    pub fn p2p_cell(&mut self, to: usize, stream: MessageId) -> Option<(*mut u8, usize)> {
        self.p2p(to, |mail, _| mail.cell(stream))
    }

    pub fn p2p_lend(&mut self, to: usize, stream: MessageId, at: *const u8) -> bool {
        self.p2p(to, |mail, _| mail.lend(stream, at))
    }

    pub fn p2p_gone(&mut self, to: usize, stream: MessageId) -> bool {
        self.p2p(to, |mail, _| mail.gone(stream))
    }

    pub fn p2p_publish(&mut self, to: usize, stream: MessageId, bytes: usize) {
        self.p2p(to, |mail, _| mail.publish(stream, bytes));
    }

    pub fn p2p_close(&mut self, to: usize, stream: MessageId) {
        self.p2p(to, |mail, _| mail.close(stream));
    }

    pub fn p2p_next(&mut self, from: usize) -> Option<(Envelope, MessageId)> {
        self.p2p(from, |mail, from| mail.next(from))
    }

    pub fn p2p_land(&mut self, from: usize, stream: MessageId, at: *mut u8) -> bool {
        self.p2p(from, |mail, from| mail.land(from, stream, at))
    }

    pub fn p2p_landed(&mut self, from: usize, stream: MessageId) -> bool {
        self.p2p(from, |mail, from| mail.landed(from, stream))
    }

    pub fn p2p_piece(&mut self, from: usize, stream: MessageId) -> Option<(*const u8, usize)> {
        self.p2p(from, |mail, from| mail.piece(from, stream))
    }

    pub fn p2p_release(&mut self, from: usize, stream: MessageId) {
        self.p2p(from, |mail, from| mail.release(from, stream));
    }

    pub fn p2p_confirm(&mut self, from: usize) {
        self.p2p(from, |mail, from| mail.confirm(from));
    }

    pub fn p2p_is_confirmed(&mut self, to: usize) -> bool {
        self.p2p(to, |mail, to| mail.is_confirmed(to))
    }

    /// Whether `rank` is in this node.
    pub fn is_local(&self, rank: usize) -> bool {
        self.way_to(rank).is_ok()
    }

    /// Tells `rank`, if it is of another node, that this one has no message for it any more, though it is still here.
    pub fn p2p_last(&mut self, rank: usize) {
        if self.routes.local_index(rank).is_none()
            && let Some(remote) = &mut self.remote
        {
            remote.net.p2p_last(rank);
        }
    }

    /// Whether `rank`, of another node, has said that no message of it is still to come, though what it called for may be.
    pub fn p2p_over(&self, rank: usize) -> bool {
        self.way_to(rank).is_err_and(|net| net.p2p_over(rank))
    }

    /// Anybody who is gone, left or declared the group dead. Called while this rank waits: the ranks that it waits for
    /// are looked after from `now` on, if they were not before.
    pub fn faults(&mut self, now: Instant) -> Vec<Fault> {
        let mut faults = self.local.faults();
        if let Some(remote) = &mut self.remote {
            faults.iter_mut().for_each(|fault| self.routes.fault_globally(fault));
            faults.extend(remote.net.faults(now));
        }
        faults
    }

    /// Whether that rank, which declared the group dead, had ended operation `seq` before.
    pub fn failed_after(&self, rank: usize, seq: u64) -> bool {
        self.way_to(rank)
            .map_or_else(|net| net.failed_after(rank, seq), |local| self.local.arrived(local, seq + 1))
    }

    /// Ranks that this one waits for elsewhere than in this group: their deaths are noticed from `now` on, too, if this is
    /// called again and again.
    pub fn look_after(&mut self, ranks: &[usize], now: Instant) {
        let Some(remote) = &mut self.remote else { return };
        let elsewhere = ranks.iter().filter(|&&rank| self.routes.local_index(rank).is_none());
        elsewhere.for_each(|&rank| remote.net.look_after(rank, now));
    }

    /// Tells the others that this group is dead and why, in [`crate::MAX_ABORT_REPORT`] bytes; more is cut off.
    pub fn abort(&mut self, reason: &str) {
        self.local.abort(reason);
        if let Some(remote) = &mut self.remote {
            remote.net.abort(reason, &self.routes.elsewhere());
        }
    }

    /// Leaves in good order.
    pub fn leave(&mut self) {
        if let Some(remote) = &mut self.remote {
            remote.net.leave();
        }
        self.local.leave();
    }

    /// "rank 3 (host h1, pid 812)".
    pub fn describe(&self, rank: usize) -> String {
        self.names.get(rank).cloned().unwrap_or_else(|| format!("rank {rank}"))
    }

    /// Descriptors that end a sleep besides the bell, with their poll events; false: nobody may sleep long.
    pub fn interest(&self, fds: &mut Vec<(RawFd, i16)>) -> bool {
        self.remote.as_ref().is_none_or(|remote| remote.net.interest(fds))
    }

    /// Bytes of collectives that this rank has sent to ranks of other nodes.
    pub fn crossed(&self) -> u64 {
        self.remote.as_ref().map_or(0, |remote| remote.net.crossed())
    }

    /// How ranks of other nodes are reached; empty where there are none.
    pub fn way(&self) -> String {
        self.remote.as_ref().map_or_else(String::new, |remote| remote.net.name())
    }

    /// Ranks of other nodes that do not acknowledge what is sent to them, and the largest payload of a packet to them, in bytes.
    pub fn unacknowledged(&self) -> Vec<(usize, u32)> {
        self.remote.as_ref().map_or_else(Vec::new, |remote| remote.net.unacknowledged())
    }

    /// The way to `rank` as this process's kernel sees it, once something has gone there and back; `None` where no kernel
    /// does.
    pub fn round_trip(&self, rank: usize) -> Option<Duration> {
        self.remote.as_ref()?.net.round_trip(rank)
    }

    /// So many bytes may be on their way to one rank of another node: the wire is to have room for them.
    pub fn expect(&mut self, bytes: usize) {
        if let Some(remote) = &mut self.remote {
            remote.net.expect(bytes);
        }
    }

    /// What the ranks of this node share besides messages; `None` in a group of one rank.
    pub fn shared_page(&self) -> Option<Arc<SharedPage>> {
        self.local.shared_page(self.routes.places())
    }

    /// The bell that rings where something comes in, for any thread.
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
        | Fault::Unable { rank, .. }
        | Fault::Left { rank }
        | Fault::Poisoned { rank, .. }
        | Fault::Differs { found: Mismatch { rank, .. }, .. }) = fault;
        *rank = self.rank(*rank);
    }
}

impl Remote {
    fn begin(
        &mut self,
        local: &mut LocalChannels,
        seq: u64,
        fingerprint: CallFingerprint,
        (channel_layout, stays): (&Arc<Channels>, &[ZeroCopySource]),
        routes: &Arc<ChannelRoutes>,
    ) -> bool {
        // All that it needs may be here already; a group that is known to be dead does nothing more.
        if self.net.differs() || self.net.troubled(seq) {
            return false;
        }
        if !Arc::ptr_eq(&self.routes, routes) {
            self.net.wire_up(&routes.net);
            self.lent.clear();
            self.lent.resize(routes.outs.len(), None);
            self.routes = routes.clone();
        }
        if !self.net.reserve() || !local.begin(seq, fingerprint, channel_layout, stays) {
            return false;
        }
        self.net.begin(seq, fingerprint);
        true
    }

    fn cell(&mut self, local: &mut LocalChannels, channel: usize) -> Option<*mut u8> {
        match self.routes.outs[channel] {
            SendRoute { shm: true, net: None } => local.cell(channel),
            SendRoute { shm: true, net: Some(net) } => {
                let (remote, local) = (self.net.cell(net)?, local.cell(channel)?);
                self.lent[channel] = Some((local, remote));
                Some(local)
            }
            SendRoute { net: Some(net), .. } => self.net.cell(net),
            SendRoute { .. } => None,
        }
    }

    fn publish(&mut self, local: &mut LocalChannels, channel: usize, bytes: usize) {
        let SendRoute { shm, net } = self.routes.outs[channel];
        if let Some((local, remote)) = self.lent[channel].take() {
            // SAFETY: both cells are this channel's, lent by `cell`, with room for the message; they lie in different
            // regions. The owner of this group has written `bytes` to the first.
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
        // A forked child's copy: connections are the parent's.
        if self.local.ours()
            && let Some(remote) = &mut self.remote
        {
            remote.net.leave();
        }
    }
}
