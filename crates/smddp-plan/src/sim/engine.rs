//! The replay: lanes run until they must wait; messages leave, arrive and wake them.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use super::blocks::Blocks;
use super::cluster::Cluster;
use super::flow::{Flows, Message, NOBODY};
use super::path::{self, PathStep, Record, Wait};
use super::ports::{Leaving, Ports, Time, seconds};
use super::tape::{Tapes, Verb};
use crate::format::Format;
use crate::ir::Program;

/// Bytes of what a format makes fewer of.
pub(super) const FLOAT: usize = 4;

/// How the programs are bound.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Load {
    pub blocks: Blocks,
    /// Bytes of a block that move as one piece.
    pub segment: u64,
    /// Cells of each channel.
    pub depth: usize,
    /// How what goes between nodes travels, floats of 32 bits all.
    pub format: Option<Format>,
    /// Ranks whose ports' occupation is recorded, for drawing.
    pub watch: Vec<usize>,
}

/// What a bar of a drawing shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Into the network, out of it.
    Send,
    Receive,
    /// To the node's ranks, from them.
    Write,
    Read,
}

/// A message at one of a watched rank's ports, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bar {
    pub rank: usize,
    /// The other end; of a write, its first reader.
    pub peer: usize,
    pub side: Side,
    pub begin: f64,
    pub end: f64,
    pub bytes: u64,
}

/// What a replay found.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Until the last rank is through.
    pub seconds: f64,
    /// Bytes that each node sent into the network, and got from it.
    pub out_bytes: Vec<u64>,
    pub in_bytes: Vec<u64>,
    /// Messages in the network, and inside nodes (a write for all readers is one).
    pub network_messages: u64,
    pub local_messages: u64,
    /// What the last rank waited for, from the beginning.
    pub path: Vec<PathStep>,
    pub bars: Vec<Bar>,
}

/// Not all lanes reached their end: too few cells, or a wrong schedule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{lanes} lanes are stuck, the first at rank {rank}, step {step}")]
pub struct Stuck {
    pub lanes: usize,
    pub rank: usize,
    /// Counted in what the replay makes of its steps.
    pub step: usize,
}

/// Replays the programs of all ranks of `cluster`; `program` is asked for each rank once, in order.
///
/// # Errors
/// [`Stuck`] where the programs deadlock.
pub fn replay(
    cluster: &Cluster,
    load: &Load,
    mut program: impl FnMut(usize) -> Program,
) -> Result<Outcome, Stuck> {
    let segments = load.blocks.largest().div_ceil(load.segment.max(1)).max(1);
    let mut tapes = Tapes::default();
    let mut flows = Flows::new(load.depth);
    for rank in 0..cluster.size() {
        let program = program(rank);
        flows.push(rank, &program);
        tapes.push(rank, &program, cluster.memory_bytes_per_s.is_some(), segments == 1);
    }
    flows.complete(segments);
    Engine::new(cluster, load, segments, tapes, flows).run()
}

/// A lane: where it is, and since when.
#[derive(Clone, Copy, Debug)]
struct Lane {
    turn: u64,
    at: u32,
    time: Time,
    record: u32,
}

/// A message that took the out-port.
#[derive(Clone, Copy, Debug, Default)]
struct Flight {
    channel: u32,
    /// Its reader in the network; `NOBODY`: the writer's own node.
    reader: u32,
    bytes: u64,
    posted: Time,
    leaving: Leaving,
    record: u32,
}

#[derive(Clone, Copy, Debug)]
enum Event {
    /// The first byte of a flight is there.
    Arrive(u32),
    /// The first byte of a flight is through its sender's rail, and comes to the node's uplink.
    Uplink(u32),
    /// The sender of a flight knows that it is there.
    Complete(u32),
    Run(u32),
}

/// A rank's messages into the network.
#[derive(Clone, Default)]
struct Window {
    under_way: u64,
    queue: VecDeque<Flight>,
}

struct Engine<'a> {
    load: &'a Load,
    segments: u64,
    tapes: Tapes,
    flows: Flows,
    ports: Ports,
    lanes: Vec<Lane>,
    heap: BinaryHeap<Reverse<(Time, u64)>>,
    events: u64,
    flights: Vec<Flight>,
    idle: Vec<u32>,
    windows: Vec<Window>,
    window: u64,
    memory_ps_per_byte: f64,
    records: Vec<Record>,
    watched: Vec<bool>,
    /// Lanes that can go on now.
    ready: Vec<u32>,
    out: Outcome,
}

