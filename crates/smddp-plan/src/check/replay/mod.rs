//! Symbolic execution of the programs of all ranks.
//!
//! Steps block, channels are first in, first out, and one pipeline writes each channel and one pipeline per
//! rank reads it: a Kahn process network. Its results and its deadlocks do not depend on the schedule, so one
//! greedy schedule decides for all.
//!
//! Sequences: the operations of a track use the same slots, one after the other. A rank enters the next
//! operation when its own pipelines are done. A slot is written again when all readers of its last message,
//! of any operation, have released it. Tracks run at the same time, each with its own slots.

mod step;

use super::MessageModes;
use super::clock::{Clock, ClockPool, VectorTime};
use super::error::{Error, Position};
use super::memory::Memory;
use super::shape::Operation;
use super::value::{Value, Values};
use crate::ir::{Span, Step, Timed};

/// One slot: its message, and the number of readers that have not read it.
#[derive(Debug, Default)]
struct Slot {
    /// Operation of the track, and number of the message in its channel.
    message: Option<(usize, usize)>,
    unread: usize,
    span: Option<Span>,
    segment: usize,
    /// One value per block of the span; `NOTHING` if the block has no such segment.
    values: Vec<Value>,
    /// Clock of the writer; cleared when all readers have read the message.
    written: Clock,
    /// Clocks of the readers; kept if the slot is written again.
    released: Clock,
    /// Number of writes that are still to come.
    writes_left: usize,
}

/// Progress of a channel in one operation.
#[derive(Debug)]
struct Flow {
    sent: usize,
    /// By reader.
    read: Vec<usize>,
}

/// State of a running operation.
struct Run<'a> {
    op: Operation<'a>,
    segments: usize,
    memory: Vec<Memory>,
    /// By writer, then channel.
    flows: Vec<Vec<Flow>>,
    began: Vec<VectorTime>,
    ended: Vec<Clock>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Cursor {
    iteration: usize,
    step: usize,
    /// Iterations of the pipeline.
    iterations: usize,
}

struct Rank {
    /// Current operation of the track; the number of operations at the end.
    now: usize,
    cursors: Vec<Cursor>,
    slots: Vec<Slot>,
    /// Number of its pipeline 0 in the clocks.
    pipeline: usize,
    pipelines: usize,
}

struct Track<'a> {
    /// Number of its first operation, for error messages.
    first: usize,
    runs: Vec<Run<'a>>,
    ranks: Vec<Rank>,
}

pub(super) struct Replay<'a> {
    depth: usize,
    pub(super) values: Values,
    tracks: Vec<Track<'a>>,
    clocks: Vec<Clock>,
    pool: ClockPool,
    modes: MessageModes<'a>,
    /// Inputs and results of the current step.
    inputs: Vec<Value>,
    produced: Vec<Value>,
}

