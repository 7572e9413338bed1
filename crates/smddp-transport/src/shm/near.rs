//! The near half of a group: one rank's end of what the ranks of a node have in shared memory. Ranks are numbered by their
//! places in the node.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::time::{Duration, Instant};

use super::board::Board;
use super::channel::Channel;
use super::distance::Distance;
use super::landing::Landings;
use super::messages::NearMessages;
use super::ranks::{AllDone, Home, Ranks, nonsense};
use crate::fork;
use crate::process::foreign;
use crate::process::layout::*;
use crate::process::memory::Memory;
use crate::process::order::Slot;
use crate::process::{Endpoint, Region, SingleCopy, Sleeper};
use crate::{Fault, Head, LONGEST_WHY, Mismatch, Outlet, PointToPoint, Wiring};

/// An outlet whose messages stay where they lie, one behind the other, `stride` bytes from one to the next: its readers take them from
/// there, and the operation is over when they have.
#[derive(Clone, Copy, Debug)]
pub struct Stay {
    pub channel: usize,
    pub at: *const u8,
    pub stride: usize,
    /// Whether they do where that is not this process's symmetric memory.
    pub single_copy: SingleCopy,
}

/// Where an outlet's messages stay.
enum Place {
    /// Offset in this process's memory.
    Symmetric(usize),
    /// Address.
    Foreign(usize),
}

/// A channel I write, in the operation under way.
struct NearOutlet {
    lines: usize,
    cells: usize,
    cell: usize,
    depth: u64,
    sent: u64,
    /// Fewest messages that all readers are known to have read.
    read: u64,
    readers: usize,
    messages: u64,
    /// The caller's own memory.
    stays: bool,
    /// `cells` is an address.
    foreign: bool,
}

impl NearOutlet {
    /// Messages that all its readers have read, as far as they say.
    fn read_by_all(&self, memory: &Memory) -> u64 {
        let read = (1..=self.readers).map(|reader| memory.count(self.lines + LINE * reader).told());
        read.min().unwrap_or(u64::MAX)
    }
}

/// A channel I read, in the operation under way; resolved when its writer's header is seen.
#[derive(Clone, Copy, Default)]
struct NearInlet {
    resolved: bool,
    at: Channel,
    taken: u64,
    /// Messages that are known to be published.
    there: u64,
    ack: bool,
    /// Messages that were read by the kernel.
    fetched: u64,
}

/// An operation that is over here and read nobody's header: held against the others' when the next one begins.
/// Whichever of two ranks comes later finds the other's header there.
struct Unchecked {
    seq: u64,
    head: Head,
    rank: usize,
}

const LOOKS_BEFORE_RINGING: u32 = 8;
/// Cells from which the distance is measured, at one message of so many.
const MEASURED: usize = 8 << 10;
const MEASURED_EVERY: u32 = 4;

pub struct Near {
    /// A group of one rank has none.
    home: Option<Home>,
    pub(super) ranks: Arc<Ranks>,
    me: usize,
    size: usize,
    /// Of the home, or 0.
    layout: usize,
    block: usize,
    /// Per rank: operations it is known to have begun.
    begun: Vec<u64>,
    seq: u64,
    head: Head,
    region: Option<Region>,
    outs: Vec<NearOutlet>,
    ins: Vec<NearInlet>,
    landings: Landings,
    /// Of the operation begun last.
    wiring: Arc<Wiring>,
    unheld: Vec<Unchecked>,
    differs: Option<Fault>,
    /// A rank whose words make no sense.
    nonsense: Option<Fault>,
    /// Something was read that may not have been the message any more: what is under way cannot end well.
    spoiled: bool,
    /// Somebody may sleep who should see what was published.
    owed: bool,
    /// Looks in vain since.
    vain: u32,
    distance: Distance,
    /// Messages of large cells.
    large: u32,
    messages: NearMessages,
    left: bool,
    /// Devices know this group's pages.
    kept: Arc<AtomicBool>,
    forks: u32,
}

