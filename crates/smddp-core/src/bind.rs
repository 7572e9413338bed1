//! A program meets sizes: offsets, segments, cells, wiring. The result is kept and used again.

use std::sync::{Arc, OnceLock};

use smddp_plan::{
    Ask, Buffer, Choice, Collective, Counts, Decision, Group, Memory, Network, Program, Shape, Source, Span,
    Step, Topology, decide, plan,
};
use smddp_transport::{Head, Inlet, Outlet, Reach, Wired, Wiring};

use crate::call::{name_of, reduces, rooted};
use crate::config::Config;
use crate::device::{self, Place, Way};
use crate::error::{Error, Result};
use crate::head;
use crate::network::Known;
use crate::reduce::Kernel;
use crate::types::{DType, RedOp};

/// What a binding depends on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Key {
    pub(crate) collective: Collective,
    pub(crate) dtype: DType,
    /// Code of the reduction, 0 where there is none.
    pub(crate) redop: u8,
    /// Bits of what each rank multiplies its input by, 0 where it does not.
    pub(crate) factor: u64,
    pub(crate) root: usize,
    pub(crate) counts: Counts,
    /// The buffers are a device's.
    pub(crate) device: Option<Place>,
}

/// Blocks of one buffer, ready to be walked: numbers into the tables of [`Bound`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) buffer: Buffer,
    pub(crate) block: usize,
    pub(crate) blocks: usize,
    /// Segments of the longest block; 1 for a token.
    pub(crate) segments: usize,
    /// Offset of the first block, and bytes of all, where they lie in a row and are one segment: then the blocks are
    /// one piece of memory (unless the caller gave a list).
    pub(crate) row: Option<(usize, usize)>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct From {
    pub(crate) inlet: usize,
    /// The message as its writer laid it out (block numbers of the tables), and which blocks of it are taken.
    pub(crate) message: Run,
    pub(crate) skip: usize,
    /// Bytes of the blocks before, in the first segment.
    pub(crate) skip_bytes: usize,
}

#[derive(Clone, Debug)]
pub(crate) enum Act {
    Send {
        channel: usize,
        source: Run,
        tee: Option<Run>,
    },
    Receive {
        from: From,
        to: Run,
        forward: Option<usize>,
    },
    Reduce {
        from: Vec<From>,
        own: Option<(usize, Run)>,
        result: Run,
        to: bool,
        send: Option<usize>,
        finish: bool,
    },
    Copy {
        source: Run,
        to: Run,
        finish: bool,
    },
}

#[derive(Clone, Debug)]
pub(crate) struct Bound {
    pub(crate) choice: Choice,
    pub(crate) kernel: Option<Kernel>,
    pub(crate) lanes: Vec<Vec<(usize, Act)>>,
    /// Turns of each lane's loop.
    pub(crate) turns: Vec<usize>,
    pub(crate) wiring: Arc<Wiring>,
    /// The same with the ways of its channels.
    pub(crate) wired: Wired,
    /// Offsets in bytes of the blocks of In, Out, Scratch when each is one flat buffer.
    pub(crate) offsets: [Vec<usize>; 3],
    /// Bytes of the blocks of In, Out, Scratch.
    pub(crate) lengths: [Vec<usize>; 3],
    pub(crate) scratch: usize,
    /// On a device: whether each outlet's and each inlet's messages are by reference.
    pub(crate) near: [Vec<bool>; 2],
    /// The header: operation, dtype, root, plan; and how many elements, see `head::count`.
    pub(crate) head: Head,
    /// Whole buffer, as nccl-tests counts it.
    pub(crate) bytes: usize,
}

const fn index(buffer: Buffer) -> usize {
    match buffer {
        Buffer::In => 0,
        Buffer::Out => 1,
        Buffer::Scratch => 2,
    }
}

impl Bound {
    pub(crate) fn segment(&self, length: usize, segment: usize) -> usize {
        let start = (segment * self.choice.segment).min(length);
        self.choice.segment.min(length - start)
    }