impl<'a> Engine<'a> {
    fn new(cluster: &Cluster, load: &'a Load, segments: u64, tapes: Tapes, flows: Flows) -> Self {
        let lane = |tape: &super::tape::LaneTape| Lane { turn: 0, at: tape.begin, time: 0, record: NOBODY };
        let mut watched = vec![false; cluster.size()];
        for &rank in load.watch.iter().filter(|&&rank| rank < cluster.size()) {
            watched[rank] = true;
        }
        Self {
            load,
            segments,
            lanes: tapes.lanes.iter().map(lane).collect(),
            tapes,
            flows,
            ports: Ports::new(cluster),
            heap: BinaryHeap::new(),
            events: 0,
            flights: Vec::new(),
            idle: Vec::new(),
            windows: vec![Window::default(); cluster.size()],
            window: cluster.window,
            memory_ps_per_byte: cluster.memory_bytes_per_s.map_or(0.0, |rate| 1e12 / rate),
            records: Vec::new(),
            watched,
            ready: Vec::new(),
            out: Outcome {
                out_bytes: vec![0; cluster.nodes()],
                in_bytes: vec![0; cluster.nodes()],
                ..Outcome::default()
            },
        }
    }

    fn run(mut self) -> Result<Outcome, Stuck> {
        for lane in 0..self.lanes.len() as u32 {
            self.go_on(lane, 0);
        }
        while let Some(Reverse((now, key))) = self.heap.pop() {
            match unpack(key) {
                Event::Run(lane) => self.ready.push(lane),
                Event::Arrive(flight) => self.arrive(flight, now),
                Event::Uplink(flight) => self.pass_uplink(flight, now),
                Event::Complete(flight) => self.complete(flight, now),
            }
            while let Some(lane) = self.ready.pop() {
                self.go_on(lane, now);
            }
        }
        let stuck = |(lane, tape): &(&Lane, &super::tape::LaneTape)| lane.at < tape.end;
        let mut left = self.lanes.iter().zip(&self.tapes.lanes).filter(stuck);
        if let Some((lane, tape)) = left.next() {
            let step = (lane.at - tape.begin) as usize;
            return Err(Stuck { lanes: 1 + left.count(), rank: tape.rank as usize, step });
        }
        let last = (0..self.lanes.len()).max_by_key(|&l| (self.lanes[l].time, Reverse(l)));
        if let Some(last) = last {
            self.out.seconds = seconds(self.lanes[last].time);
            let rank_of = |lane: u32| self.tapes.lanes[lane as usize].rank as usize;
            self.out.path = path::trace(&self.records, self.lanes[last].record, &rank_of);
        }
        Ok(self.out)
    }

    fn schedule(&mut self, at: Time, event: Event) {
        self.events += 1;
        self.heap.push(Reverse((at, pack(self.events, event))));
    }

    /// Runs a lane until it waits. It may run ahead of `now` while nothing that others compete for is touched.
    fn go_on(&mut self, lane: u32, now: Time) {
        let tape = self.tapes.lanes[lane as usize];
        let turns = self.segments + u64::from(tape.max_lag);
        while self.lanes[lane as usize].turn < turns {
            let Lane { turn, at, .. } = self.lanes[lane as usize];
            let mut at = at;
            while at < tape.end {
                let action = self.tapes.actions[at as usize];
                let segment = turn.wrapping_sub(u64::from(action.lag));
                if segment >= self.segments {
                    // Not begun (wrapped) or over.
                    at = match tape.sorted {
                        true if turn < u64::from(action.lag) => tape.end,
                        true => self.skip(at, tape.end, turn),
                        false => at + 1,
                    };
                    continue;
                }
                let Load { blocks, segment: cut, .. } = self.load;
                if let Some(bytes) =
                    blocks.bytes(u64::from(action.first), u64::from(action.blocks), *cut, segment)
                {
                    self.lanes[lane as usize].at = at;
                    let done = match action.verb {
                        Verb::Send => self.send(lane, tape.rank, action.a, bytes, now),
                        Verb::Take => self.take(lane, tape.rank, action.a, action.b, action.reader),
                        Verb::Work => {
                            let work = bytes as f64 * f64::from(action.a) * self.memory_ps_per_byte;
                            self.lanes[lane as usize].time += work.round() as Time;
                            true
                        }
                    };
                    if !done {
                        return;
                    }
                }
                at += 1;
            }
            let state = &mut self.lanes[lane as usize];
            state.turn += 1;
            state.at = if state.turn < turns { tape.begin } else { tape.end };
        }
        self.lanes[lane as usize].at = tape.end;
    }

