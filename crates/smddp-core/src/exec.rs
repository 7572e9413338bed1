//! The executor: it follows a bound program, one lane after the other, until every lane is done or blocked.

use std::sync::Arc;
use std::time::{Duration, Instant};

use smddp_plan::{Buffer, Collective};
use smddp_transport::{Group, Mismatch};

use crate::bind::{Act, Bound, From, Run};
use crate::device::DeviceOp;
use crate::reduce;
use crate::types::DType;
use crate::work::Shared;

/// One operation under way.
pub(crate) struct Op {
    pub(crate) collective: Collective,
    pub(crate) seq: u64,
    pub(crate) bound: Arc<Bound>,
    pub(crate) state: State,
    /// The program's Scratch and the premultiplied input; aligned for every element type.
    pub(crate) scratch: Vec<u128>,
    pub(crate) scaled: Vec<u128>,
    pub(crate) begun: bool,
    pub(crate) timeout: Duration,
    pub(crate) submitted: Option<Instant>,
    pub(crate) work: Option<Arc<Shared>>,
    /// Its buffers are a device's.
    pub(crate) device: Option<Box<DeviceOp>>,
}

/// Buffers, and how far each lane is. Buffers are addresses here; they are valid until the operation is over, which
/// is the promise of whoever started it (see `Communicator::start`).
pub(crate) struct State {
    pub(crate) dtype: DType,
    /// What a finishing reduction divides by.
    pub(crate) scale: Option<u32>,
    /// Address of each flat buffer; 0 where `lists` has the blocks' addresses.
    pub(crate) bases: [usize; 3],
    pub(crate) lists: [Option<Vec<usize>>; 2],
    /// Outputs go past the caches.
    pub(crate) stream: bool,
    pub(crate) lanes: Vec<Cursor>,
}

/// Where a lane stands.
#[derive(Clone, Copy, Default)]
pub(crate) struct Cursor {
    turn: usize,
    index: usize,
}

/// What a call of [`Op::advance`] came to.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    Done,
    /// Something moved, more is to come.
    Moved,
    Blocked,
}

/// Goes through all lanes until each is at its end or a step has to wait: (all are at their ends, some step was taken).
/// `act` does one step on one segment; false where it has to wait.
#[inline]
pub(crate) fn walk<T, E>(
    bound: &Bound,
    doer: &mut T,
    lanes: impl Fn(&mut T) -> &mut Vec<Cursor>,
    mut act: impl FnMut(&mut T, &Act, usize) -> Result<bool, E>,
) -> Result<(bool, bool), E> {
    let (mut done, mut moved) = (true, false);
    for (lane, acts) in bound.lanes.iter().enumerate() {
        let mut at = lanes(doer)[lane];
        'lane: while at.turn < bound.turns[lane] {
            while at.index < acts.len() {
                let (lag, step) = &acts[at.index];
                if let Some(segment) = at.turn.checked_sub(*lag)
                    && !act(doer, step, segment)?
                {
                    break 'lane;
                }
                moved = true;
                at.index += 1;
            }
            at.index = 0;
            at.turn += 1;
        }
        lanes(doer)[lane] = at;
        done &= at.turn >= bound.turns[lane];
    }
    Ok((done, moved))
}

/// A cell or message: where a step reads or writes for one segment.
type Place = *mut u8;

impl Op {
    /// Runs until done or blocked.
    pub(crate) fn advance(&mut self, link: &mut Group) -> Result<Progress, Mismatch> {
        let mut moved = false;
        let bound = &*self.bound;
        if !self.begun {
            if !link.begin(self.seq, bound.head, &bound.wired) {
                return Ok(Progress::Blocked);
            }
            self.begun = true;
            moved = true;
        }
        let (done, ran) = walk(
            bound,
            &mut self.state,
            |state| &mut state.lanes,
            |state, act, segment| state.act(bound, link, act, segment),
        )?;
        moved |= ran;
        if done {
            if !link.settle()? {
                return Ok(if moved { Progress::Moved } else { Progress::Blocked });
            }
            link.end();
            return Ok(Progress::Done);
        }
        Ok(if moved { Progress::Moved } else { Progress::Blocked })
    }
}