    pub(crate) fn length(&self, buffer: Buffer, block: usize) -> usize {
        self.lengths[index(buffer)][block]
    }

    pub(crate) fn table(buffer: Buffer) -> usize {
        index(buffer)
    }
}

fn running(lengths: &[usize]) -> Vec<usize> {
    let mut at = 0;
    lengths
        .iter()
        .map(|length| {
            at += length;
            at - length
        })
        .collect()
}

struct Sizes {
    tables: [Vec<usize>; 3],
    offsets: [Vec<usize>; 3],
}

fn sizes(key: &Key, decision: &Decision) -> Sizes {
    let [lengths, output] = &decision.blocks;
    // A buffer that holds only this rank's block has it at its beginning.
    let alone = || vec![0; lengths.len()];
    let (own_in, own_out) = match key.collective {
        Collective::AllGather | Collective::Gather => (true, false),
        Collective::ReduceScatter | Collective::Scatter => (false, true),
        _ => (false, false),
    };
    Sizes {
        offsets: [
            if own_in { alone() } else { running(lengths) },
            if own_out { alone() } else { running(output) },
            Vec::new(),
        ],
        tables: [lengths.clone(), output.clone(), Vec::new()],
    }
}

/// Where this rank stands in its group.
#[derive(Clone, Debug)]
pub(crate) struct Site {
    pub(crate) rank: usize,
    pub(crate) topology: Topology,
    /// Payload of a slot; 0 where ranks are on several nodes.
    pub(crate) slot: usize,
    /// How it reaches the other ranks.
    pub(crate) reach: Arc<Reach>,
    /// What the way between nodes is taken to be like.
    pub(crate) assumed: Network,
    /// What is known of the network between nodes; set before the first call, if at all, and to the same on all ranks.
    pub(crate) network: OnceLock<Known>,
}

impl Site {
    /// `way`: how a link says that other nodes are reached.
    pub(crate) fn assumed(way: &str) -> Network {
        if way.starts_with("fabric efa") { Network::PACED } else { Network::ASSUMED }
    }

    /// Rates are measured; how well a way shares its links is its nature.
    fn network(&self) -> Network {
        let incast = self.assumed.incast;
        self.network.get().map_or(self.assumed, |known| Network { incast, ..known.network })
    }

    pub(crate) fn group(&self) -> Group<'_> {
        Group { topology: &self.topology, slot: self.slot, network: self.network() }
    }
}

impl Key {
    /// What the choice may depend on.
    pub(crate) fn shape(&self) -> Shape {
        Shape {
            collective: self.collective,
            element: self.dtype.size(),
            half: self.dtype.is_half(),
            counts: self.counts.clone(),
            memory: match self.device {
                None => Memory::Host,
                Some(Place { way: Way::Host, .. }) => Memory::Bounced,
                Some(Place { way: Way::Reference, .. }) => Memory::Reference,
            },
        }
    }
}

/// What the planner decides about a call.
pub(crate) fn decided(key: &Key, site: &Site, config: &Config) -> Decision {
    decide(&key.shape(), &site.group(), &config.plans())
}

/// A decision in words, as `smddp info` and tables have it.
pub(crate) fn told(way: &str, decision: &Decision) -> String {
    let Choice { algorithm, segment, .. } = decision.choice;
    let cells = decision.choice.window();
    if decision.inline {
        return format!("{way} {}, one message", algorithm.name());
    }
    format!("{way} {}, segments of {} KiB, {cells} cells", algorithm.name(), segment.div_ceil(1024))
}

/// The kernel of a reducing collective; an error where its dtype cannot be reduced so.
fn kernel(key: &Key) -> Result<Option<Kernel>> {
    if !reduces(key.collective) {
        return Ok(None);
    }
    let redop = RedOp::from_code(key.redop, 1.0).unwrap_or(RedOp::Sum);
    let kernel = Kernel::new(key.dtype, redop).ok_or_else(|| {
        Error::Invalid(format!(
            "{}: {} of {} is not defined",
            name_of(key.collective),
            redop.name(),
            key.dtype.name()
        ))
    })?;
    Ok(Some(kernel))
}

