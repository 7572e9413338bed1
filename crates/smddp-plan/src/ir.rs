//! Intermediate representation of plans: collective, span, channel, step, pipeline, program.

/// Collective operations. `Barrier` transfers tokens only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Collective {
    /// Every rank receives the inputs of all ranks.
    AllGather = 0,
    /// Every rank receives one block of the combined inputs.
    ReduceScatter = 1,
    /// Every rank receives the combined inputs.
    AllReduce = 2,
    /// Every rank receives the buffer of the root.
    Broadcast = 3,
    /// The root receives the combined inputs.
    Reduce = 4,
    /// The root receives the inputs of all ranks.
    Gather = 5,
    /// Every rank receives one block of the root's buffer.
    Scatter = 6,
    /// Every rank sends one block to each rank.
    AllToAll = 7,
    /// No rank leaves before all ranks have entered.
    Barrier = 8,
}

impl Collective {
    /// All collectives, in the order of their numbers.
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

    /// Returns true if the collective combines the contributions of several ranks.
    pub const fn reduces(self) -> bool {
        matches!(self, Self::ReduceScatter | Self::AllReduce | Self::Reduce)
    }

    /// Returns true if the collective has a root rank.
    pub const fn has_root(self) -> bool {
        matches!(self, Self::Broadcast | Self::Reduce | Self::Gather | Self::Scatter)
    }
}

/// Parameters of a plan for one rank.
///
/// Blocks by collective (`N` ranks, `me` is this rank). Each buffer is indexed by its own block numbers:
///
/// | collective | In | Out |
/// |---|---|---|
/// | all_gather | `me` only | `0..N`, block = contributing rank |
/// | reduce_scatter | `0..N`, block = receiving rank | `me` only |
/// | all_reduce | `0..N`, the buffer divided into N | `0..N` |
/// | broadcast | at the root `0..N`, the buffer divided into N | `0..N` (also at the root) |
/// | reduce | `0..N` | at the root `0..N` |
/// | gather | `me` only | at the root `0..N` |
/// | scatter | at the root `0..N` | `me` only |
/// | all_to_all | block `d` goes to rank `d` | block `s` comes from rank `s` |
/// | barrier | none | none |
///
/// Blocks may have any size, including zero. Except in all_to_all, block `b` has the same size in every
/// buffer and all ranks have all sizes. In all_to_all a rank has only the sizes of one row and one column,
/// its own. A plan for uneven all_to_all (`uneven_pairs`) therefore sends one block per message and never
/// forwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PlanRequest {
    /// Collective of the call.
    pub collective: Collective,
    /// Rank whose program is requested.
    pub rank: usize,
    /// Number of ranks.
    pub size: usize,
    /// Root of broadcast, reduce, gather, scatter; 0 otherwise.
    pub root: usize,
    /// True for an all_to_all whose pairs differ in size.
    pub uneven_pairs: bool,
    /// Requires one reduction order for every layout; see `algorithms/canonical.rs`.
    pub canonical: bool,
}

/// Buffer of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Buffer {
    /// Input of the caller.
    In,
    /// Output of the caller.
    Out,
    /// Temporary memory of the operation with [`Program::scratch_blocks`] blocks. Block `b` of Scratch has
    /// the size of block `b % N` of the collective. In all_to_all all blocks are equal when Scratch is used.
    Scratch,
}

/// Consecutive blocks of one buffer. `blocks == 0` is a token: one message without payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Span {
    /// Buffer that contains the blocks.
    pub buffer: Buffer,
    /// Number of the first block.
    pub block: usize,
    /// Number of blocks.
    pub blocks: usize,
}

impl Span {
    /// Returns a span of `blocks` blocks from `block` on.
    pub const fn new(buffer: Buffer, block: usize, blocks: usize) -> Self {
        Self { buffer, block, blocks }
    }
    /// Returns one block of In.
    pub const fn input(block: usize) -> Self {
        Self::new(Buffer::In, block, 1)
    }
    /// Returns one block of Out.
    pub const fn output(block: usize) -> Self {
        Self::new(Buffer::Out, block, 1)
    }
    /// Returns one block of Scratch.
    pub const fn scratch(block: usize) -> Self {
        Self::new(Buffer::Scratch, block, 1)
    }
    /// A message without payload.
    pub const TOKEN: Self = Self::new(Buffer::In, 0, 0);
}

/// Message that a step reads: the next message on `channel` of `rank`, and the blocks to take from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Source {
    /// Rank that writes the message.
    pub rank: usize,
    /// Index among the channels of the writer.
    pub channel: usize,
    /// Index of this rank in the reader list of the channel.
    pub reader: usize,
    /// Span of the message with the buffer and block numbers of the writer. It defines the message layout.
    pub message: Span,
    /// Blocks to take: the first block within the message, and the number of blocks.
    pub take: (usize, usize),
}