impl Near {
    pub(super) fn new(home: Option<Home>, ranks: Ranks) -> Self {
        let (me, size, ranks) = (ranks.me, ranks.remotes.len().max(1), Arc::new(ranks));
        if let Some(home) = &home
            && ranks.remotes.iter().all(|remote| remote.readable().is_some())
        {
            home.endpoint.memory.word32(home.block + STATE).fetch_or(READS, Ordering::Release);
        }
        Self {
            me,
            size,
            layout: home.as_ref().map_or(1, |home| home.size),
            block: home.as_ref().map_or(0, |home| home.block),
            begun: vec![0; size],
            seq: 0,
            head: Head::default(),
            region: None,
            outs: Vec::new(),
            ins: Vec::new(),
            landings: Landings::default(),
            wiring: Arc::default(),
            unheld: Vec::new(),
            differs: None,
            nonsense: None,
            spoiled: false,
            owed: false,
            vain: 0,
            distance: Distance::default(),
            large: 0,
            messages: NearMessages::new(home.clone(), ranks.clone()),
            left: false,
            kept: Arc::default(),
            forks: fork::generation(),
            home,
            ranks,
        }
    }

    /// The process's endpoint, and this group's number there.
    pub(crate) fn home(&self) -> Option<(Arc<Endpoint>, u64)> {
        self.home.as_ref().map(|home| (home.endpoint.clone(), home.nonce))
    }

    /// Whether this process has symmetric memory.
    #[inline]
    pub(crate) fn has_symmetric(&self) -> bool {
        self.home.as_ref().is_some_and(|home| home.endpoint.symmetric.in_use())
    }

    /// Where this rank's control block lies.
    #[cfg(test)]
    pub(super) fn block(&self) -> usize {
        self.block
    }

    /// False in a forked child, whose copy this is.
    pub(crate) fn ours(&self) -> bool {
        self.forks == fork::generation()
    }

    fn slot(&self, seq: u64) -> usize {
        self.block + slot_at(self.layout, seq)
    }

    /// Nothing there yet. After a few looks whoever sleeps is woken: waking costs a full barrier, and ranks that are
    /// on time are all awake.
    fn look_in_vain(&mut self) {
        self.vain += 1;
        if self.owed && self.vain > LOOKS_BEFORE_RINGING {
            self.flush();
        }
    }

    /// Something was published: sleepers are to be woken, though not before this rank has nothing better to do.
    fn owe(&mut self) {
        self.owed = true;
        self.vain = 0;
    }

    /// Whether everybody has finished with the operation whose slot `seq` takes over.
    fn slot_free(&mut self, seq: u64) -> bool {
        let Some(before) = (seq + 1).checked_sub(SLOTS) else { return true };
        for rank in 0..self.size {
            if rank == self.me || self.begun[rank] > before {
                continue;
            }
            let remote = &self.ranks.remotes[rank];
            let tag = remote.slot(self.layout, before).tag().told();
            if tag > before {
                self.begun[rank] = tag;
            } else if remote.done().told() < before && !remote.finished() {
                return false;
            }
        }
        true
    }

    /// Whether somebody is gone or says that the group is dead.
    fn troubled(&self, seq: u64) -> bool {
        self.ranks.remotes.iter().enumerate().any(|(rank, remote)| {
            rank != self.me && (remote.state() & POISONED != 0 || remote.dead() && !self.arrived(rank, seq))
        })
    }

    /// Looks at the headers that nothing was read from; false where one is of another call.
    fn hold(&mut self) -> bool {
        let (ranks, size, differs) = (&self.ranks, self.layout, &mut self.differs);
        self.unheld.retain(|unheld| {
            let remote = &ranks.remotes[unheld.rank];
            let (tag, found) = remote.slot(size, unheld.seq).kept(unheld.seq, remote.done());
            if let Some((what, count)) = found {
                let theirs = Head { what, count };
                if theirs != unheld.head && differs.is_none() {
                    let found = Mismatch { rank: unheld.rank, theirs, bytes: None };
                    *differs = Some(Fault::Differs { seq: unheld.seq, mine: unheld.head, found });
                }
            }
            tag <= unheld.seq && !remote.finished()
        });
        self.differs.is_none()
    }