    /// The first action from `at` on whose segments are not over in turn `turn`.
    fn skip(&self, at: u32, end: u32, turn: u64) -> u32 {
        let actions = &self.tapes.actions[at as usize..end as usize];
        at + actions.partition_point(|action| u64::from(action.lag) + self.segments <= turn) as u32
    }

    fn send(&mut self, lane: u32, rank: u32, channel: u32, bytes: u64, now: Time) -> bool {
        let channel = self.flows.id(rank, channel);
        let Ok((free, record)) = self.flows.room(channel, lane) else {
            return false;
        };
        if free > self.lanes[lane as usize].time {
            self.advance(lane, free, Wait::Credit, NOBODY, Message { record, ..Message::default() });
        }
        let Lane { time, record, .. } = self.lanes[lane as usize];
        if time > now {
            self.schedule(time, Event::Run(lane));
            return false;
        }
        self.flows.post(channel);
        let node = self.ports.node(rank as usize);
        let readers = self.flows.readers(channel);
        let remote = |engine: &Self, reader: usize| {
            engine.ports.node(engine.flows.reader(reader).rank as usize) != node
        };
        let all = readers.len();
        // From the rank's right-hand neighbour on, so that not all writers begin with the same reader.
        let right = readers.clone().position(|r| self.flows.reader(r).rank > rank).unwrap_or(0);
        let mut local = 0;
        for k in 0..all {
            let reader = readers.start + (right + k) % all;
            if !remote(self, reader) {
                local += 1;
                continue;
            }
            let bytes = self.load.format.map_or(bytes, |format| format.bytes(bytes as usize / FLOAT) as u64);
            self.out.network_messages += 1;
            self.out.out_bytes[node] += bytes;
            let flight =
                Flight { channel, reader: reader as u32, bytes, posted: time, record, ..Flight::default() };
            let window = &mut self.windows[rank as usize];
            if window.under_way >= self.window {
                window.queue.push_back(flight);
            } else {
                self.launch(rank as usize, flight, now);
            }
        }
        if local > 0 {
            self.out.local_messages += 1;
            let leaving = self.ports.write(rank as usize, bytes, local, now);
            if self.watched[rank as usize] {
                let first = readers.clone().find(|&r| !remote(self, r)).unwrap_or(readers.start);
                let end = leaving.last - self.ports.local_latency;
                let peer = self.flows.reader(first).rank;
                self.bar(rank, peer, Side::Write, leaving.start, end, bytes);
            }
            self.fly(Flight { channel, reader: NOBODY, bytes, posted: time, leaving, record }, false);
        }
        true
    }

    /// Into the network, now.
    fn launch(&mut self, rank: usize, mut flight: Flight, now: Time) {
        self.windows[rank].under_way += flight.bytes;
        flight.leaving = self.ports.send(rank, flight.bytes, now);
        if self.watched[rank] {
            let Leaving { start, last, .. } = flight.leaving;
            let peer = self.flows.reader(flight.reader as usize).rank;
            self.bar(rank as u32, peer, Side::Send, start, last - self.ports.network_latency, flight.bytes);
        }
        let uplink = self.ports.has_uplink(rank);
        self.fly(flight, uplink);
    }

    /// `uplink`: there is one more port before it is in the network.
    fn fly(&mut self, flight: Flight, uplink: bool) {
        let index = match self.idle.pop() {
            Some(index) => {
                self.flights[index as usize] = flight;
                index
            }
            None => {
                self.flights.push(flight);
                self.flights.len() as u32 - 1
            }
        };
        if uplink {
            self.schedule(flight.leaving.arrives - self.ports.network_latency, Event::Uplink(index));
        } else {
            self.schedule(flight.leaving.arrives, Event::Arrive(index));
        }
    }

    fn pass_uplink(&mut self, index: u32, now: Time) {
        let Flight { channel, bytes, leaving, .. } = self.flights[index as usize];
        let rank = self.flows.writer(channel) as usize;
        let leaving = self.ports.pass_uplink(rank, bytes, leaving, now);
        self.flights[index as usize].leaving = leaving;
        self.schedule(leaving.arrives, Event::Arrive(index));
    }

