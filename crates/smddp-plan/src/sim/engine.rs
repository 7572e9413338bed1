//! Discrete-event simulation: pipelines run until they must wait; arriving messages resume them.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use super::blocks::Blocks;
use super::cluster::Cluster;
use super::event::{Event, pack, unpack};
use super::flow::{Flows, Message, NONE};
use super::outcome::{Bar, Deadlock, Outcome, Side};
use super::path::{self, Record, Wait};
use super::ports::{Departure, Ports, Time, seconds};
use super::tape::{Traces, Verb};
use crate::format::Format;
use crate::ir::Program;

/// Bytes of a 32-bit float, the only element type that formats compress.
pub(super) const FLOAT: usize = 4;

/// Binding of the programs to sizes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Load {
    /// Sizes of the blocks.
    pub blocks: Blocks,
    /// Bytes of a block that move as one piece.
    pub segment: u64,
    /// Slots of each channel.
    pub depth: usize,
    /// Format of messages between nodes, which are then all 32-bit floats.
    pub format: Option<Format>,
    /// Ranks whose port occupation is recorded for drawing.
    pub watch: Vec<usize>,
}

/// Simulates the programs of all ranks of `cluster`. Calls `program` once for each rank, in order.
///
/// # Errors
/// Returns [`Deadlock`] if the programs deadlock.
pub fn replay(
    cluster: &Cluster,
    load: &Load,
    mut program: impl FnMut(usize) -> Program,
) -> Result<Outcome, Deadlock> {
    let segments = load.blocks.largest().div_ceil(load.segment.max(1)).max(1);
    let mut traces = Traces::default();
    let mut flows = Flows::new(load.depth);
    for rank in 0..cluster.size() {
        let program = program(rank);
        flows.push(rank, &program);
        traces.push(rank, &program, cluster.memory_bytes_per_s.is_some(), segments == 1);
    }
    flows.complete(segments);
    Engine::new(cluster, load, segments, traces, flows).run()
}

/// State of a pipeline: its position, and the time at which it was reached.
#[derive(Clone, Copy, Debug)]
struct PipelineState {
    iteration: u64,
    at: u32,
    time: Time,
    record: u32,
}

/// A message that has taken its out-port.
#[derive(Clone, Copy, Debug, Default)]
struct Flight {
    channel: u32,
    /// Its reader in the network; `NONE` for all readers on the writer's node.
    reader: u32,
    bytes: u64,
    posted: Time,
    departure: Departure,
    record: u32,
}

/// Messages of a rank in the network.
#[derive(Clone, Default)]
struct Window {
    in_flight: u64,
    queue: VecDeque<Flight>,
}

struct Engine<'a> {
    load: &'a Load,
    segments: u64,
    traces: Traces,
    flows: Flows,
    ports: Ports,
    pipelines: Vec<PipelineState>,
    heap: BinaryHeap<Reverse<(Time, u64)>>,
    events: u64,
    flights: Vec<Flight>,
    free_flights: Vec<u32>,
    windows: Vec<Window>,
    window: u64,
    memory_ps_per_byte: f64,
    records: Vec<Record>,
    watched: Vec<bool>,
    /// Pipelines that can continue now.
    ready: Vec<u32>,
    out: Outcome,
}