    fn open_region(&mut self, wiring: &Wiring, stays: &[Stay]) -> Option<Region> {
        let Home { endpoint, nonce, .. } = self.home.as_ref()?;
        // Where an outlet's messages lie of themselves, and their stride.
        let place = |channel: usize| {
            let found = stays.binary_search_by_key(&channel, |stay| stay.channel).ok()?;
            let Stay { at, stride, single_copy, .. } = stays[found];
            let outlet = &wiring.outlets[channel];
            let bytes = stride.checked_mul(usize::try_from(outlet.messages).ok()?)?;
            if let Some(offset) = endpoint.symmetric.offset(&endpoint.memory, at as usize, bytes) {
                return Some((Place::Symmetric(offset), stride));
            }
            let lent = single_copy != SingleCopy::Never
                && self.ranks.all_read()
                && single_copy.pays()
                && foreign::lendable(at, usize::try_from(outlet.bytes).ok()?);
            lent.then_some((Place::Foreign(at as usize), stride))
        };
        // Looked for once: what may be read can change. Most calls have none.
        let places: Vec<_> =
            if stays.is_empty() { Vec::new() } else { (0..wiring.outlets.len()).map(place).collect() };
        let place = |channel: usize| places.get(channel).and_then(Option::as_ref);
        let lines: usize = wiring.outlets.iter().map(|o| LINE * (1 + o.readers.len())).sum();
        let fixed = wiring.outlets.len() * ENTRY + lines;
        let cells: usize = (0..wiring.outlets.len())
            .filter(|&channel| place(channel).is_none())
            .map(|channel| wiring.outlets[channel].cell.next_multiple_of(LINE))
            .sum();
        let bytes = |depth: usize| fixed.next_multiple_of(GRAIN) + cells * depth;
        let (want, least) = wiring.depth;
        let region = endpoint.pool.acquire(&endpoint.memory, *nonce, bytes(want), bytes(least))?;
        let depth = if region.bytes >= bytes(want) {
            want
        } else {
            (region.bytes - fixed.next_multiple_of(GRAIN)).checked_div(cells).unwrap_or(want).max(least)
        };
        let memory = &endpoint.memory;
        let mut line = wiring.outlets.len() * ENTRY;
        let mut cell = fixed.next_multiple_of(GRAIN);
        self.outs.clear();
        for (channel, outlet) in wiring.outlets.iter().enumerate() {
            let messages = outlet.messages as usize;
            let in_cells = outlet.cell.next_multiple_of(LINE);
            // As told: offset in the region, or address.
            let (cells, cell_bytes, cells_deep, lie) = match place(channel) {
                Some((Place::Symmetric(offset), stride)) => {
                    endpoint.symmetric.messages.fetch_add(outlet.messages, Ordering::Relaxed);
                    (offset - region.offset, *stride, messages, IN_SYMMETRIC)
                }
                Some((Place::Foreign(at), stride)) => {
                    endpoint.single_copies.fetch_add(outlet.messages, Ordering::Relaxed);
                    (*at, *stride, messages, IN_FOREIGN)
                }
                None => (cell, in_cells, depth, IN_CELLS),
            };
            let entry = region.offset + channel * ENTRY;
            let told = [line, cells, cell_bytes, cells_deep, outlet.bytes as usize, lie as usize];
            for (i, value) in told.into_iter().enumerate() {
                memory.word64(entry + 8 * i).store(value as u64, Ordering::Relaxed);
            }
            memory.word64(region.offset + line).store(0, Ordering::Relaxed);
            for (i, &reader) in outlet.readers.iter().enumerate() {
                // A reader elsewhere never holds anything up here.
                let read = if reader == Outlet::ELSEWHERE { u64::MAX } else { 0 };
                memory.word64(region.offset + line + LINE * (1 + i)).store(read, Ordering::Relaxed);
            }
            self.outs.push(NearOutlet {
                lines: region.offset + line,
                cells: if lie == IN_FOREIGN { cells } else { region.offset + cells },
                cell: cell_bytes,
                depth: cells_deep as u64,
                sent: 0,
                read: 0,
                readers: outlet.readers.len(),
                messages: outlet.messages,
                stays: lie != IN_CELLS,
                foreign: lie == IN_FOREIGN,
            });
            line += LINE * (1 + outlet.readers.len());
            cell += if lie == IN_CELLS { cell_bytes * depth } else { 0 };
        }
        Some(region)
    }

    /// Looks for the writer's header and finds the channel's place.
    fn resolve(&mut self, inlet: usize) -> Result<bool, Mismatch> {
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
}

impl Near {
    pub fn begin(&mut self, seq: u64, head: Head, wiring: &Arc<Wiring>, stays: &[Stay]) -> bool {
        if !self.slot_free(seq) || !self.unheld.is_empty() && !self.hold() || self.differs.is_some() {
            return false;
        }
        if self.home.is_none() {
            return true;
        }
        if wiring.inlets.iter().all(|inlet| inlet.messages == 0) && self.troubled(seq) {
            return false;
        }
        self.seq = seq;
        let slot = self.slot(seq);
        self.outs.clear();
        // A channel whose blocks are all empty carries nothing, but the header is still to be told.
        let carries = wiring.outlets.iter().any(|outlet| outlet.messages > 0);
        let mut stage = 0;
        if !wiring.inline && carries {
            let Some(region) = self.open_region(wiring, stays) else { return false };
            stage = region.offset as u64;
            self.region = Some(region);
        }
        self.head = head;
        if !Arc::ptr_eq(&self.wiring, wiring) {
            self.wiring = wiring.clone();
        }
        self.ins.clear();
        self.ins.resize(wiring.inlets.len(), NearInlet::default());
        self.landings.forget();
        let Some(Home { endpoint, .. }) = &self.home else { return true };
        let header = Slot(endpoint.memory.words(slot));
        header.write((head.what, head.count, stage));
        if wiring.inline && carries {
            // The header is published together with the payload.
            self.outs.push(NearOutlet {
                lines: 0,
                cells: slot + SLOT_HEADER,
                cell: SLOT_BYTES,
                depth: 1,
                sent: 0,
                read: 0,
                readers: 0,
                messages: 1,
                stays: false,
                foreign: false,
            });
        } else {
            header.tell(seq);
            self.owe();
        }
        true
    }

