//! Receive channels of a rank: location and consumption of messages in their writers' memory.

use smddp_base::{CallFingerprint, Fault, Mismatch};
use smddp_process::layout::*;
use smddp_process::single_copy;

use super::super::channel_table::Channel;
use super::super::local_ranks::malformed;
use super::LocalChannels;

/// Receive channel of the operation in progress. It is resolved once its writer's header has been read.
#[derive(Clone, Copy, Default)]
pub(super) struct LocalRecv {
    pub(super) resolved: bool,
    pub(super) at: Channel,
    /// Number of messages that this rank has released.
    pub(super) taken: u64,
    /// Number of messages that are known to be published.
    pub(super) published: u64,
    /// Set if this rank must publish the number of messages that it has read.
    pub(super) ack: bool,
    /// Number of messages that the kernel has read from the writer's memory.
    pub(super) fetched: u64,
}

impl LocalChannels {
    /// Reads the writer's header and locates the channel. Returns false if the header is not published yet.
    pub(super) fn resolve(&mut self, recv_channel: usize) -> Result<bool, Mismatch> {
        let want = self.channel_layout.recv_channels[recv_channel];
        let peer = &self.ranks.peers[want.rank];
        let Some((call, count, stage)) = peer.header(self.layout, self.seq).read(self.seq) else {
            return Ok(false);
        };
        self.begun[want.rank] = self.seq + 1;
        let theirs = CallFingerprint { call, count };
        if theirs != self.fingerprint {
            return Err(Mismatch { rank: want.rank, theirs, bytes: None });
        }
        let found = if self.channel_layout.inline {
            let slots = peer.block + header_at(self.layout, self.seq) + HEADER_FIELDS;
            let at = Channel { slots, slot_bytes: HEADER_PAYLOAD_BYTES, depth: 1, ..Channel::default() };
            LocalRecv { resolved: true, at, published: 1, ..LocalRecv::default() }
        } else {
            let memory = peer.memory();
            let region = stage as usize;
            // A writer without a region sends nothing on this channel.
            let at =
                if region == 0 { Some(Channel::default()) } else { Channel::read(memory, region, &want) };
            let Some(at) = at else {
                self.peer_fault.get_or_insert_with(|| malformed(want.rank, "location of a channel"));
                return Ok(false);
            };
            if at.bytes != want.bytes {
                return Err(Mismatch { rank: want.rank, theirs, bytes: Some((want.bytes, at.bytes)) });
            }
            // The same payload in smaller slots, or without slots: the writer splits it differently.
            if want.messages > 0 && (at.slot_bytes < want.slot_bytes || at.depth == 0) {
                return Err(Mismatch { rank: want.rank, theirs, bytes: None });
            }
            let ack = at.acks || want.messages > at.depth;
            LocalRecv { resolved: true, at, ack, ..LocalRecv::default() }
        };
        self.recvs[recv_channel] = found;
        Ok(true)
    }

    /// Returns the address of the next unread message of a receive channel. `None`: not yet, or its memory cannot be read.
    ///
    /// # Errors
    /// The writer made a different call.
    pub fn recv_slot(&mut self, recv_channel: usize) -> Result<Option<*const u8>, Mismatch> {
        if !self.recvs[recv_channel].resolved && !self.resolve(recv_channel)? {
            self.count_idle_poll();
            return Ok(None);
        }
        let memory = self.ranks.peers[self.channel_layout.recv_channels[recv_channel].rank].memory();
        let found = &mut self.recvs[recv_channel];
        if found.taken >= found.published {
            found.published = memory.counter(found.at.lines).read();
            if found.taken >= found.published {
                self.count_idle_poll();
                return Ok(None);
            }
        }
        if found.at.is_address {
            return Ok(self.fetch(recv_channel));
        }
        Ok(Some(memory.at(
            found.at.slots + (found.taken % found.at.depth) as usize * found.at.slot_bytes,
            found.at.slot_bytes,
        )))
    }

