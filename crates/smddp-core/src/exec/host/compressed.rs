//! The executor where elements travel between nodes in a format: 32-bit floats that are coded as they leave the node, and decoded
//! where they arrive.
//!
//! Inside a node they are as they are. What all ranks are to have alike is rounded by the rank that has or makes it, for
//! itself, too, before it goes anywhere; whoever codes it again changes nothing.

use std::mem::MaybeUninit;

use smddp_transport::{Group, Mismatch};

use super::{Cell, Host};
use crate::bind::{Coding, Incoming, Reduce, Run};
use crate::exec::walk::{Execution, Mover, Outcome, with_room};
use crate::kernels::{copy, copy_tee, decode, encode, round};

/// Bytes of a float.
const FLOAT: usize = size_of::<f32>();
/// Elements that are reduced at a time, from and in the first cache: whole groups of any format.
const PIECE: usize = 1024;

pub(super) struct Coded<'a, 'b> {
    pub(super) host: Host<'a>,
    pub(super) coding: &'b Coding,
}

impl Mover for Coded<'_, '_> {
    type Trouble = Mismatch;
    type Room = (usize, Cell);

    fn execution(&mut self) -> &mut Execution {
        self.host.execution
    }

    fn group(&mut self) -> &mut Group {
        self.host.group
    }

    fn room(&mut self, channel: usize, run: Run, segment: usize) -> Outcome<Self, Option<Self::Room>> {
        self.host.room(channel, run, segment)
    }

    fn send(
        &mut self,
        (channel, cell): Self::Room,
        source: Run,
        tee: Option<Run>,
        segment: usize,
    ) -> Outcome<Self> {
        let Coding { format, .. } = *self.coding;
        let (remote, rounds) = (self.coding.outs[channel], self.coding.rounds(source));
        let mut at = 0;
        for i in 0..source.blocks {
            let bytes = self.host.bound.piece(source.buffer, source.block + i, segment);
            let from = self.host.address(source, source.block + i, segment) as *const u8;
            let kept = tee.map(|tee| self.host.address(tee, tee.block + i, segment) as *mut u8);
            let (to, n) = (cell.wrapping_add(at), bytes / FLOAT);
            // SAFETY: the cell is ours and holds the message (bind sized it); `from` and `kept` lie in the call's buffers, valid
            // and exclusively ours until the operation is over, and are the same or do not overlap. This thread owns the
            // operation.
            unsafe {
                match (remote, rounds) {
                    (true, _) => encode(format, to, from, n),
                    (false, true) => round(format, to, from, n),
                    (false, false) => copy(to, from, bytes, false),
                }
                match kept {
                    Some(kept) if rounds => round(format, kept, from, n),
                    Some(kept) if kept.cast_const() != from => {
                        copy(kept, from, bytes, self.host.execution.stream);
                    }
                    _ => {}
                }
            }
            at += self.coding.size(remote, bytes);
        }
        self.host.group.publish(channel, at);
        Ok(())
    }

