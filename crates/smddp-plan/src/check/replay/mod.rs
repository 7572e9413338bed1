//! Runs the programs of all ranks, symbolically.
//!
//! Steps block, channels are first in, first out, and each is written by one lane and read by one lane a rank:
//! a Kahn network. What it computes, and whether it gets stuck, does not depend on who goes first, so one greedy
//! schedule decides for all.
//!
//! Sequences: the operations of a track use the same cells, one after the other. A rank goes on to the next
//! operation when its own lanes are done; a cell is written again when all readers of its last message, of
//! whatever operation, have released it. Tracks run at the same time, each with cells of its own.

mod step;

use super::Ways;
use super::clock::{Clock, Moment, Spare};
use super::error::{Error, Position};
use super::memory::Memory;
use super::shape::Operation;
use super::value::{Value, Values};
use crate::ir::{Span, Step, Timed};

/// One cell: the message in it, and who has yet to read it.
#[derive(Debug, Default)]
struct Cell {
    /// Operation of the track and number of the message in its channel.
    message: Option<(usize, usize)>,
    unread: usize,
    span: Option<Span>,
    segment: usize,
    /// For each block of the span; `NOTHING` where the block has no such segment.
    values: Vec<Value>,
    /// What its writer knew; forgotten when all have read it.
    written: Clock,
    /// What its readers knew; kept where it is written again.
    released: Clock,
    /// How often it will yet be written.
    to_come: usize,
}

/// Progress of a channel in one operation.
#[derive(Debug)]
struct Flow {
    sent: usize,
    /// By reader.
    read: Vec<usize>,
}

/// One operation while it runs.
struct Run<'a> {
    op: Operation<'a>,
    segments: usize,
    memory: Vec<Memory>,
    /// By writer, then channel.
    flows: Vec<Vec<Flow>>,
    began: Vec<Moment>,
    ended: Vec<Clock>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Cursor {
    iteration: usize,
    step: usize,
    /// Iterations of the lane.
    turns: usize,
}

struct Rank {
    /// Operation of the track it is in; their number when it is through.
    now: usize,
    cursors: Vec<Cursor>,
    cells: Vec<Cell>,
    /// Number of its lane 0 in the clocks.
    lane: usize,
    lanes: usize,
}

struct Track<'a> {
    /// Number of its first operation, for errors.
    first: usize,
    runs: Vec<Run<'a>>,
    ranks: Vec<Rank>,
}

pub(super) struct Replay<'a> {
    depth: usize,
    pub(super) values: Values,
    tracks: Vec<Track<'a>>,
    clocks: Vec<Clock>,
    spare: Spare,
    ways: Ways<'a>,
    /// What the step under way reduces, and what it makes.
    inputs: Vec<Value>,
    made: Vec<Value>,
}