    fn arrive(&mut self, index: u32, now: Time) {
        let flight = self.flights[index as usize];
        if flight.reader != NOBODY {
            let reader = flight.reader as usize;
            let rank = self.flows.reader(reader).rank;
            let writer = self.flows.writer(flight.channel);
            let (to, last) = (rank as usize, flight.leaving.last);
            let landed = self.ports.receive(to, writer as usize, flight.bytes, last, now);
            self.out.in_bytes[self.ports.node(rank as usize)] += flight.bytes;
            if self.watched[rank as usize] {
                self.bar(rank, writer, Side::Receive, landed.start, landed.finish, flight.bytes);
            }
            self.deliver(flight, reader, landed.start - now, landed.finish);
            self.schedule(landed.finish + self.ports.network_latency, Event::Complete(index));
            return;
        }
        let writer = self.flows.writer(flight.channel);
        let node = self.ports.node(writer as usize);
        for reader in self.flows.readers(flight.channel) {
            let rank = self.flows.reader(reader).rank;
            if self.ports.node(rank as usize) != node {
                continue;
            }
            let landed = self.ports.read(rank as usize, flight.bytes, flight.leaving.last, now);
            if self.watched[rank as usize] {
                self.bar(rank, writer, Side::Read, landed.start, landed.finish, flight.bytes);
            }
            self.deliver(flight, reader, landed.start - now, landed.finish);
        }
        self.idle.push(index);
    }

    fn deliver(&mut self, flight: Flight, reader: usize, in_wait: Time, finish: Time) {
        let Flight { posted, leaving, record, .. } = flight;
        let nanoseconds = |time: Time| u32::try_from(time / 1000).unwrap_or(u32::MAX);
        let out_wait = nanoseconds(leaving.start - posted);
        let message = Message { finish, posted, record, out_wait, in_wait: nanoseconds(in_wait) };
        self.ready.extend(self.flows.arrive(reader, message));
    }

    fn complete(&mut self, index: u32, now: Time) {
        let flight = self.flights[index as usize];
        self.idle.push(index);
        let rank = self.flows.writer(flight.channel) as usize;
        self.windows[rank].under_way -= flight.bytes;
        while self.windows[rank].under_way < self.window {
            match self.windows[rank].queue.pop_front() {
                Some(next) => self.launch(rank, next, now),
                None => break,
            }
        }
    }

    fn take(&mut self, lane: u32, rank: u32, writer: u32, channel: u32, reader: u16) -> bool {
        let channel = self.flows.id(writer, channel);
        let reader = self.flows.readers(channel).start + usize::from(reader);
        let Some(message) = self.flows.next(reader, lane) else {
            return false;
        };
        let network = self.ports.node(rank as usize) != self.ports.node(writer as usize);
        if message.finish > self.lanes[lane as usize].time {
            let wait = if network { Wait::Network } else { Wait::Local };
            self.advance(lane, message.finish, wait, writer, message);
        }
        let back = if network { self.ports.network_latency } else { self.ports.local_latency };
        let Lane { time, record, .. } = self.lanes[lane as usize];
        if let Some((waiting, free)) = self.flows.release(channel, reader, time + back, record) {
            self.schedule(free, Event::Run(waiting));
        }
        true
    }

    /// The lane waited until `to`.
    fn advance(&mut self, lane: u32, to: Time, wait: Wait, peer: u32, message: Message) {
        let state = &mut self.lanes[lane as usize];
        self.records.push(Record {
            lane,
            action: state.at - self.tapes.lanes[lane as usize].begin,
            wait,
            peer,
            // What was sent without having waited before began with the collective.
            from: message.record,
            until: to,
            posted: message.posted,
            out_wait: message.out_wait,
            in_wait: message.in_wait,
        });
        state.time = to;
        state.record = self.records.len() as u32 - 1;
    }

    fn bar(&mut self, rank: u32, peer: u32, side: Side, begin: Time, end: Time, bytes: u64) {
        let (begin, end) = (seconds(begin), seconds(end));
        self.out.bars.push(Bar { rank: rank as usize, peer: peer as usize, side, begin, end, bytes });
    }
}

/// Number of the event (so that equal times keep their order), kind and index.
fn pack(number: u64, event: Event) -> u64 {
    let (kind, index) = match event {
        Event::Arrive(index) => (0, index),
        Event::Complete(index) => (1, index),
        Event::Run(index) => (2, index),
        Event::Uplink(index) => (3, index),
    };
    // 34 bits of number, 2 of kind, 28 of index: numbers may wrap, order among equals is all they give.
    number << 30 | kind << 28 | u64::from(index)
}

fn unpack(key: u64) -> Event {
    let index = (key & ((1 << 28) - 1)) as u32;
    match key >> 28 & 3 {
        0 => Event::Arrive(index),
        1 => Event::Complete(index),
        2 => Event::Run(index),
        _ => Event::Uplink(index),
    }
}
