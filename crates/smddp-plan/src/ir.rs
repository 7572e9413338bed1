//! The plan's words: collective, span, channel, step, lane, program.

/// What torch and the bench can ask for. `Barrier` moves tokens only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Collective {
    AllGather = 0,
    ReduceScatter = 1,
    AllReduce = 2,
    Broadcast = 3,
    Reduce = 4,
    Gather = 5,
    Scatter = 6,
    AllToAll = 7,
    Barrier = 8,
}

impl Collective {
    pub const ALL: [Self; 9] = [
        Self::AllGather,
        Self::ReduceScatter,
        Self::AllReduce,
        Self::Broadcast,
        Self::Reduce,
        Self::Gather,
        Self::Scatter,
        Self::AllToAll,
        Self::Barrier,
    ];

    /// Whether it combines the contributions of several ranks.
    pub const fn reduces(self) -> bool {
        matches!(self, Self::ReduceScatter | Self::AllReduce | Self::Reduce)
    }

    /// Whether one rank plays a part of its own.
    pub const fn has_root(self) -> bool {
        matches!(self, Self::Broadcast | Self::Reduce | Self::Gather | Self::Scatter)
    }
}

/// The question a planner answers, for one rank.
///
/// Blocks, by collective (`N` ranks, `me` this rank); each buffer is indexed by *its own* block numbers:
///
/// | collective | In | Out |
/// |---|---|---|
/// | all_gather | `me` only | `0..N`, block = contributing rank |
/// | reduce_scatter | `0..N`, block = receiving rank | `me` only |
/// | all_reduce | `0..N`, the buffer cut in N | `0..N` |
/// | broadcast | at the root `0..N`, the buffer cut in N | `0..N` (the root's own too) |
/// | reduce | `0..N` | at the root `0..N` |
/// | gather | `me` only | at the root `0..N` |
/// | scatter | at the root `0..N` | `me` only |
/// | all_to_all | block `d` goes to rank `d` | block `s` came from rank `s` |
/// | barrier | none | none |
///
/// Blocks may have any sizes, zero included. In every collective but all_to_all, block `b` has the same
/// size wherever it appears and every rank knows all sizes; in all_to_all a rank knows only its own row and
/// column, so a plan for uneven all_to_all (`uneven_pairs`) sends one block a message and never forwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ask {
    pub collective: Collective,
    pub rank: usize,
    pub size: usize,
    /// Root of broadcast, reduce, gather, scatter; 0 otherwise.
    pub root: usize,
    /// all_to_all whose pairs differ in size.
    pub uneven_pairs: bool,
    /// Reductions keep one order for every layout, see `algorithms/canonical.rs`.
    pub canonical: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Buffer {
    In,
    Out,
    /// Memory of the operation's own, as many blocks as [`Program::scratch_blocks`]; block `b` of Scratch has
    /// the size of block `b % N` of the collective (in all_to_all all blocks are equal when Scratch is used).
    Scratch,
}

/// Consecutive blocks of one buffer. `blocks == 0` is a token: one message without bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Span {
    pub buffer: Buffer,
    pub block: usize,
    pub blocks: usize,
}

impl Span {
    pub const fn new(buffer: Buffer, block: usize, blocks: usize) -> Self {
        Self { buffer, block, blocks }
    }
    pub const fn input(block: usize) -> Self {
        Self::new(Buffer::In, block, 1)
    }
    pub const fn output(block: usize) -> Self {
        Self::new(Buffer::Out, block, 1)
    }
    pub const fn scratch(block: usize) -> Self {
        Self::new(Buffer::Scratch, block, 1)
    }
    /// A message without bytes.
    pub const TOKEN: Self = Self::new(Buffer::In, 0, 0);
}

/// Which message a step reads: the next one of `rank`'s channel `channel`, of which I want some blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Source {
    pub rank: usize,
    /// Index among the *writer's* channels.
    pub channel: usize,
    /// My index in that channel's list of readers.
    pub reader: usize,
    /// The writer's span, as the writer names it (its buffer, its block numbers): fixes the message's layout.
    pub message: Span,
    /// Which of the message's blocks I take: the first, counted inside the message, and how many.
    pub take: (usize, usize),
}