impl State {
    pub(crate) fn address(&self, bound: &Bound, buffer: Buffer, block: usize, segment: usize) -> usize {
        let table = Bound::table(buffer);
        let offset = match self.lists.get(table) {
            Some(Some(list)) => list[block],
            _ => bound.offsets[table][block],
        };
        self.bases[table] + offset + segment * bound.choice.segment
    }

    /// One step on one segment; false where it has to wait. Whatever it needs is there before anything is moved.
    fn act(&mut self, bound: &Bound, link: &mut Group, act: &Act, segment: usize) -> Result<bool, Mismatch> {
        match act {
            Act::Send { channel, source, tee } => {
                if segment >= source.segments {
                    return Ok(true);
                }
                let Some(cell) = link.cell(*channel) else { return Ok(false) };
                let far = link.far();
                let bytes = self.pack(bound, far, cell, *source, *tee, segment);
                link.publish(*channel, bytes);
            }
            Act::Receive { from, to, forward } => {
                if segment >= from.message.segments {
                    return Ok(true);
                }
                let Some(message) = link.message(from.inlet)? else { return Ok(false) };
                let forwarded = forward.filter(|_| segment < to.segments);
                let cell = match forwarded {
                    Some(channel) => match link.cell(channel) {
                        Some(cell) => Some(cell),
                        None => return Ok(false),
                    },
                    None => None,
                };
                let bytes = self.unpack(bound, message, from, *to, cell, segment);
                link.release(from.inlet);
                if let Some(channel) = forwarded {
                    link.publish(channel, bytes);
                }
            }
            Act::Reduce { from, own, result, to, send, finish } => {
                let mut messages: [*const u8; FEW] = [std::ptr::null(); FEW];
                let mut many = Vec::new();
                let places = if from.len() <= FEW {
                    &mut messages[..from.len()]
                } else {
                    many.resize(from.len(), std::ptr::null());
                    &mut many[..]
                };
                for (place, f) in places.iter_mut().zip(from) {
                    if segment < f.message.segments {
                        match link.message(f.inlet)? {
                            Some(message) => *place = message,
                            None => return Ok(false),
                        }
                    }
                }
                let sending = send.filter(|_| segment < result.segments);
                let cell = match sending {
                    Some(channel) => match link.cell(channel) {
                        Some(cell) => cell,
                        None => return Ok(false),
                    },
                    None => std::ptr::null_mut(),
                };
                let mut bytes = 0;
                if segment < result.segments {
                    let far = link.far();
                    bytes = self.reduce(bound, far, places, from, *own, *result, *to, cell, *finish, segment);
                }
                for f in from {
                    if segment < f.message.segments {
                        link.release(f.inlet);
                    }
                }
                if let Some(channel) = sending {
                    link.publish(channel, bytes);
                }
            }
            Act::Copy { source, to, finish } => self.copy(bound, *source, *to, *finish, segment),
        }
        Ok(true)
    }

    /// Where a run lies if it is one piece of memory: address and bytes.
    fn row(&self, run: Run) -> Option<(usize, usize)> {
        let (offset, bytes) = run.row?;
        let table = Bound::table(run.buffer);
        match self.lists.get(table) {
            Some(Some(_)) => None,
            _ => Some((self.bases[table] + offset, bytes)),
        }
    }

    /// Calls `each` for the pieces of one segment of a run: (address, bytes).
    fn pieces(&self, bound: &Bound, run: Run, segment: usize, mut each: impl FnMut(usize, usize)) {
        if let Some((address, bytes)) = self.row(run) {
            return each(address, bytes);
        }
        for block in run.block..run.block + run.blocks {
            let bytes = bound.segment(bound.length(run.buffer, block), segment);
            each(self.address(bound, run.buffer, block, segment), bytes);
        }
    }