    /// Sets the receive target of a channel whose messages the kernel reads: `bytes` bytes at `at`, with `stride` bytes from one
    /// message to the next. The target belongs to the operation just begun.
    ///
    /// # Safety
    /// These bytes are writable memory. It remains valid, and only this channel writes to it, until the last [`Self::recv_slot`] of
    /// this channel in this operation, or until [`Self::relocate`] replaces the address.
    pub unsafe fn set_recv_target(&mut self, recv_channel: usize, at: *mut u8, bytes: usize, stride: usize) {
        self.recv_targets.set(recv_channel, at, bytes, stride);
    }

    /// Adjusts the receive targets after the memory of the collective in progress has moved.
    ///
    /// # Safety
    /// The contract of [`Self::set_recv_target`] holds for each receive target at the address that `moved` returns for its address.
    pub unsafe fn relocate(&mut self, moved: &dyn Fn(*mut u8) -> *mut u8) {
        self.recv_targets.relocate(moved);
    }

    /// Reads the next message of a channel whose writer sends from memory that is not shared. `None` if the read failed.
    fn fetch(&mut self, recv_channel: usize) -> Option<*const u8> {
        let LocalRecv { at, taken, fetched, .. } = self.recvs[recv_channel];
        let want = self.channel_layout.recv_channels[recv_channel];
        let first = usize::try_from(taken).ok()?.checked_mul(at.slot_bytes)?;
        // `resolve` has compared the payload size of the writer with the expected one. The last message may be shorter.
        let bytes = usize::try_from(want.bytes).ok()?.checked_sub(first)?.min(at.slot_bytes);
        let to = self.recv_targets.address_of(recv_channel, at.slot_bytes, first, bytes);
        if fetched <= taken {
            let peer = &self.ranks.peers[want.rank];
            // SAFETY: `to` has room for the message. It is in the receive target, which is valid by the contracts of `set_recv_target` and
            // `relocate`, or it is the buffer of this channel. Only this channel writes there.
            let read = peer
                .readable_pid()
                .map(|pid| unsafe { single_copy::read(pid, at.slots.wrapping_add(first), to, bytes) });
            match read {
                Some(Ok(())) => self.recvs[recv_channel].fetched = taken + 1,
                // The writer aborted or died, which `faults` reports.
                _ if peer.state() & ABORTED != 0 || peer.is_dead() => return None,
                Some(Err(error)) if error.raw_os_error() == Some(libc::ESRCH) => return None,
                found => {
                    let reason = found
                        .and_then(Result::err)
                        .map_or_else(|| "not permitted".to_owned(), |error| error.to_string());
                    let how = format!(
                        "it sends from memory that cannot be read here ({reason}); set SMDDP_SINGLE_COPY=0 to disable single copy"
                    );
                    self.peer_fault.get_or_insert(Fault::Unreachable { rank: want.rank, reason: how });
                    return None;
                }
            }
        }
        Some(to)
    }

    /// Releases the message that [`Self::recv_slot`] returned last.
    pub fn release(&mut self, recv_channel: usize) {
        let want = self.channel_layout.recv_channels[recv_channel];
        let found = &mut self.recvs[recv_channel];
        found.taken += 1;
        // Zero-copy messages were read from the writer's own memory, whose content is guaranteed only while the writer is healthy.
        let peer = &self.ranks.peers[want.rank];
        if found.at.acks && !peer.is_healthy() {
            self.corrupted = true;
            // After an abort `faults` reports the reason of the writer.
            if peer.state() & ABORTED == 0 {
                let how = "ended its call before this rank had read its memory".to_owned();
                self.peer_fault.get_or_insert(Fault::Lost { rank: want.rank, how });
            }
            return;
        }
        if found.ack {
            peer.memory().counter(found.at.lines + LINE * (1 + want.reader)).publish(found.taken);
            self.ranks.notify(want.rank);
        }
    }
}
