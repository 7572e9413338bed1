//! The executor for host memory.
//!
//! The SAFETY comments rest on this: a call's input and output are disjoint, or share memory in one of the forms that the plans support in
//! place. `Call::needs_input_copy` finds every other form, and such an operation reads a private copy of its input. `call::check` refuses
//! outputs that overlap each other.

mod compressed;

use smddp_plan::{Association, Buffer};
use smddp_transport::{Group, Mismatch, ZeroCopySource};

use self::compressed::Coded;
use crate::bind::{Bound, Incoming, Reduce, Run, Staying};
use crate::exec::walk::{Execution, Mover, Outcome, Progress, walk, with_room};
use crate::kernels;
use crate::kernels::helpers::share_out;

/// Runs operation `seq` until done or blocked.
pub(crate) fn advance(
    seq: u64,
    begun: &mut bool,
    bound: &Bound,
    execution: &mut Execution,
    group: &mut Group,
) -> Result<Progress, Mismatch> {
    let mut moved = false;
    if !*begun {
        copy_input(execution);
        let symmetric = group.has_symmetric();
        if bound.direct.matters(symmetric) {
            execution.in_place = execution.overlaps(bound);
        }
        let stays = if bound.direct.any_stay(symmetric) { staying(bound, execution) } else { Vec::new() };
        if !group.begin(seq, bound.fingerprint, &bound.wired, &stays) {
            return Ok(Progress::Blocked);
        }
        *begun = true;
        moved = true;
        land(bound, execution, group);
    }
    let mut host = Host { bound, execution, group };
    let (done, ran) = match &bound.coding {
        None => walk(bound, &mut host)?,
        Some(coding) => walk(bound, &mut Coded { host, coding })?,
    };
    if done && group.settle()? {
        group.end();
        return Ok(Progress::Done);
    }
    Ok(Progress::moved(moved || ran))
}

/// Copies the input to where the operation reads it, if it reads a copy. Only now: calls before this one may have written it.
pub(crate) fn copy_input(execution: &mut Execution) {
    let Some(copy) = execution.input_copy.take() else { return };
    let (dtype, mut to) = (execution.dtype, execution.bases[Buffer::In as usize] as *mut u8);
    for &(from, bytes) in &copy.pieces {
        let from = from as *const u8;
        // SAFETY: the caller's blocks are valid until the operation is over; `SharedState::reserve_input_copy` reserved the operation's own memory at
        // `to` for all of them, so both cannot overlap. Only this thread drives the operation.
        unsafe {
            match copy.factor {
                Some(factor) => drop(kernels::premultiply(dtype, to, from, bytes / dtype.size(), factor)),
                None => kernels::copy(to, from, bytes, false),
            }
        }
        to = to.wrapping_add(bytes);
    }
}

/// Messages that need no cell if the others can read them where they lie.
fn staying(bound: &Bound, execution: &Execution) -> Vec<ZeroCopySource> {
    let flat =
        |run: &Run| run.blocks == 1 || !matches!(execution.lists.get(run.buffer as usize), Some(Some(_)));
    bound
        .direct
        .stays(execution.in_place)
        .filter(|staying| flat(&staying.run))
        .map(|&Staying { channel, run, single_copy, .. }| ZeroCopySource {
            channel,
            at: execution.address(bound, run.buffer, run.block, 0) as *const u8,
            stride: bound.channel_layout.send_channels[channel].cell,
            single_copy,
        })
        .collect()
}

/// True if other ranks may be reading the operation's buffers themselves.
pub(crate) fn is_read_by_peers(bound: &Bound, execution: &Execution, group: &Group) -> bool {
    bound.direct.any_stay(group.has_symmetric()) && !staying(bound, execution).is_empty()
}

/// Says where messages belong that need no cell.
fn land(bound: &Bound, execution: &Execution, group: &mut Group) {
    for &(recv_channel, to) in bound.direct.arrives(execution.in_place) {
        let at = execution.address(bound, to.buffer, to.block, 0);
        let flat = !matches!(execution.lists.get(to.buffer as usize), Some(Some(_)));
        let bytes = match to.row {
            _ if to.blocks == 1 => bound.length(to.buffer, to.block),
            Some((_, bytes)) if flat => bytes,
            _ => continue,
        };
        group.land(recv_channel, at as *mut u8, bytes, bound.choice.segment);
    }
}