    /// Bytes of the message.
    fn pack(
        &self,
        bound: &Bound,
        far: bool,
        cell: Place,
        source: Run,
        tee: Option<Run>,
        segment: usize,
    ) -> usize {
        let rows = match tee {
            None => self.row(source).map(|(from, bytes)| (from, from, bytes)),
            Some(tee) => {
                self.row(source).zip(self.row(tee)).map(|((from, bytes), (kept, _))| (from, kept, bytes))
            }
        };
        if let Some((from, kept, bytes)) = rows {
            self.put(far, cell, from, kept, bytes);
            return bytes;
        }
        let mut at = 0;
        for i in 0..source.blocks {
            let bytes = bound.segment(bound.length(source.buffer, source.block + i), segment);
            let from = self.address(bound, source.buffer, source.block + i, segment);
            let kept = tee.map_or(from, |t| self.address(bound, t.buffer, t.block + i, segment));
            self.put(far, cell.wrapping_add(at), from, kept, bytes);
            at += bytes;
        }
        at
    }

    /// One piece into a cell, and to where it is kept if that is elsewhere.
    fn put(&self, far: bool, cell: Place, from: usize, kept: usize, bytes: usize) {
        let (source, out) = (from as *const u8, kept as *mut u8);
        let past_caches = far && bytes >= WORTH_STREAMING;
        // SAFETY: the cell is ours and holds the message (bind sized it); `from` and `kept` lie in the call's
        // buffers, valid and exclusively ours until the operation is over. This thread owns the operation.
        unsafe {
            if kept == from || past_caches {
                reduce::copy(cell, source, bytes, past_caches);
                if kept != from {
                    reduce::copy(out, source, bytes, self.stream);
                }
            } else {
                reduce::copy_tee(cell, out, source, bytes, self.stream);
            }
        }
    }

    /// Where the blocks that a source takes begin in its message.
    pub(crate) fn skipped(bound: &Bound, from: &From, segment: usize) -> usize {
        if segment == 0 {
            return from.skip_bytes;
        }
        (0..from.skip)
            .map(|i| bound.segment(bound.length(from.message.buffer, from.message.block + i), segment))
            .sum()
    }

    /// Bytes taken.
    fn unpack(
        &self,
        bound: &Bound,
        message: *const u8,
        from: &From,
        to: Run,
        cell: Option<Place>,
        segment: usize,
    ) -> usize {
        if to.blocks == 0 {
            return 0;
        }
        let mut at = Self::skipped(bound, from, segment);
        let mut forwarded = 0;
        self.pieces(bound, to, segment, |kept, bytes| {
            let (kept, piece) = (kept as *mut u8, message.wrapping_add(at));
            // SAFETY: the message stays where it is until it is released and holds these bytes (the writer's and
            // our sizes were held against each other); `kept` lies in the call's buffers; the cell is ours.
            unsafe {
                match cell {
                    Some(cell) => {
                        reduce::copy_tee(cell.wrapping_add(forwarded), kept, piece, bytes, self.stream)
                    }
                    None => reduce::copy(kept, piece, bytes, self.stream),
                }
            }
            at += bytes;
            forwarded += bytes;
        });
        forwarded
    }