impl Source {
    /// All of a message.
    pub const fn whole(rank: usize, channel: usize, reader: usize, message: Span) -> Self {
        Self { rank, channel, reader, message, take: (0, message.blocks) }
    }

    /// The blocks that I take, as the writer names them.
    pub const fn taken(&self) -> Span {
        Span::new(self.message.buffer, self.message.block + self.take.0, self.take.1)
    }
}

/// How the inputs of a reduction are combined.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub enum Association {
    /// One after the other: `((0 1) 2) 3`.
    #[default]
    InOrder,
    /// Input by input is laid on a stack, and after the `i`-th the two upper ones are combined `[i]` times, until one is left.
    Tree(Vec<usize>),
}

/// One verb. Every step works on one segment at a time: segment `s` of a span is, for each of its blocks,
/// bytes `[s*seg, (s+1)*seg)` cut to the block's length, packed one behind the other. A step skips a segment
/// that none of its span's blocks has; a token has exactly one.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// Write `source` into my next cell of `channel` and publish it; `tee` keeps it in Out too, in one read.
    Send { channel: usize, source: Span, tee: Option<Span> },
    /// Take blocks of a message into `to`; `forward` also writes what was taken into my next cell of that
    /// channel, in one read.
    Receive { from: Source, to: Span, forward: Option<usize> },
    /// Reduce what `from` brings and, at position `own.0` of that order, my own span `own.1`, in one pass.
    /// The result goes to `to` and/or into my next cell of `send`. The order of the inputs is rank order
    /// wherever the algorithm has a choice. `finish`: the result has every rank's contribution (this is
    /// where avg divides).
    Reduce {
        from: Vec<Source>,
        own: Option<(usize, Span)>,
        to: Option<Span>,
        send: Option<usize>,
        finish: bool,
        association: Association,
    },
    /// Copy between my own buffers. Skipped at run time where both are the same memory. `finish` as in Reduce
    /// (a group of one divides by one here).
    Copy { source: Span, to: Span, finish: bool },
}

impl Step {
    /// The message that this step publishes: my channel, and the span that its readers must name in
    /// [`Source::message`]. A fused step's message is named after where its result is kept (`to`), and where it
    /// is not kept after its own input, or else after the blocks taken from the first source.
    pub fn published(&self) -> Option<(usize, Span)> {
        match *self {
            Step::Send { channel, source, .. } => Some((channel, source)),
            Step::Receive { to, forward, .. } => forward.map(|channel| (channel, to)),
            Step::Reduce { ref from, own, to, send, .. } => {
                let taken = || from.first().map(Source::taken);
                let span = to.or(own.map(|(_, span)| span)).or_else(taken)?;
                send.map(|channel| (channel, span))
            }
            _ => None,
        }
    }

    /// The messages that this step reads.
    pub fn sources(&self) -> &[Source] {
        match self {
            Step::Receive { from, .. } => std::slice::from_ref(from),
            Step::Reduce { from, .. } => from,
            _ => &[],
        }
    }
}

/// A step and how many segments behind the lane's loop it runs.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Timed {
    pub lag: usize,
    pub step: Step,
}

/// A loop `for it in 0..segments + max_lag`, each step doing segment `it - lag`.
pub type Lane = Vec<Timed>;

/// One writer's ordered flow to fixed readers: first in, first out; the k-th message written is the k-th
/// read. Never mix flows of different lag on one channel.
///
/// Hierarchical plans have all readers of a channel in the writer's node, whom one write reaches, or none, whom a link
/// serves one by one; it should begin behind the writer's own rank and wrap, so that writers do not all begin with rank 0.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Channel {
    /// Ascending, without the writer.
    pub readers: Vec<usize>,
}

/// One rank's part of a plan.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Program {
    /// Channels that I write.
    pub channels: Vec<Channel>,
    pub lanes: Vec<Lane>,
    pub scratch_blocks: usize,
}

impl Program {
    pub fn lane(channels: Vec<Channel>, lane: Lane) -> Self {
        Self { channels, lanes: vec![lane], scratch_blocks: 0 }
    }
}

/// My index among the readers of a channel that goes from `writer` to everybody else.
pub const fn reader_of_all(writer: usize, me: usize) -> usize {
    if me < writer { me } else { me - 1 }
}