/// The calling thread moves bytes.
struct Host<'a> {
    bound: &'a Bound,
    execution: &'a mut Execution,
    group: &'a mut Group,
}

/// Where a message is written to.
type Cell = *mut u8;

impl Mover for Host<'_> {
    type Trouble = Mismatch;
    /// A channel, and its cell.
    type Room = (usize, Cell);

    fn execution(&mut self) -> &mut Execution {
        self.execution
    }

    fn group(&mut self) -> &mut Group {
        self.group
    }

    #[inline]
    fn room(&mut self, channel: usize, _: Run, _: usize) -> Outcome<Self, Option<Self::Room>> {
        Ok(self.group.cell(channel).map(|cell| (channel, cell)))
    }

    fn send(
        &mut self,
        (channel, cell): Self::Room,
        source: Run,
        tee: Option<Run>,
        segment: usize,
    ) -> Outcome<Self> {
        if self.bound.direct.leaves(channel, self.execution.in_place)
            && let Some((from, bytes)) = self.whole(source, segment)
        {
            self.keep(tee, (from, bytes), segment);
            self.group.publish_from(channel, from as *const u8, bytes);
            return Ok(());
        }
        let remote = self.group.remote();
        let rows = match tee {
            None => self.row(source).map(|(from, bytes)| (from, from, bytes)),
            Some(tee) => {
                self.row(source).zip(self.row(tee)).map(|((from, bytes), (kept, _))| (from, kept, bytes))
            }
        };
        let mut at = 0;
        if let Some((from, bytes)) = self.whole(source, segment).filter(|(from, _)| *from == cell as usize) {
            // It stays where it is.
            self.keep(tee, (from, bytes), segment);
            at = bytes;
        } else if let Some((from, kept, bytes)) = rows {
            self.put(remote, cell, from, kept, bytes);
            at = bytes;
        } else {
            for i in 0..source.blocks {
                let bytes = self.bound.piece(source.buffer, source.block + i, segment);
                let from = self.address(source, source.block + i, segment);
                let kept = tee.map_or(from, |tee| self.address(tee, tee.block + i, segment));
                self.put(remote, cell.wrapping_add(at), from, kept, bytes);
                at += bytes;
            }
        }
        self.group.publish(channel, at);
        Ok(())
    }

    fn receive(
        &mut self,
        (from, message): (&Incoming, *const u8),
        to: Run,
        onward: Option<Self::Room>,
        segment: usize,
    ) -> Outcome<Self, bool> {
        let (skip, stream) = (self.bound.skipped(from, segment), self.execution.stream);
        // It is sent on from where it is kept, or by way of a cell.
        let place = onward.and_then(|(channel, _)| {
            let direct = self.bound.direct.leaves(channel, self.execution.in_place);
            self.whole(to, segment).filter(|_| direct)
        });
        let cell = onward.filter(|_| place.is_none()).map(|(_, cell)| cell);
        let mut taken = 0;
        self.pieces(to, segment, |kept, bytes| {
            let (kept, piece) = (kept as *mut u8, message.wrapping_add(skip + taken));
            // SAFETY: the message stays where it is until it is released and holds these bytes (the writer's and
            // our sizes were held against each other); `kept` lies in the call's buffers; the cell is ours. A message that
            // came to its place without a cell is where it is kept.
            unsafe {
                match cell {
                    Some(cell) if kept.cast_const() == piece => {
                        kernels::copy(cell.wrapping_add(taken), piece, bytes, false);
                    }
                    Some(cell) => kernels::copy_tee(cell.wrapping_add(taken), kept, piece, bytes, stream),
                    None if kept.cast_const() == piece => {}
                    None => kernels::copy(kept, piece, bytes, stream),
                }
            }
            taken += bytes;
        });
        match (onward, place) {
            (Some((channel, _)), Some((at, _))) => self.group.publish_from(channel, at as *const u8, taken),
            (Some((channel, _)), None) => self.group.publish(channel, taken),
            (None, _) => {}
        }
        Ok(true)
    }

    fn reduce(
        &mut self,
        step: &Reduce,
        messages: &[*const u8],
        onward: Option<Self::Room>,
        segment: usize,
    ) -> Outcome<Self> {
        if segment < step.result.segments {
            let bytes = self.combine(step, messages, onward.map(|(_, cell)| cell), segment);
            if let Some((channel, _)) = onward {
                self.group.publish(channel, bytes);
            }
        }
        Ok(())
    }

    fn copy(&mut self, source: Run, to: Run, finish: bool, segment: usize) -> Outcome<Self> {
        let scale = self.execution.scale.filter(|&n| finish && n > 1);
        for (block, kept) in source.range().zip(to.range()) {
            let bytes = self.bound.piece(source.buffer, block, segment);
            let from = self.address(source, block, segment) as *const u8;
            let kept = self.address(to, kept, segment) as *mut u8;
            match self.bound.kernel {
                // SAFETY: both lie in the call's buffers; they may be the same, never overlap otherwise.
                Some(kernel) if scale.is_some() => unsafe {
                    let count = bytes / self.execution.dtype.size();
                    kernel.run(kept, std::ptr::null_mut(), &[from], count, scale, false);
                },
                _ if kept.cast_const() == from => {}
                // SAFETY: as above.
                _ => unsafe { kernels::copy(kept, from, bytes, self.execution.stream) },
            }
        }
        Ok(())
    }
}