    /// Bytes of the result.
    #[expect(clippy::too_many_arguments, reason = "the parts of one step")]
    fn reduce(
        &self,
        bound: &Bound,
        far: bool,
        messages: &[*const u8],
        from: &[From],
        own: Option<(usize, Run)>,
        result: Run,
        to: bool,
        cell: Place,
        finish: bool,
        segment: usize,
    ) -> usize {
        let Some(kernel) = bound.kernel else { return 0 };
        let element = self.dtype.size();
        let mut few = [std::ptr::null(); FEW + 1];
        let mut many = Vec::new();
        let count = messages.len() + usize::from(own.is_some());
        let sources = if count <= few.len() {
            &mut few[..count]
        } else {
            many.resize(count, std::ptr::null());
            &mut many[..]
        };
        let mut offsets: [usize; FEW] = [0; FEW];
        let mut more = Vec::new();
        let skips = if messages.len() <= FEW {
            &mut offsets[..messages.len()]
        } else {
            more.resize(messages.len(), 0);
            &mut more[..]
        };
        for (skip, f) in skips.iter_mut().zip(from) {
            *skip = Self::skipped(bound, f, segment);
        }
        // (output, own input, bytes) where the blocks are one piece of memory.
        let whole = match (self.row(result), own.map(|(_, run)| self.row(run))) {
            (Some((out, bytes)), None) => Some((out, 0, bytes)),
            (Some((out, bytes)), Some(Some((mine, _)))) => Some((out, mine, bytes)),
            _ => None,
        };
        let mut packed = 0;
        for i in 0..if whole.is_some() { 1 } else { result.blocks } {
            let (out, mine, bytes) = whole.unwrap_or_else(|| {
                let out = self.address(bound, result.buffer, result.block + i, segment);
                let mine = own.map_or(0, |(_, run)| self.address(bound, run.buffer, run.block + i, segment));
                (out, mine, bound.segment(bound.length(result.buffer, result.block + i), segment))
            });
            let mut next = 0;
            for (position, source) in sources.iter_mut().enumerate() {
                *source = if own.is_some_and(|(at, _)| at == position) {
                    mine as *const u8
                } else {
                    next += 1;
                    messages[next - 1].wrapping_add(skips[next - 1])
                };
            }
            let out = out as *mut u8;
            let sent = if cell.is_null() { cell } else { cell.wrapping_add(packed) };
            let scale = if finish { self.scale } else { None };
            let count = bytes / element;
            // SAFETY: every source holds `bytes` bytes (messages until they are released, own blocks in the call's
            // buffers); the destinations are the call's output and our cell. A destination may be one of the
            // sources exactly (in place), never overlap it otherwise.
            let run =
                |first, second, stream| unsafe { kernel.run(first, second, sources, count, scale, stream) };
            if sent.is_null() {
                run(out, sent, self.stream);
            } else {
                let kept = if to { out } else { std::ptr::null_mut() };
                let past_caches = far && bytes >= WORTH_STREAMING;
                if past_caches || kept.is_null() {
                    run(sent, kept, past_caches);
                } else {
                    run(kept, sent, self.stream);
                }
            }
            for skip in skips.iter_mut() {
                *skip += bytes;
            }
            packed += bytes;
        }
        packed
    }

    fn copy(&self, bound: &Bound, source: Run, to: Run, finish: bool, segment: usize) {
        for i in 0..source.blocks {
            let bytes = bound.segment(bound.length(source.buffer, source.block + i), segment);
            let from = self.address(bound, source.buffer, source.block + i, segment) as *const u8;
            let kept = self.address(bound, to.buffer, to.block + i, segment) as *mut u8;
            match bound.kernel {
                // SAFETY: both lie in the call's buffers; they may be the same, never overlap otherwise.
                Some(kernel) if finish && self.scale.is_some_and(|n| n > 1) => unsafe {
                    kernel.run(
                        kept,
                        std::ptr::null_mut(),
                        &[from],
                        bytes / self.dtype.size(),
                        self.scale,
                        false,
                    );
                },
                _ if kept.cast_const() == from => {}
                // SAFETY: as above.
                _ => unsafe { reduce::copy(kept, from, bytes, self.stream) },
            }
        }
    }
}

/// Pieces of a cell from which it pays to write past the caches, where the readers' caches are far away.
const WORTH_STREAMING: usize = 8 << 10;
/// Sources of a reduction that need no allocation.
const FEW: usize = 16;
