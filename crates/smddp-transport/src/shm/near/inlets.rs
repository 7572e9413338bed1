//! The channels that a rank reads: where their writers say that messages lie, and how those are taken.

use super::super::channel::Channel;
use super::super::ranks::nonsense;
use super::Near;
use crate::process::foreign;
use crate::process::layout::*;
use crate::{Fault, Head, Mismatch};

/// A channel I read, in the operation under way; resolved when its writer's header is seen.
#[derive(Clone, Copy, Default)]
pub(super) struct NearInlet {
    pub(super) resolved: bool,
    pub(super) at: Channel,
    pub(super) taken: u64,
    /// Messages that are known to be published.
    pub(super) there: u64,
    pub(super) ack: bool,
    /// Messages that were read by the kernel.
    pub(super) fetched: u64,
}

impl Near {
    /// Looks for the writer's header and finds the channel's place.
    pub(super) fn resolve(&mut self, inlet: usize) -> Result<bool, Mismatch> {
        let want = self.wiring.inlets[inlet];
        let remote = &self.ranks.remotes[want.rank];
        let Some((what, count, stage)) = remote.slot(self.layout, self.seq).read(self.seq) else {
            return Ok(false);
        };
        self.begun[want.rank] = self.seq + 1;
        let theirs = Head { what, count };
        if theirs != self.head {
            return Err(Mismatch { rank: want.rank, theirs, bytes: None });
        }
        let found = if self.wiring.inline {
            let cells = remote.block + slot_at(self.layout, self.seq) + SLOT_HEADER;
            let at = Channel { cells, cell: SLOT_BYTES, depth: 1, ..Channel::default() };
            NearInlet { resolved: true, at, there: 1, ..NearInlet::default() }
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
            NearInlet { resolved: true, at, ack, ..NearInlet::default() }
        };
        self.ins[inlet] = found;
        Ok(true)
    }

    pub fn message(&mut self, inlet: usize) -> Result<Option<*const u8>, Mismatch> {
        if !self.ins[inlet].resolved && !self.resolve(inlet)? {
            self.look_in_vain();
            return Ok(None);
        }
        let memory = self.ranks.remotes[self.wiring.inlets[inlet].rank].memory();
        let found = &mut self.ins[inlet];
        if found.taken >= found.there {
            found.there = memory.count(found.at.lines).told();
            if found.taken >= found.there {
                self.look_in_vain();
                return Ok(None);
            }
        }
        if found.at.foreign {
            return Ok(self.fetch(inlet));
        }
        Ok(Some(
            memory
                .at(found.at.cells + (found.taken % found.at.depth) as usize * found.at.cell, found.at.cell),
        ))
    }

    /// Messages of that inlet come to lie one behind the other, `stride` bytes from one to the next, in `bytes` at `at`, if the kernel
    /// reads them: memory of the operation just begun, until it is over.
    pub(crate) fn land(&mut self, inlet: usize, at: *mut u8, bytes: usize, stride: usize) {
        self.landings.name(inlet, at, bytes, stride);
    }

    /// The memory of the collective under way has moved.
    pub(crate) fn relocate(&mut self, moved: &dyn Fn(*mut u8) -> *mut u8) {
        self.landings.relocate(moved);
    }

    /// The next message of an inlet whose writer does not share what it sends; `None` once it cannot be had.
    fn fetch(&mut self, inlet: usize) -> Option<*const u8> {
        let NearInlet { at, taken, fetched, .. } = self.ins[inlet];
        let want = self.wiring.inlets[inlet];
        let first = usize::try_from(taken).ok()?.checked_mul(at.cell)?;
        // What its writer says is as long as it was to be (see `resolve`); the last message may be shorter.
        let bytes = usize::try_from(want.bytes).ok()?.checked_sub(first)?.min(at.cell);
        let to = self.landings.place(inlet, at.cell, first, bytes);
        if fetched <= taken {
            let remote = &self.ranks.remotes[want.rank];
            // SAFETY: either the place that the owner of the operation named for these bytes, which nobody else touches until it is
            // over, or this inlet's own memory, as long as the message.
            let read = remote
                .readable()
                .map(|pid| unsafe { foreign::read(pid, at.cells.wrapping_add(first), to, bytes) });
            match read {
                Some(Ok(())) => self.ins[inlet].fetched = taken + 1,
                // It gave up, or died, which is told elsewhere.
                _ if remote.state() & POISONED != 0 || remote.dead() => return None,
                Some(Err(error)) if error.raw_os_error() == Some(libc::ESRCH) => return None,
                found => {
                    let why = found
                        .and_then(Result::err)
                        .map_or_else(|| "not permitted".to_owned(), |error| error.to_string());
                    let how = format!(
                        "it sends from memory that cannot be read here ({why}); SMDDP_SINGLE_COPY=0 does without"
                    );
                    self.nonsense.get_or_insert(Fault::Unable { rank: want.rank, why: how });
                    return None;
                }
            }
        }
        Some(to)
    }

    pub fn release(&mut self, inlet: usize) {
        let want = self.wiring.inlets[inlet];
        let found = &mut self.ins[inlet];
        found.taken += 1;
        // Its writer's own memory is what was read, if that was still as it had been then.
        let remote = &self.ranks.remotes[want.rank];
        if found.at.acks && !remote.sound() {
            self.spoiled = true;
            // One that says why the group is dead is asked for that.
            if remote.state() & POISONED == 0 {
                let how = "ended its call before this rank had read its memory".to_owned();
                self.nonsense.get_or_insert(Fault::Lost { rank: want.rank, how });
            }
            return;
        }
        if found.ack {
            remote.memory().count(found.at.lines + LINE * (1 + want.reader)).tell(found.taken);
            self.ranks.ring(want.rank);
        }
    }
}