pub(crate) fn bind(key: &Key, site: &Site, config: &Config) -> Result<Bound> {
    let (rank, n) = (site.rank, site.topology.size());
    let kernel = kernel(key)?;
    let decision = decided(key, site, config);
    let choice = decision.choice;
    let ask = Ask {
        collective: key.collective,
        rank,
        size: n,
        root: if rooted(key.collective) { key.root } else { 0 },
        uneven_pairs: decision.uneven_pairs(),
    };
    let program = plan(choice.algorithm, &ask, &site.topology).ok_or_else(|| {
        Error::Invalid(format!(
            "{}: algorithm {} does not do this collective on {n} ranks (SMDDP_ALGO?)",
            name_of(key.collective),
            choice.algorithm.name()
        ))
    })?;
    let by_reference = key.device.is_some_and(|place| place.way == Way::Reference);
    if by_reference && device::rewrites(&program) {
        return Err(Error::Invalid(format!(
            "{}: algorithm {} writes where others still read, which memory of a device does not allow (SMDDP_ALGO?)",
            name_of(key.collective),
            choice.algorithm.name()
        )));
    }
    let mut bound = Bound { kernel, ..Binder::new(key, n, &decision, &program).finish(program) };
    if let Some(place) = key.device {
        on_device(&mut bound, place, site);
    }
    bound.wired = site.reach.wire(&bound.wiring);
    Ok(bound)
}

/// Messages of a node that go by reference are a few words each.
fn on_device(bound: &mut Bound, place: Place, site: &Site) {
    let near = |rank: usize| place.way == Way::Reference && site.topology.share_node(rank, site.rank);
    let wiring = Arc::make_mut(&mut bound.wiring);
    bound.near = [
        wiring.outlets.iter().map(|o| o.readers.first().is_some_and(|&reader| near(reader))).collect(),
        wiring.inlets.iter().map(|i| near(i.rank)).collect(),
    ];
    let outlets = wiring.outlets.iter_mut().zip(&bound.near[0]).filter(|(_, near)| **near);
    outlets.for_each(|(outlet, _)| outlet.cell = device::DESCRIPTOR);
    let inlets = wiring.inlets.iter_mut().zip(&bound.near[1]).filter(|(_, near)| **near);
    inlets.for_each(|(inlet, _)| inlet.cell = device::DESCRIPTOR);
    // All ranks are on a device, and on the same of the group's.
    bound.head.what |= head::on_device(place.site);
}

struct Binder {
    bound: Bound,
    inlets: Vec<Inlet>,
    uneven_pairs: bool,
    /// Decided by all ranks alike, since a slot carries one message.
    inline: bool,
}

impl Binder {
    fn new(key: &Key, n: usize, decision: &Decision, program: &Program) -> Self {
        let (choice, uneven_pairs) = (decision.choice, decision.uneven_pairs());
        let mut s = sizes(key, decision);
        // Messages have the names of their writers' spans, and a peer may have more Scratch than this rank.
        let sources = program.lanes.iter().flatten().flat_map(|timed| timed.step.sources());
        let named = sources.filter(|source| source.message.buffer == Buffer::Scratch);
        let named = named.map(|source| source.message.block + source.message.blocks).max().unwrap_or(0);
        let scratch: Vec<usize> =
            (0..program.scratch_blocks.max(named)).map(|b| s.tables[0][b % n]).collect();
        s.offsets[2] = running(&scratch.iter().map(|l| l.next_multiple_of(64)).collect::<Vec<_>>());
        let total = scratch[..program.scratch_blocks].iter().map(|l| l.next_multiple_of(64)).sum();
        s.tables[2] = scratch;
        let bound = Bound {
            choice,
            kernel: None,
            lanes: Vec::new(),
            turns: Vec::new(),
            wiring: Arc::default(),
            wired: Wired::default(),
            offsets: s.offsets,
            lengths: s.tables,
            scratch: total,
            near: Default::default(),
            head: head::of(key, decision),
            bytes: decision.bytes(),
        };
        Self { bound, inlets: Vec::new(), uneven_pairs, inline: decision.inline }
    }