impl<'a> Engine<'a> {
    fn new(cluster: &Cluster, load: &'a Load, segments: u64, traces: Traces, flows: Flows) -> Self {
        let pipeline = |trace: &super::tape::PipelineTrace| PipelineState {
            iteration: 0,
            at: trace.begin,
            time: 0,
            record: NONE,
        };
        let mut watched = vec![false; cluster.size()];
        for &rank in load.watch.iter().filter(|&&rank| rank < cluster.size()) {
            watched[rank] = true;
        }
        Self {
            load,
            segments,
            pipelines: traces.pipelines.iter().map(pipeline).collect(),
            traces,
            flows,
            ports: Ports::new(cluster),
            heap: BinaryHeap::new(),
            events: 0,
            flights: Vec::new(),
            free_flights: Vec::new(),
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

    fn run(mut self) -> Result<Outcome, Deadlock> {
        for pipeline in 0..self.pipelines.len() as u32 {
            self.advance_pipeline(pipeline, 0);
        }
        while let Some(Reverse((now, key))) = self.heap.pop() {
            match unpack(key) {
                Event::Run(pipeline) => self.ready.push(pipeline),
                Event::Arrive(flight) => self.arrive(flight, now),
                Event::Uplink(flight) => self.pass_uplink(flight, now),
                Event::Complete(flight) => self.complete(flight, now),
            }
            while let Some(pipeline) = self.ready.pop() {
                self.advance_pipeline(pipeline, now);
            }
        }
        let blocked =
            |(pipeline, trace): &(&PipelineState, &super::tape::PipelineTrace)| pipeline.at < trace.end;
        let mut unfinished = self.pipelines.iter().zip(&self.traces.pipelines).filter(blocked);
        if let Some((pipeline, trace)) = unfinished.next() {
            let step = (pipeline.at - trace.begin) as usize;
            return Err(Deadlock { pipelines: 1 + unfinished.count(), rank: trace.rank as usize, step });
        }
        let last = (0..self.pipelines.len()).max_by_key(|&l| (self.pipelines[l].time, Reverse(l)));
        if let Some(last) = last {
            self.out.seconds = seconds(self.pipelines[last].time);
            let rank_of = |pipeline: u32| self.traces.pipelines[pipeline as usize].rank as usize;
            self.out.path = path::trace(&self.records, self.pipelines[last].record, &rank_of);
        }
        Ok(self.out)
    }

    fn schedule(&mut self, at: Time, event: Event) {
        self.events += 1;
        self.heap.push(Reverse((at, pack(self.events, event))));
    }

    /// Runs a pipeline until it waits. It may run ahead of `now` until it uses a shared resource.
    fn advance_pipeline(&mut self, pipeline: u32, now: Time) {
        let trace = self.traces.pipelines[pipeline as usize];
        let iterations = self.segments + u64::from(trace.max_lag);
        while self.pipelines[pipeline as usize].iteration < iterations {
            let PipelineState { iteration, at, .. } = self.pipelines[pipeline as usize];
            let mut at = at;
            while at < trace.end {
                let action = self.traces.actions[at as usize];
                let segment = iteration.wrapping_sub(u64::from(action.lag));
                if segment >= self.segments {
                    // The segment has not started (wrapped) or has ended.
                    at = match trace.sorted {
                        true if iteration < u64::from(action.lag) => trace.end,
                        true => self.skip(at, trace.end, iteration),
                        false => at + 1,
                    };
                    continue;
                }
                let Load { blocks, segment: cut, .. } = self.load;
                if let Some(bytes) =
                    blocks.bytes(u64::from(action.first), u64::from(action.blocks), *cut, segment)
                {
                    self.pipelines[pipeline as usize].at = at;
                    let done = match action.verb {
                        Verb::Send => self.send(pipeline, trace.rank, action.a, bytes, now),
                        Verb::Take => self.take(pipeline, trace.rank, action.a, action.b, action.reader),
                        Verb::Work => {
                            let work = bytes as f64 * f64::from(action.a) * self.memory_ps_per_byte;
                            self.pipelines[pipeline as usize].time += work.round() as Time;
                            true
                        }
                    };
                    if !done {
                        return;
                    }
                }
                at += 1;
            }
            let state = &mut self.pipelines[pipeline as usize];
            state.iteration += 1;
            state.at = if state.iteration < iterations { trace.begin } else { trace.end };
        }
        self.pipelines[pipeline as usize].at = trace.end;
    }

    /// Returns the first action from `at` on that has segments left in iteration `iteration`.
    fn skip(&self, at: u32, end: u32, iteration: u64) -> u32 {
        let actions = &self.traces.actions[at as usize..end as usize];
        at + actions.partition_point(|action| u64::from(action.lag) + self.segments <= iteration) as u32
    }

    fn send(&mut self, pipeline: u32, rank: u32, channel: u32, bytes: u64, now: Time) -> bool {
        let channel = self.flows.id(rank, channel);
        let Ok((free, record)) = self.flows.room(channel, pipeline) else {
            return false;
        };
        if free > self.pipelines[pipeline as usize].time {
            self.advance(pipeline, free, Wait::Credit, NONE, Message { record, ..Message::default() });
        }
        let PipelineState { time, record, .. } = self.pipelines[pipeline as usize];
        if time > now {
            self.schedule(time, Event::Run(pipeline));
            return false;
        }
        self.flows.post(channel);
        let node = self.ports.node(rank as usize);
        let readers = self.flows.readers(channel);
        let remote = |engine: &Self, reader: usize| {
            engine.ports.node(engine.flows.reader(reader).rank as usize) != node
        };
        let all = readers.len();
        // Starts with the next higher rank, so that not all writers start with the same reader.
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
            if window.in_flight >= self.window {
                window.queue.push_back(flight);
            } else {
                self.launch(rank as usize, flight, now);
            }
        }
        if local > 0 {
            self.out.local_messages += 1;
            let departure = self.ports.write(rank as usize, bytes, local, now);
            if self.watched[rank as usize] {
                let first = readers.clone().find(|&r| !remote(self, r)).unwrap_or(readers.start);
                let end = departure.last - self.ports.local_latency;
                let peer = self.flows.reader(first).rank;
                self.bar(rank, peer, Side::Write, departure.start, end, bytes);
            }
            self.schedule_flight(
                Flight { channel, reader: NONE, bytes, posted: time, departure, record },
                false,
            );
        }
        true
    }

    /// Sends a message into the network now.
    fn launch(&mut self, rank: usize, mut flight: Flight, now: Time) {
        self.windows[rank].in_flight += flight.bytes;
        flight.departure = self.ports.send(rank, flight.bytes, now);
        if self.watched[rank] {
            let Departure { start, last, .. } = flight.departure;
            let peer = self.flows.reader(flight.reader as usize).rank;
            self.bar(rank as u32, peer, Side::Send, start, last - self.ports.network_latency, flight.bytes);
        }
        let uplink = self.ports.has_uplink(rank);
        self.schedule_flight(flight, uplink);
    }

    /// Schedules the next event of a flight; `uplink` adds a port before the network.
    fn schedule_flight(&mut self, flight: Flight, uplink: bool) {
        let index = match self.free_flights.pop() {
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
            self.schedule(flight.departure.arrives - self.ports.network_latency, Event::Uplink(index));
        } else {
            self.schedule(flight.departure.arrives, Event::Arrive(index));
        }
    }

    fn pass_uplink(&mut self, index: u32, now: Time) {
        let Flight { channel, bytes, departure, .. } = self.flights[index as usize];
        let rank = self.flows.writer(channel) as usize;
        let departure = self.ports.pass_uplink(rank, bytes, departure, now);
        self.flights[index as usize].departure = departure;
        self.schedule(departure.arrives, Event::Arrive(index));
    }

    fn arrive(&mut self, index: u32, now: Time) {
        let flight = self.flights[index as usize];
        if flight.reader != NONE {
            let reader = flight.reader as usize;
            let rank = self.flows.reader(reader).rank;
            let writer = self.flows.writer(flight.channel);
            let (to, last) = (rank as usize, flight.departure.last);
            let arrival = self.ports.receive(to, writer as usize, flight.bytes, last, now);
            self.out.in_bytes[self.ports.node(rank as usize)] += flight.bytes;
            if self.watched[rank as usize] {
                self.bar(rank, writer, Side::Receive, arrival.start, arrival.finish, flight.bytes);
            }
            self.deliver(flight, reader, arrival.start - now, arrival.finish);
            self.schedule(arrival.finish + self.ports.network_latency, Event::Complete(index));
            return;
        }
        let writer = self.flows.writer(flight.channel);
        let node = self.ports.node(writer as usize);
        for reader in self.flows.readers(flight.channel) {
            let rank = self.flows.reader(reader).rank;
            if self.ports.node(rank as usize) != node {
                continue;
            }
            let arrival = self.ports.read(rank as usize, flight.bytes, flight.departure.last, now);
            if self.watched[rank as usize] {
                self.bar(rank, writer, Side::Read, arrival.start, arrival.finish, flight.bytes);
            }
            self.deliver(flight, reader, arrival.start - now, arrival.finish);
        }
        self.free_flights.push(index);
    }

    fn deliver(&mut self, flight: Flight, reader: usize, in_wait: Time, finish: Time) {
        let Flight { posted, departure, record, .. } = flight;
        let nanoseconds = |time: Time| u32::try_from(time / 1000).unwrap_or(u32::MAX);
        let out_wait = nanoseconds(departure.start - posted);
        let message = Message { finish, posted, record, out_wait, in_wait: nanoseconds(in_wait) };
        self.ready.extend(self.flows.arrive(reader, message));
    }

    fn complete(&mut self, index: u32, now: Time) {
        let flight = self.flights[index as usize];
        self.free_flights.push(index);
        let rank = self.flows.writer(flight.channel) as usize;
        self.windows[rank].in_flight -= flight.bytes;
        while self.windows[rank].in_flight < self.window {
            match self.windows[rank].queue.pop_front() {
                Some(next) => self.launch(rank, next, now),
                None => break,
            }
        }
    }

    fn take(&mut self, pipeline: u32, rank: u32, writer: u32, channel: u32, reader: u16) -> bool {
        let channel = self.flows.id(writer, channel);
        let reader = self.flows.readers(channel).start + usize::from(reader);
        let Some(message) = self.flows.next(reader, pipeline) else {
            return false;
        };
        let network = self.ports.node(rank as usize) != self.ports.node(writer as usize);
        if message.finish > self.pipelines[pipeline as usize].time {
            let wait = if network { Wait::Network } else { Wait::Local };
            self.advance(pipeline, message.finish, wait, writer, message);
        }
        let back = if network { self.ports.network_latency } else { self.ports.local_latency };
        let PipelineState { time, record, .. } = self.pipelines[pipeline as usize];
        if let Some((waiting, free)) = self.flows.release(channel, reader, time + back, record) {
            self.schedule(free, Event::Run(waiting));
        }
        true
    }

    /// Records that the pipeline waited until `to`.
    fn advance(&mut self, pipeline: u32, to: Time, wait: Wait, peer: u32, message: Message) {
        let state = &mut self.pipelines[pipeline as usize];
        self.records.push(Record {
            pipeline,
            action: state.at - self.traces.pipelines[pipeline as usize].begin,
            wait,
            peer,
            // `NONE` if the sender had not waited since the start of the collective.
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