impl Host<'_> {
    fn address(&self, run: Run, block: usize, segment: usize) -> usize {
        self.execution.address(self.bound, run.buffer, block, segment)
    }

    /// Where a run lies if it is one piece of memory: address and bytes.
    fn row(&self, run: Run) -> Option<(usize, usize)> {
        let (offset, bytes) = run.row?;
        let table = run.buffer as usize;
        match self.execution.lists.get(table) {
            Some(Some(_)) => None,
            _ => Some((self.execution.bases[table] + offset, bytes)),
        }
    }

    /// Where one segment of a run lies if it is one piece of memory: address and bytes.
    fn whole(&self, run: Run, segment: usize) -> Option<(usize, usize)> {
        let block = || {
            let bytes = self.bound.piece(run.buffer, run.block, segment);
            (self.address(run, run.block, segment), bytes)
        };
        self.row(run).or_else(|| (run.blocks == 1).then(block))
    }

    /// Keeps `bytes` at `from`, one segment, in `tee`.
    fn keep(&self, tee: Option<Run>, (from, bytes): (usize, usize), segment: usize) {
        let Some(tee) = tee else { return };
        let mut done = 0;
        self.pieces(tee, segment, |kept, piece| {
            let (source, piece) = (from + done, piece.min(bytes - done));
            if kept != source {
                // SAFETY: both lie in the call's buffers, valid and exclusively ours until the operation is over, and do not
                // overlap.
                unsafe { kernels::copy(kept as *mut u8, source as *const u8, piece, self.execution.stream) };
            }
            done += piece;
        });
    }

    /// Calls `each` for the pieces of one segment of a run: (address, bytes).
    fn pieces(&self, run: Run, segment: usize, mut each: impl FnMut(usize, usize)) {
        if let Some((address, bytes)) = self.row(run) {
            return each(address, bytes);
        }
        for block in run.range() {
            each(self.address(run, block, segment), self.bound.piece(run.buffer, block, segment));
        }
    }

    /// One piece into a cell, and to where it is kept if that is elsewhere.
    fn put(&self, remote: bool, cell: Cell, from: usize, kept: usize, bytes: usize) {
        let (source, out) = (from as *const u8, kept as *mut u8);
        let (past_caches, stream) = (remote && bytes >= WORTH_STREAMING, self.execution.stream);
        // SAFETY: the cell is ours and holds the message (bind sized it); `from` and `kept` lie in the call's
        // buffers, valid and exclusively ours until the operation is over. This thread owns the operation.
        unsafe {
            if kept == from || past_caches {
                kernels::copy(cell, source, bytes, past_caches);
                if kept != from {
                    kernels::copy(out, source, bytes, stream);
                }
            } else {
                kernels::copy_tee(cell, out, source, bytes, stream);
            }
        }
    }

    /// Bytes of the result.
    fn combine(&self, step: &Reduce, messages: &[*const u8], cell: Option<Cell>, segment: usize) -> usize {
        let own = step.own.map_or(messages.len(), |(at, _)| at);
        with_room(messages.len() + usize::from(step.own.is_some()), std::ptr::null(), |sources| {
            for (i, (message, from)) in messages.iter().zip(&step.from).enumerate() {
                sources[i + usize::from(i >= own)] = message.wrapping_add(self.bound.skipped(from, segment));
            }
            // (output, own input, bytes) where the blocks are one piece of memory.
            let whole = match (self.row(step.result), step.own.map(|(_, run)| self.row(run))) {
                (Some((out, bytes)), None) => Some((out, 0, bytes)),
                (Some((out, bytes)), Some(Some((mine, _)))) => Some((out, mine, bytes)),
                _ => None,
            };
            if let Some((out, mine, bytes)) = whole {
                self.fold(step, sources, mine, out, cell, bytes);
                return bytes;
            }
            let mut packed = 0;
            for i in 0..step.result.blocks {
                let out = self.address(step.result, step.result.block + i, segment);
                let mine = step.own.map_or(0, |(_, run)| self.address(run, run.block + i, segment));
                let bytes = self.bound.piece(step.result.buffer, step.result.block + i, segment);
                self.fold(step, sources, mine, out, cell.map(|cell| cell.wrapping_add(packed)), bytes);
                // The next block lies behind this one in every message.
                sources.iter_mut().for_each(|source| *source = source.wrapping_add(bytes));
                packed += bytes;
            }
            packed
        })
    }

    /// One block of a result. `mine`: where this rank's own source is, which gets its position among the others.
    fn fold(
        &self,
        step: &Reduce,
        sources: &mut [*const u8],
        mine: usize,
        out: usize,
        cell: Option<Cell>,
        bytes: usize,
    ) {
        let Some(kernel) = self.bound.kernel else { return };
        if let Some((at, _)) = step.own {
            sources[at] = mine as *const u8;
        }
        let (out, none) = (out as *mut u8, std::ptr::null_mut());
        let scale = if step.finish { self.execution.scale } else { None };
        let (size, stream) = (self.execution.dtype.size(), self.execution.stream);
        let past_caches = self.group.remote() && bytes >= WORTH_STREAMING;
        let (first, second, stream) = match cell {
            None => (out, none, stream),
            Some(cell) if cell == out => (out, none, stream),
            Some(cell) if !step.keep => (cell, none, past_caches),
            Some(cell) if past_caches => (cell, out, true),
            Some(cell) => (out, cell, stream),
        };
        // SAFETY: every source holds `bytes` bytes (messages until they are released, own blocks in the call's
        // buffers); the destinations are the call's output and our cell. A destination may be one of the
        // sources exactly (in place), never overlap it otherwise.
        // Parts have no element in common.
        unsafe {
            share_out(bytes, |at, bytes| {
                let first = first.wrapping_add(at);
                let second = if second.is_null() { second } else { second.wrapping_add(at) };
                with_room(sources.len(), std::ptr::null(), |parts| {
                    parts
                        .iter_mut()
                        .zip(sources.iter())
                        .for_each(|(part, source)| *part = source.wrapping_add(at));
                    let count = bytes / size;
                    match &step.association {
                        Association::InOrder => kernel.run(first, second, parts, count, scale, stream),
                        Association::Tree(joins) => {
                            kernel.run_tree((first, second), (parts, joins), (count, size), scale, stream);
                        }
                    }
                });
            });
        }
    }
}

/// Pieces of a cell from which it pays to write past the caches, where the readers' caches are far away.
const WORTH_STREAMING: usize = 8 << 10;