impl Source {
    /// Takes all blocks of a message.
    pub const fn whole(rank: usize, channel: usize, reader: usize, message: Span) -> Self {
        Self { rank, channel, reader, message, take: (0, message.blocks) }
    }

    /// Returns the blocks to take with the block numbers of the writer.
    pub const fn taken(&self) -> Span {
        Span::new(self.message.buffer, self.message.block + self.take.0, self.take.1)
    }
}

/// Combination order of the inputs of a reduction.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub enum Association {
    /// Left to right: `((0 1) 2) 3`.
    #[default]
    InOrder,
    /// Stack order: pushes each input and, after the `i`-th, combines the two topmost entries `[i]` times.
    /// One entry remains at the end.
    Tree(Vec<usize>),
}

/// One operation of a pipeline. A step processes one segment at a time. Segment `s` of a span is bytes
/// `[s*seg, (s+1)*seg)` of each of its blocks, concatenated. It is shorter at the end of a block. A step
/// skips a segment that none of its blocks has. A token has exactly one segment.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// Writes `source` into the next slot of `channel` and publishes it. `tee` also stores it in Out, with a
    /// single read of the source.
    Send {
        /// Index among the channels of this rank.
        channel: usize,
        /// Local blocks to send.
        source: Span,
        /// Second destination of the blocks.
        tee: Option<Span>,
    },
    /// Copies blocks of a message to `to`. `forward` also writes these blocks into the next slot of that
    /// channel, with a single read of the message.
    Receive {
        /// Message to read.
        from: Source,
        /// Destination of the blocks.
        to: Span,
        /// Index of the channel that also gets the blocks.
        forward: Option<usize>,
    },
    /// Reduces the messages `from` and, at position `own.0` of the inputs, the local span `own.1` in one
    /// pass. The result goes to `to`, into the next slot of `send`, or to both. Inputs are in rank order
    /// unless the algorithm requires another order. `finish` marks a result with the contributions of all
    /// ranks; avg divides at this step.
    Reduce {
        /// Messages to reduce.
        from: Vec<Source>,
        /// Position among the inputs and span of the local input.
        own: Option<(usize, Span)>,
        /// Local destination of the result.
        to: Option<Span>,
        /// Index of the channel that gets the result.
        send: Option<usize>,
        /// True if the result has the contributions of all ranks.
        finish: bool,
        /// Order in which inputs are combined.
        association: Association,
    },
    /// Copies between local buffers. The executor skips it if both spans are the same memory. `finish` is as
    /// in `Reduce`: a group of one rank divides by one here.
    Copy {
        /// Blocks to copy.
        source: Span,
        /// Destination of the blocks.
        to: Span,
        /// True if the result has the contributions of all ranks.
        finish: bool,
    },
}

impl Step {
    /// Returns the channel and the span of the message that this step publishes. Readers must use the same
    /// span in [`Source::message`]. The span of a fused step is its destination `to`. Without `to` it is the
    /// own input, or the blocks taken from the first source.
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

    /// Returns the messages that this step reads.
    pub fn sources(&self) -> &[Source] {
        match self {
            Step::Receive { from, .. } => std::slice::from_ref(from),
            Step::Reduce { from, .. } => from,
            _ => &[],
        }
    }
}

/// A step, and its delay behind the loop of the pipeline in segments.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Timed {
    /// Delay in segments.
    pub lag: usize,
    /// The step.
    pub step: Step,
}

/// A software pipeline: the loop `for it in 0..segments + max_lag`. Iteration `it` of a step processes
/// segment `it - lag`.
pub type Pipeline = Vec<Timed>;

/// Ordered message stream from one writer to fixed readers: first in, first out. The k-th message written is
/// the k-th message read. All messages of a channel have the same lag.
///
/// In hierarchical plans all readers of a channel are on the writer's node, where one write reaches them, or
/// none is. Readers on other nodes are served one by one. Serving starts behind the rank of the writer and
/// wraps around, so that not all writers begin with rank 0.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Channel {
    /// Ascending, without the writer.
    pub readers: Vec<usize>,
}

/// Plan of one rank.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Program {
    /// Channels that this rank writes.
    pub channels: Vec<Channel>,
    /// Pipelines, which run concurrently.
    pub pipelines: Vec<Pipeline>,
    /// Number of Scratch blocks.
    pub scratch_blocks: usize,
}

impl Program {
    /// Returns a program of one pipeline without Scratch blocks.
    pub fn single_pipeline(channels: Vec<Channel>, pipeline: Pipeline) -> Self {
        Self { channels, pipelines: vec![pipeline], scratch_blocks: 0 }
    }
}

/// Returns the index of `me` among the readers of a channel from `writer` to all other ranks.
pub const fn reader_of_all(writer: usize, me: usize) -> usize {
    if me < writer { me } else { me - 1 }
}