impl<'a> Replay<'a> {
    /// Each track's operations are of one group. Programs have passed the rules.
    pub(super) fn new(tracks: &[&[Operation<'a>]], depth: usize, ways: Ways<'a>) -> Self {
        let mut values = Values::default();
        let (mut first, mut lane) = (0, 0);
        let mut made = Vec::new();
        for ops in tracks {
            let size = ops.first().map_or(0, Operation::size);
            let runs = ops.iter().map(|op| Run::new(op, &mut values)).collect();
            let ranks = (0..size)
                .map(|rank| {
                    let programs = || ops.iter().map(|op| &op.programs[rank]);
                    let lanes = programs().map(|p| p.lanes.len()).max().unwrap_or(0).max(1);
                    let channels = programs().map(|p| p.channels.len()).max().unwrap_or(0);
                    let mut cells: Vec<Cell> = Vec::new();
                    cells.resize_with(channels * depth, Cell::default);
                    for op in *ops {
                        count_messages(op, rank, depth, &mut cells);
                    }
                    lane += lanes;
                    Rank { now: 0, cursors: Vec::new(), cells, lane: lane - lanes, lanes }
                })
                .collect();
            made.push(Track { first, runs, ranks });
            first += ops.len();
        }
        Self {
            depth,
            values,
            tracks: made,
            clocks: vec![Clock::new(lane); lane],
            spare: Spare::default(),
            ways,
            inputs: Vec::new(),
            made: Vec::new(),
        }
    }

    /// To the end of everything.
    pub(super) fn run(&mut self) -> Result<(), Error> {
        for t in 0..self.tracks.len() {
            for rank in 0..self.tracks[t].ranks.len() {
                self.begin(t, rank);
            }
        }
        loop {
            let mut moved = false;
            let mut waiting = Vec::new();
            for t in 0..self.tracks.len() {
                for rank in 0..self.tracks[t].ranks.len() {
                    moved |= self.drive(t, rank, &mut waiting)?;
                }
            }
            if waiting.is_empty() {
                return self.unread();
            }
            if !moved {
                self.unread()?;
                return Err(Error::Deadlock { depth: self.depth, waiting });
            }
        }
    }

    /// The operations with their numbers, their memories, and per rank when it began and what it knew when it
    /// ended.
    pub(super) fn results(
        &self,
    ) -> impl Iterator<Item = (usize, &Operation<'a>, &[Memory], &[Moment], &[Clock])> {
        self.tracks.iter().flat_map(|track| {
            track.runs.iter().enumerate().map(|(i, run)| {
                (track.first + i, &run.op, run.memory.as_slice(), run.began.as_slice(), run.ended.as_slice())
            })
        })
    }

    /// Rank `rank` enters its next operation: all its lanes know all that the last one's knew.
    fn begin(&mut self, t: usize, rank: usize) {
        let Track { runs, ranks, .. } = &mut self.tracks[t];
        let Rank { now, cursors, lane, lanes, .. } = &mut ranks[rank];
        let mut clock = self.clocks[*lane].clone();
        for other in &self.clocks[*lane..*lane + *lanes] {
            clock.join(other);
        }
        if let Some(last) = now.checked_sub(1) {
            runs[last].ended[rank] = clock.clone();
        }
        if let Some(run) = runs.get_mut(*now) {
            run.began[rank] = clock.tick(*lane);
            let turns = |steps: &Vec<Timed>| run.segments + steps.iter().map(|s| s.lag).max().unwrap_or(0);
            let lanes = run.op.programs[rank].lanes.iter();
            *cursors = lanes.map(|steps| Cursor { turns: turns(steps), ..Cursor::default() }).collect();
        }
        self.clocks[*lane..*lane + *lanes].fill(clock);
    }

    /// Runs a rank until all its lanes wait or it is through; says whether anything happened.
    fn drive(&mut self, t: usize, rank: usize, waiting: &mut Vec<Position>) -> Result<bool, Error> {
        let mut moved = false;
        loop {
            let now = self.tracks[t].ranks[rank].now;
            let Some(run) = self.tracks[t].runs.get(now) else {
                return Ok(moved);
            };
            let (op, segments, operation) = (run.op, run.segments, self.tracks[t].first + now);
            let before = waiting.len();
            for (lane, steps) in op.programs[rank].lanes.iter().enumerate() {
                let mut cursor = self.tracks[t].ranks[rank].cursors[lane];
                while cursor.iteration < cursor.turns {
                    if let Some(Timed { lag, step }) = steps.get(cursor.step) {
                        let segment = cursor.iteration.wrapping_sub(*lag);
                        if segment < segments && active(&op, rank, step, segment) {
                            let at = Position { operation, rank, lane, step: cursor.step, segment };
                            if !self.step(t, now, at, step)? {
                                waiting.push(at);
                                break;
                            }
                            moved = true;
                        }
                        cursor.step += 1;
                    } else {
                        cursor.step = 0;
                        cursor.iteration += 1;
                    }
                }
                self.tracks[t].ranks[rank].cursors[lane] = cursor;
            }
            if waiting.len() > before {
                return Ok(moved);
            }
            moved = true;
            self.tracks[t].ranks[rank].now += 1;
            self.begin(t, rank);
        }
    }

    /// Messages that nobody will read: their readers have left the operation.
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
            began: vec![Moment::NEVER; op.size()],
            ended: vec![Clock::default(); op.size()],
        }
    }
}

/// How often each of a rank's cells is written in an operation.
fn count_messages(op: &Operation<'_>, rank: usize, depth: usize, cells: &mut [Cell]) {
    let program = &op.programs[rank];
    let mut sent = vec![0; program.channels.len()];
    for timed in program.lanes.iter().flatten() {
        if let Some((channel, span)) = timed.step.published() {
            sent[channel] += (0..op.most_segments()).filter(|&s| op.has(rank, span, s)).count();
        }
    }
    for (channel, messages) in sent.into_iter().enumerate() {
        for k in 0..messages {
            cells[channel * depth + k % depth].to_come += 1;
        }
    }
}

/// Whether the step has something to do for `segment`: a message to take, or a piece of its own span.
fn active(op: &Operation<'_>, rank: usize, step: &Step, segment: usize) -> bool {
    let mine = match step {
        Step::Send { source, .. } | Step::Copy { source, .. } => Some(*source),
        Step::Reduce { own, .. } => own.map(|(_, span)| span),
        Step::Receive { .. } => None,
    };
    mine.is_some_and(|span| op.has(rank, span, segment))
        || step.sources().iter().any(|from| op.has(from.rank, from.message, segment))
}