    pub fn cell(&mut self, channel: usize) -> Option<*mut u8> {
        let memory = &self.home.as_ref()?.endpoint.memory;
        let out = &mut self.outs[channel];
        if out.sent.saturating_sub(out.read) >= out.depth {
            out.read = out.read_by_all(memory);
            // A reader that says it has read more than there was spoils its own messages only.
            if out.sent.saturating_sub(out.read) >= out.depth {
                self.flush();
                return None;
            }
        }
        let at = out.cells + (out.sent % out.depth) as usize * out.cell;
        // The caller's own, as it said.
        Some(if out.foreign { std::ptr::with_exposed_provenance_mut(at) } else { memory.at(at, out.cell) })
    }

    pub fn publish(&mut self, channel: usize) {
        let Some(Home { endpoint, .. }) = &self.home else { return };
        let out = &mut self.outs[channel];
        debug_assert!(out.sent < out.messages);
        out.sent += 1;
        let (word, value) = if self.wiring.inline {
            (self.block + slot_at(self.layout, self.seq) + TAG, self.seq + 1)
        } else {
            (out.lines, out.sent)
        };
        // The readers look at this line while they wait, so it is in their caches: how long it takes to take it back
        // tells how far they are. The barriers cost little beside a large cell.
        let large = !self.wiring.inline && !out.stays && out.cell >= MEASURED;
        self.large = self.large.wrapping_add(large.into());
        let begun = (large && self.large.is_multiple_of(MEASURED_EVERY)).then(|| {
            fence(Ordering::SeqCst);
            Instant::now()
        });
        endpoint.memory.count(word).tell(value);
        if let Some(begun) = begun {
            fence(Ordering::SeqCst);
            self.distance.learn(begun.elapsed());
        }
        self.owe();
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

    pub fn settle(&mut self) -> Result<bool, Mismatch> {
        for inlet in 0..self.ins.len() {
            if !self.ins[inlet].resolved && !self.resolve(inlet)? {
                return Ok(false);
            }
        }
        if self.nonsense.is_some() || self.spoiled {
            return Ok(false);
        }
        let Some(Home { endpoint, .. }) = &self.home else { return Ok(true) };
        let unread = |out: &NearOutlet| out.stays && out.read_by_all(&endpoint.memory) < out.messages;
        if self.outs.iter().any(unread) {
            self.look_in_vain();
            return Ok(false);
        }
        Ok(true)
    }

    pub fn end(&mut self) {
        let Some(Home { endpoint, nonce, .. }) = &self.home else { return };
        if self.wiring.inlets.is_empty() {
            let others = (0..self.size).filter(|&rank| rank != self.me);
            let (seq, head) = (self.seq, self.head);
            self.unheld.extend(others.map(|rank| Unchecked { seq, head, rank }));
        }
        endpoint.memory.count(self.block + DONE).tell(self.seq + 1);
        if !self.wiring.inline {
            self.owed = true;
        }
        if let Some(region) = self.region.take() {
            let release = AllDone { ranks: self.ranks.clone(), operations: self.seq + 1 };
            endpoint.pool.retire(&endpoint.memory, *nonce, region, Arc::new(release));
        }
    }

    /// Whether that rank has begun operation `seq`, or a later one.
    pub fn arrived(&self, rank: usize, seq: u64) -> bool {
        self.home.is_none() || rank == self.me || {
            let remote = &self.ranks.remotes[rank];
            remote.done().told() > seq
                || (seq..seq + SLOTS).any(|s| remote.slot(self.layout, s).tag().told() == s + 1)
        }
    }

    /// The process of a rank.
    pub(crate) fn pid(&self, rank: usize) -> Option<u32> {
        self.ranks.remotes.get(rank).map(|remote| remote.card.pid)
    }

    /// The last error of a rank's process, and how long ago that was.
    pub(crate) fn last_error(&self, rank: usize) -> Option<(Duration, String)> {
        self.ranks.remotes.get(rank)?.last_error()
    }

    pub fn far(&self) -> bool {
        self.distance.far()
    }

    pub fn flush(&mut self) {
        if std::mem::take(&mut self.owed) {
            self.ranks.ring_all();
        }
    }

    pub fn head_of(&self, rank: usize, seq: u64) -> Option<Head> {
        let remote = self.ranks.remotes.get(rank)?;
        let (what, count, _) = remote.slot(self.layout, seq).read(seq)?;
        Some(Head { what, count })
    }

    /// Messages with the ranks of this node.
    pub fn p2p(&mut self) -> &mut dyn PointToPoint {
        &mut self.messages
    }

    /// The dead in the order in which they died, as far as that is known.
    pub fn faults(&mut self) -> Vec<Fault> {
        let mut dead: Vec<(u64, usize)> = Vec::new();
        let mut faults: Vec<Fault> =
            self.differs.iter().chain(&self.nonsense).chain(&self.messages.nonsense).cloned().collect();
        for (rank, remote) in self.ranks.remotes.iter().enumerate() {
            if rank == self.me {
                continue;
            }
            // `ended` before the state: a rank that left in good order and then exited has only left.
            let ended = remote.dead();
            let same = remote.word(NONCE).load(Ordering::Acquire) == remote.nonce;
            if same && remote.state() & POISONED != 0 {
                faults.push(Fault::Poisoned { rank, why: remote.why() });
            } else if !remote.open() {
                faults.push(Fault::Left { rank });
            } else if ended {
                dead.push((remote.nth_death().unwrap_or(u64::MAX), rank));
            }
        }
        dead.sort_unstable();
        faults.extend(dead.into_iter().map(|(_, rank)| Fault::Lost { rank, how: "died".to_owned() }));
        faults
    }

    pub fn poison(&mut self, why: &str) {
        let Some(Home { endpoint, .. }) = &self.home else { return };
        let state = endpoint.memory.word32(self.block + STATE);
        if state.load(Ordering::Relaxed) & POISONED != 0 {
            return;
        }
        endpoint.memory.write_text(self.block + WHY, why, LONGEST_WHY);
        state.fetch_or(POISONED, Ordering::Release);
        self.ranks.ring_all();
    }

    pub fn leave(&mut self) {
        if std::mem::replace(&mut self.left, true) {
            return;
        }
        let Some(Home { endpoint, .. }) = &self.home else { return };
        let state = endpoint.memory.word32(self.block + STATE);
        state.fetch_or(CLOSED, Ordering::Release);
        self.ranks.ring_all();
    }

    /// `places`: of the ranks of the group in this node.
    pub fn board(&self, places: Vec<Option<usize>>) -> Option<Arc<Board>> {
        let home = self.home.as_ref()?;
        let (endpoint, token) = (home.endpoint.clone(), home.token.clone()?);
        let (ranks, kept) = (self.ranks.clone(), self.kept.clone());
        Some(Arc::new(Board { endpoint, token, ranks, layout: self.layout, kept, places }))
    }

    pub(crate) fn sleeper(&self) -> Sleeper {
        Sleeper(self.home.as_ref().map(|home| home.endpoint.bell()))
    }

    pub(crate) fn assume_far(&mut self) {
        self.distance.assume_far();
    }
}

impl Drop for Near {
    fn drop(&mut self) {
        // A forked child's copy: the group, its memory and its place in the pool are the parent's.
        if self.forks != fork::generation() {
            return;
        }
        self.leave();
        self.messages.drain();
        let Some(Home { endpoint, block, nonce, size, .. }) = self.home.take() else { return };
        if let Some(region) = self.region.take() {
            let release = AllDone { ranks: self.ranks.clone(), operations: u64::MAX };
            endpoint.pool.retire(&endpoint.memory, nonce, region, Arc::new(release));
        }
        endpoint.pool.disown(&endpoint.memory, nonce);
        // A device may write its words long after.
        if self.kept.load(Ordering::Acquire) {
            return;
        }
        // The block may be read until every other rank has left, too: they look at its state and last slots.
        let release = AllDone { ranks: self.ranks.clone(), operations: u64::MAX };
        endpoint.control.give(block, block_bytes(size), Arc::new(release));
    }
}