impl<'a> Replay<'a> {
    /// Creates the replay. The operations of a track belong to one group. Programs have passed the static
    /// rules.
    pub(super) fn new(tracks: &[&[Operation<'a>]], depth: usize, modes: MessageModes<'a>) -> Self {
        let mut values = Values::default();
        let (mut first, mut pipeline) = (0, 0);
        let mut produced = Vec::new();
        for ops in tracks {
            let size = ops.first().map_or(0, Operation::size);
            let runs = ops.iter().map(|op| Run::new(op, &mut values)).collect();
            let ranks = (0..size)
                .map(|rank| {
                    let programs = || ops.iter().map(|op| &op.programs[rank]);
                    let pipelines = programs().map(|p| p.pipelines.len()).max().unwrap_or(0).max(1);
                    let channels = programs().map(|p| p.channels.len()).max().unwrap_or(0);
                    let mut slots: Vec<Slot> = Vec::new();
                    slots.resize_with(channels * depth, Slot::default);
                    for op in *ops {
                        count_messages(op, rank, depth, &mut slots);
                    }
                    pipeline += pipelines;
                    Rank { now: 0, cursors: Vec::new(), slots, pipeline: pipeline - pipelines, pipelines }
                })
                .collect();
            produced.push(Track { first, runs, ranks });
            first += ops.len();
        }
        Self {
            depth,
            values,
            tracks: produced,
            clocks: vec![Clock::new(pipeline); pipeline],
            pool: ClockPool::default(),
            modes,
            inputs: Vec::new(),
            produced: Vec::new(),
        }
    }

    /// Runs all operations to the end.
    pub(super) fn run(&mut self) -> Result<(), Error> {
        for t in 0..self.tracks.len() {
            for rank in 0..self.tracks[t].ranks.len() {
                self.begin(t, rank);
            }
        }
        loop {
            let mut progress = false;
            let mut waiting = Vec::new();
            for t in 0..self.tracks.len() {
                for rank in 0..self.tracks[t].ranks.len() {
                    progress |= self.advance(t, rank, &mut waiting)?;
                }
            }
            if waiting.is_empty() {
                return self.unread();
            }
            if !progress {
                self.unread()?;
                return Err(Error::Deadlock { depth: self.depth, waiting });
            }
        }
    }

    /// Returns for each operation its number, its memories, and per rank its start and its clock at the end.
    pub(super) fn results(
        &self,
    ) -> impl Iterator<Item = (usize, &Operation<'a>, &[Memory], &[VectorTime], &[Clock])> {
        self.tracks.iter().flat_map(|track| {
            track.runs.iter().enumerate().map(|(i, run)| {
                (track.first + i, &run.op, run.memory.as_slice(), run.began.as_slice(), run.ended.as_slice())
            })
        })
    }

    /// Starts the next operation of `rank`. All its pipelines start after the end of all pipelines of the
    /// last operation.
    fn begin(&mut self, t: usize, rank: usize) {
        let Track { runs, ranks, .. } = &mut self.tracks[t];
        let Rank { now, cursors, pipeline, pipelines, .. } = &mut ranks[rank];
        let mut clock = self.clocks[*pipeline].clone();
        for other in &self.clocks[*pipeline..*pipeline + *pipelines] {
            clock.join(other);
        }
        if let Some(last) = now.checked_sub(1) {
            runs[last].ended[rank] = clock.clone();
        }
        if let Some(run) = runs.get_mut(*now) {
            run.began[rank] = clock.tick(*pipeline);
            let iterations =
                |steps: &Vec<Timed>| run.segments + steps.iter().map(|s| s.lag).max().unwrap_or(0);
            let pipelines = run.op.programs[rank].pipelines.iter();
            *cursors = pipelines
                .map(|steps| Cursor { iterations: iterations(steps), ..Cursor::default() })
                .collect();
        }
        self.clocks[*pipeline..*pipeline + *pipelines].fill(clock);
    }

    /// Runs a rank until all its pipelines wait or it has finished. Returns true if a step was executed.
    fn advance(&mut self, t: usize, rank: usize, waiting: &mut Vec<Position>) -> Result<bool, Error> {
        let mut progress = false;
        loop {
            let now = self.tracks[t].ranks[rank].now;
            let Some(run) = self.tracks[t].runs.get(now) else {
                return Ok(progress);
            };
            let (op, segments, operation) = (run.op, run.segments, self.tracks[t].first + now);
            let before = waiting.len();
            for (pipeline, steps) in op.programs[rank].pipelines.iter().enumerate() {
                let mut cursor = self.tracks[t].ranks[rank].cursors[pipeline];
                while cursor.iteration < cursor.iterations {
                    if let Some(Timed { lag, step }) = steps.get(cursor.step) {
                        let segment = cursor.iteration.wrapping_sub(*lag);
                        if segment < segments && active(&op, rank, step, segment) {
                            let at = Position { operation, rank, pipeline, step: cursor.step, segment };
                            if !self.step(t, now, at, step)? {
                                waiting.push(at);
                                break;
                            }
                            progress = true;
                        }
                        cursor.step += 1;
                    } else {
                        cursor.step = 0;
                        cursor.iteration += 1;
                    }
                }
                self.tracks[t].ranks[rank].cursors[pipeline] = cursor;
            }
            if waiting.len() > before {
                return Ok(progress);
            }
            progress = true;
            self.tracks[t].ranks[rank].now += 1;
            self.begin(t, rank);
        }
    }

    /// Fails if a message is unread and its reader has left the operation.
    fn unread(&self) -> Result<(), Error> {
        for track in &self.tracks {
            for (i, run) in track.runs.iter().enumerate() {
                for (writer, flows) in run.flows.iter().enumerate() {
                    for (channel, flow) in flows.iter().enumerate() {
                        let readers = &run.op.programs[writer].channels[channel].readers;
                        for (&reader, &read) in readers.iter().zip(&flow.read) {
                            if read < flow.sent && track.ranks[reader].now > i {
                                let (operation, messages) = (track.first + i, flow.sent - read);
                                return Err(Error::Unread { operation, writer, channel, reader, messages });
                            }
                        }
                    }
                }
            }
        }
        Ok(())
    }
}

impl<'a> Run<'a> {
    fn new(op: &Operation<'a>, values: &mut Values) -> Self {
        let programs = op.programs;
        let flow = |readers: usize| Flow { sent: 0, read: vec![0; readers] };
        Self {
            op: *op,
            segments: op.most_segments(),
            memory: (0..op.size()).map(|rank| Memory::new(op, rank, values)).collect(),
            flows: programs
                .iter()
                .map(|p| p.channels.iter().map(|c| flow(c.readers.len())).collect())
                .collect(),
            began: vec![VectorTime::NEVER; op.size()],
            ended: vec![Clock::default(); op.size()],
        }
    }
}

/// Counts the writes of each slot of a rank in an operation.
fn count_messages(op: &Operation<'_>, rank: usize, depth: usize, slots: &mut [Slot]) {
    let program = &op.programs[rank];
    let mut sent = vec![0; program.channels.len()];
    for timed in program.pipelines.iter().flatten() {
        if let Some((channel, span)) = timed.step.published() {
            sent[channel] += (0..op.most_segments()).filter(|&s| op.has(rank, span, s)).count();
        }
    }
    for (channel, messages) in sent.into_iter().enumerate() {
        for k in 0..messages {
            slots[channel * depth + k % depth].writes_left += 1;
        }
    }
}

/// Returns true if the step has work for `segment`: a message to take, or a piece of a local span.
fn active(op: &Operation<'_>, rank: usize, step: &Step, segment: usize) -> bool {
    let mine = match step {
        Step::Send { source, .. } | Step::Copy { source, .. } => Some(*source),
        Step::Reduce { own, .. } => own.map(|(_, span)| span),
        Step::Receive { .. } => None,
    };
    mine.is_some_and(|span| op.has(rank, span, segment))
        || step.sources().iter().any(|from| op.has(from.rank, from.message, segment))
}
