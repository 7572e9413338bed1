//! The channels that a rank reads: where their writers say that messages lie, and how those are taken.

use super::super::cells::Channel;
use super::super::local_ranks::nonsense;
use super::LocalChannels;
use crate::process::layout::*;
use crate::process::single_copy;
use crate::{CallFingerprint, Fault, Mismatch};

/// A channel I read, in the operation under way; resolved when its writer's header is seen.
#[derive(Clone, Copy, Default)]
pub(super) struct LocalRecv {
    pub(super) resolved: bool,
    pub(super) at: Channel,
    pub(super) taken: u64,
    /// Messages that are known to be published.
    pub(super) there: u64,
    pub(super) ack: bool,
    /// Messages that were read by the kernel.
    pub(super) fetched: u64,
}

impl LocalChannels {
    /// Looks for the writer's header and finds the channel's place.
    pub(super) fn resolve(&mut self, recv_channel: usize) -> Result<bool, Mismatch> {
        let want = self.channel_layout.recv_channels[recv_channel];
        let remote = &self.ranks.remotes[want.rank];
        let Some((what, count, stage)) = remote.slot(self.layout, self.seq).read(self.seq) else {
            return Ok(false);
        };
        self.begun[want.rank] = self.seq + 1;
        let theirs = CallFingerprint { what, count };
        if theirs != self.fingerprint {
            return Err(Mismatch { rank: want.rank, theirs, bytes: None });
        }
        let found = if self.channel_layout.inline {
            let cells = remote.block + slot_at(self.layout, self.seq) + SLOT_HEADER;
            let at = Channel { cells, cell: SLOT_BYTES, depth: 1, ..Channel::default() };
            LocalRecv { resolved: true, at, there: 1, ..LocalRecv::default() }
        } else {
            let memory = remote.memory();
            let region = stage as usize;
            // Without a region nothing comes at all.
            let at =
                if region == 0 { Some(Channel::default()) } else { Channel::read(memory, region, &want) };
            let Some(at) = at else {
                self.nonsense.get_or_insert_with(|| nonsense(want.rank, "where its messages lie"));
                return Ok(false);
            };
            if at.bytes != want.bytes {
                return Err(Mismatch { rank: want.rank, theirs, bytes: Some((want.bytes, at.bytes)) });
            }
            // The same bytes in smaller cells, or in none: it cuts them in another way.
            if want.messages > 0 && (at.cell < want.cell || at.depth == 0) {
                return Err(Mismatch { rank: want.rank, theirs, bytes: None });
            }
            let ack = at.acks || want.messages > at.depth;
            LocalRecv { resolved: true, at, ack, ..LocalRecv::default() }
        };
        self.ins[recv_channel] = found;
        Ok(true)
    }

    pub fn message(&mut self, recv_channel: usize) -> Result<Option<*const u8>, Mismatch> {
        if !self.ins[recv_channel].resolved && !self.resolve(recv_channel)? {
            self.look_in_vain();
            return Ok(None);
        }
        let memory = self.ranks.remotes[self.channel_layout.recv_channels[recv_channel].rank].memory();
        let found = &mut self.ins[recv_channel];
        if found.taken >= found.there {
            found.there = memory.counter(found.at.lines).read();
            if found.taken >= found.there {
                self.look_in_vain();
                return Ok(None);
            }
        }
        if found.at.foreign {
            return Ok(self.fetch(recv_channel));
        }
        Ok(Some(
            memory
                .at(found.at.cells + (found.taken % found.at.depth) as usize * found.at.cell, found.at.cell),
        ))
    }

    /// Messages of that inlet come to lie one behind the other, `stride` bytes from one to the next, in `bytes` at `at`, if the kernel
    /// reads them: memory of the operation just begun, until it is over.
    pub(crate) fn land(&mut self, recv_channel: usize, at: *mut u8, bytes: usize, stride: usize) {
        self.recv_targets.name(recv_channel, at, bytes, stride);
    }

    /// The memory of the collective under way has moved.
    pub(crate) fn relocate(&mut self, moved: &dyn Fn(*mut u8) -> *mut u8) {
        self.recv_targets.relocate(moved);
    }

    /// The next message of an inlet whose writer does not share what it sends; `None` once it cannot be had.
    fn fetch(&mut self, recv_channel: usize) -> Option<*const u8> {
        let LocalRecv { at, taken, fetched, .. } = self.ins[recv_channel];
        let want = self.channel_layout.recv_channels[recv_channel];
        let first = usize::try_from(taken).ok()?.checked_mul(at.cell)?;
        // What its writer says is as long as it was to be (see `resolve`); the last message may be shorter.
        let bytes = usize::try_from(want.bytes).ok()?.checked_sub(first)?.min(at.cell);
        let to = self.recv_targets.place(recv_channel, at.cell, first, bytes);
        if fetched <= taken {
            let remote = &self.ranks.remotes[want.rank];
            // SAFETY: either the place that the owner of the operation named for these bytes, which nobody else touches until it is
            // over, or this inlet's own memory, as long as the message.
            let read = remote
                .readable()
                .map(|pid| unsafe { single_copy::read(pid, at.cells.wrapping_add(first), to, bytes) });
            match read {
                Some(Ok(())) => self.ins[recv_channel].fetched = taken + 1,
                // It gave up, or died, which is told elsewhere.
                _ if remote.state() & ABORTED != 0 || remote.dead() => return None,
                Some(Err(error)) if error.raw_os_error() == Some(libc::ESRCH) => return None,
                found => {
                    let reason = found
                        .and_then(Result::err)
                        .map_or_else(|| "not permitted".to_owned(), |error| error.to_string());
                    let how = format!(
                        "it sends from memory that cannot be read here ({reason}); SMDDP_SINGLE_COPY=0 does without"
                    );
                    self.nonsense.get_or_insert(Fault::Unable { rank: want.rank, reason: how });
                    return None;
                }
            }
        }
        Some(to)
    }

    pub fn release(&mut self, recv_channel: usize) {
        let want = self.channel_layout.recv_channels[recv_channel];
        let found = &mut self.ins[recv_channel];
        found.taken += 1;
        // Its writer's own memory is what was read, if that was still as it had been then.
        let remote = &self.ranks.remotes[want.rank];
        if found.at.acks && !remote.sound() {
            self.spoiled = true;
            // One that says why the group is dead is asked for that.
            if remote.state() & ABORTED == 0 {
                let how = "ended its call before this rank had read its memory".to_owned();
                self.nonsense.get_or_insert(Fault::Lost { rank: want.rank, how });
            }
            return;
        }
        if found.ack {
            remote.memory().counter(found.at.lines + LINE * (1 + want.reader)).publish(found.taken);
            self.ranks.ring(want.rank);
        }
    }
}