    fn receive(
        &mut self,
        (from, message): (&Incoming, *const u8),
        to: Run,
        onward: Option<Self::Room>,
        segment: usize,
    ) -> Outcome<Self, bool> {
        let Coding { format, .. } = *self.coding;
        let comes = self.coding.ins[from.recv_channel];
        let goes = onward.is_some_and(|(channel, _)| self.coding.outs[channel]);
        let cell = onward.map(|(_, cell)| cell);
        let stream = self.host.execution.stream;
        let (mut taken, mut given) = (self.host.bound.skipped(from, segment), 0);
        for block in to.range() {
            let bytes = self.host.bound.piece(to.buffer, block, segment);
            let kept = self.host.address(to, block, segment) as *mut u8;
            let (piece, n) = (message.wrapping_add(taken), bytes / FLOAT);
            let cell = cell.map(|cell| cell.wrapping_add(given));
            // SAFETY: the message stays where it is until it is released and holds these elements in this form (the writer's and
            // our sizes were held against each other); `kept` lies in the call's buffers; the cell is ours. None overlap.
            unsafe {
                match (comes, cell) {
                    (false, None) => copy(kept, piece, bytes, stream),
                    (false, Some(cell)) if !goes => copy_tee(cell, kept, piece, bytes, stream),
                    (false, Some(cell)) => {
                        copy(kept, piece, bytes, stream);
                        encode(format, cell, piece, n);
                    }
                    (true, None) => decode(format, kept, piece, n),
                    (true, Some(cell)) => {
                        decode(format, kept, piece, n);
                        match goes {
                            true => copy(cell, piece, format.bytes(n), false),
                            false => copy(cell, kept, bytes, false),
                        }
                    }
                }
            }
            taken += self.coding.size(comes, bytes);
            given += self.coding.size(goes, bytes);
        }
        if let Some((channel, _)) = onward {
            self.host.group.publish(channel, given);
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
        if segment >= step.result.segments {
            return Ok(());
        }
        let own = step.own.map_or(messages.len(), |(at, _)| at);
        let inputs = messages.len() + usize::from(step.own.is_some());
        let given = with_room(inputs, (std::ptr::null(), false), |sources| {
            for (i, (message, from)) in messages.iter().zip(&step.from).enumerate() {
                let first = message.wrapping_add(self.host.bound.skipped(from, segment));
                sources[i + usize::from(i >= own)] = (first, self.coding.ins[from.recv_channel]);
            }
            let mut given = 0;
            for i in 0..step.result.blocks {
                if let Some((at, run)) = step.own {
                    sources[at] = (self.host.address(run, run.block + i, segment) as *const u8, false);
                }
                let out = self.host.address(step.result, step.result.block + i, segment) as *mut u8;
                let bytes = self.host.bound.piece(step.result.buffer, step.result.block + i, segment);
                let to = onward.map(|(channel, cell)| (cell.wrapping_add(given), self.coding.outs[channel]));
                self.combine(step, sources, step.keep.then_some(out), to, bytes / FLOAT);
                // The next block lies behind this one in every message.
                for (source, coded) in sources.iter_mut() {
                    *source = source.wrapping_add(self.coding.size(*coded, bytes));
                }
                given += self.coding.size(to.is_some_and(|(_, remote)| remote), bytes);
            }
            given
        });
        if let Some((channel, _)) = onward {
            self.host.group.publish(channel, given);
        }
        Ok(())
    }

    fn copy(&mut self, source: Run, to: Run, finish: bool, segment: usize) -> Outcome<Self> {
        if !self.coding.rounds(source) {
            return self.host.copy(source, to, finish, segment);
        }
        for (block, kept) in source.range().zip(to.range()) {
            let n = self.host.bound.piece(source.buffer, block, segment) / FLOAT;
            let from = self.host.address(source, block, segment) as *const u8;
            let kept = self.host.address(to, kept, segment) as *mut u8;
            // SAFETY: both lie in the call's buffers; they may be the same, never overlap otherwise.
            unsafe { round(self.coding.format, kept, from, n) };
        }
        Ok(())
    }
}

impl Coded<'_, '_> {
    /// One block of a result, from sources that are coded or not, to where it is kept and a cell that is coded or not.
    fn combine(
        &self,
        step: &Reduce,
        sources: &[(*const u8, bool)],
        out: Option<*mut u8>,
        onward: Option<(Cell, bool)>,
        n: usize,
    ) {
        let Some(kernel) = self.host.bound.kernel else { return };
        let format = self.coding.format;
        let scale = if step.finish { self.host.execution.scale } else { None };
        let rounds = step.finish && self.coding.rounds_results;
        let mut room = [const { MaybeUninit::<[f32; PIECE]>::uninit() }; 2];
        let [sum, decoded] = room.each_mut().map(|room| room.as_mut_ptr().cast::<u8>());
        let none = std::ptr::null_mut();
        for first in (0..n).step_by(PIECE) {
            let count = PIECE.min(n - first);
            // SAFETY: every source holds `n` elements in its form (messages until they are released, own blocks in the call's
            // buffers), and so do the call's output and our cell; `sum` and `decoded` have room for a piece. A piece of a format
            // begins at whole groups. The output may be one of the sources exactly, which have been read when it is written.
            unsafe {
                let plain = |&(source, coded): &(*const u8, bool), room: *mut u8| {
                    if coded {
                        decode(format, room, source.wrapping_add(format.bytes(first)), count);
                        return room.cast_const();
                    }
                    source.wrapping_add(FLOAT * first)
                };
                let mut left = plain(&sources[0], sum);
                if sources.len() == 1 {
                    kernel.run(sum, none, &[left], count, scale, false);
                }
                for (i, source) in sources.iter().enumerate().skip(1) {
                    let scale = scale.filter(|_| i + 1 == sources.len());
                    kernel.run(sum, none, &[left, plain(source, decoded)], count, scale, false);
                    left = sum;
                }
                if rounds {
                    round(format, sum, sum, count);
                }
                if let Some(out) = out {
                    copy(out.wrapping_add(FLOAT * first), sum, FLOAT * count, false);
                }
                match onward {
                    Some((cell, true)) => encode(format, cell.wrapping_add(format.bytes(first)), sum, count),
                    Some((cell, false)) => copy(cell.wrapping_add(FLOAT * first), sum, FLOAT * count, false),
                    None => {}
                }
            }
        }
    }
}