    fn segments(&self, lengths: impl Iterator<Item = usize>, blocks: usize) -> usize {
        if blocks == 0 {
            return 1;
        }
        lengths.map(|l| l.div_ceil(self.bound.choice.segment)).max().unwrap_or(0)
    }

    fn run(&self, span: Span) -> Run {
        let table = &self.bound.lengths[index(span.buffer)];
        let offsets = &self.bound.offsets[index(span.buffer)];
        let range = span.block..span.block + span.blocks;
        let segments = self.segments(range.clone().map(|b| table[b]), span.blocks);
        let mut next = offsets.get(span.block).copied().unwrap_or(0);
        let (first, mut in_a_row) = (next, segments <= 1);
        for block in range {
            in_a_row &= offsets[block] == next;
            next += table[block];
        }
        let row = in_a_row.then_some((first, next - first));
        Run { buffer: span.buffer, block: span.block, blocks: span.blocks, segments, row }
    }

    fn bytes(&self, run: Run) -> u64 {
        (run.block..run.block + run.blocks).map(|b| self.bound.lengths[index(run.buffer)][b] as u64).sum()
    }

    /// Bytes of a run's first segment, which is its largest.
    fn first_segment(&self, run: Run) -> usize {
        let blocks = run.block..run.block + run.blocks;
        blocks.map(|b| self.bound.segment(self.bound.length(run.buffer, b), 0)).sum()
    }

    /// `to`: the span that takes it, which alone tells the size where only the pair knows it.
    fn from(&mut self, source: &Source, to: Option<Span>) -> From {
        let message = if self.uneven_pairs {
            to.map_or(Run { buffer: Buffer::In, block: 0, blocks: 0, segments: 1, row: None }, |to| {
                self.run(to)
            })
        } else {
            self.run(source.message)
        };
        let bytes = self.bytes(message);
        let messages = message.segments as u64;
        let known = self.inlets.iter().position(|i| i.rank == source.rank && i.channel == source.channel);
        let inlet = known.unwrap_or_else(|| {
            self.inlets.push(Inlet {
                rank: source.rank,
                channel: source.channel,
                reader: source.reader,
                cell: 0,
                messages: 0,
                bytes: 0,
            });
            self.inlets.len() - 1
        });
        self.inlets[inlet].messages += messages;
        self.inlets[inlet].cell = self.inlets[inlet].cell.max(self.first_segment(message));
        self.inlets[inlet].bytes += bytes;
        let before =
            (message.block..message.block + source.take.0).map(|b| self.bound.length(message.buffer, b));
        let skip_bytes = before.map(|length| self.bound.segment(length, 0)).sum();
        From { inlet, message, skip: source.take.0, skip_bytes }
    }

    fn act(&mut self, step: &Step) -> (Act, usize) {
        match step {
            Step::Send { channel, source, tee } => {
                let source = self.run(*source);
                (Act::Send { channel: *channel, source, tee: tee.map(|t| self.run(t)) }, source.segments)
            }
            Step::Receive { from, to, forward } => {
                let from = self.from(from, Some(*to));
                let act = Act::Receive { from, to: self.run(*to), forward: *forward };
                (act, from.message.segments)
            }
            Step::Reduce { from, own, to, send, finish } => {
                let result = match (to, own, from.first()) {
                    (Some(to), ..) => *to,
                    (None, Some((_, own)), _) => *own,
                    (None, None, Some(f)) => {
                        Span::new(f.message.buffer, f.message.block + f.take.0, f.take.1)
                    }
                    (None, None, None) => Span::TOKEN,
                };
                let result = self.run(result);
                let from: Vec<From> = from.iter().map(|f| self.from(f, None)).collect();
                let segments =
                    from.iter().map(|f| f.message.segments).chain([result.segments]).max().unwrap_or(0);
                let own = own.map(|(at, span)| (at, self.run(span)));
                (Act::Reduce { from, own, result, to: to.is_some(), send: *send, finish: *finish }, segments)
            }
            Step::Copy { source, to, finish } => {
                let (source, to) = (self.run(*source), self.run(*to));
                (Act::Copy { source, to, finish: *finish }, source.segments)
            }
        }
    }

    fn finish(mut self, program: Program) -> Bound {
        let mut outlets: Vec<Outlet> = program
            .channels
            .into_iter()
            .map(|c| Outlet { readers: c.readers, cell: 0, messages: 0, bytes: 0 })
            .collect();
        for lane in &program.lanes {
            let mut acts: Vec<(usize, Act, usize)> = lane
                .iter()
                .map(|timed| {
                    let (act, segments) = self.act(&timed.step);
                    (timed.lag, act, segments)
                })
                .filter(|(_, _, segments)| *segments > 0)
                .collect();
            // One segment only: a straight line, in the order of the lags.
            if acts.iter().all(|(_, _, segments)| *segments <= 1) {
                acts.sort_by_key(|(lag, ..)| *lag);
                acts.iter_mut().for_each(|(lag, ..)| *lag = 0);
            }
            for (_, act, _) in &acts {
                let (channel, run) = match act {
                    Act::Send { channel, source, .. } => (*channel, *source),
                    Act::Receive { forward: Some(channel), to, .. } => (*channel, *to),
                    Act::Reduce { send: Some(channel), result, .. } => (*channel, *result),
                    _ => continue,
                };
                let largest = self.first_segment(run);
                let outlet = &mut outlets[channel];
                outlet.cell = outlet.cell.max(largest);
                outlet.messages += run.segments as u64;
                outlet.bytes += self.bytes(run);
            }
            self.bound.turns.push(acts.iter().map(|(lag, _, segments)| lag + segments).max().unwrap_or(0));
            self.bound.lanes.push(acts.into_iter().map(|(lag, act, _)| (lag, act)).collect());
        }
        let most = outlets.iter().map(|o| o.messages).max().unwrap_or(0) as usize;
        // One cell does for one message; more messages need two, or a writer waits for a reader that waits for it.
        let least = if most <= 1 { 1 } else { 2 };
        let want = self.bound.choice.depth.min(most);
        let window = self.bound.choice.window();
        let depth = (want.max(least), least);
        let (inlets, inline) = (self.inlets, self.inline);
        self.bound.wiring = Arc::new(Wiring { outlets, inlets, inline, depth, window });
        self.bound
    }
}

/// Recently used bindings of one communicator, the last used first.
#[derive(Default)]
pub(crate) struct Cache {
    kept: Vec<(Key, Arc<Bound>)>,
    /// Calls that were bound so far.
    pub(crate) made: u64,
}

const KEPT: usize = 64;

impl Cache {
    /// The binding of `key`; made by `bind` where it is not kept.
    pub(crate) fn get_or_bind(
        &mut self,
        key: Key,
        bind: impl FnOnce(&Key) -> Result<Bound>,
    ) -> Result<&Arc<Bound>> {
        let at = match self.kept.iter().position(|(k, _)| *k == key) {
            Some(found) => {
                // Halfway to the front: two calls in turns do not push each other around.
                self.kept.swap(found, found / 2);
                found / 2
            }
            None => {
                let bound = Arc::new(bind(&key)?);
                self.made += 1;
                if self.kept.len() >= KEPT {
                    self.kept.pop();
                }
                self.kept.insert(0, (key, bound));
                0
            }
        };
        Ok(&self.kept[at].1)
    }
}
