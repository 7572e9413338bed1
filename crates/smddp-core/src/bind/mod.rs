//! Binding of plans to sizes: offsets, segments, staging slots and routes. Bound calls are cached.

mod binder;
mod cache;
mod staging_check;
mod zero_copy;

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use smddp_base::{CallFingerprint, Channels};
use smddp_group::{RoutedChannels, Routes};
use smddp_plan::format::{AlgorithmVariant, variant_name};
use smddp_plan::{
    Association, Buffer, Choice, Collective, Decision, Format, Formats, GroupShape, Memory, Network,
    PlanRequest, Program, Reason, Settings, Step, Topology, decide, plan,
};
use smddp_process::SingleCopy;

pub(crate) use self::cache::Cache;
pub(crate) use self::staging_check::check;
pub(crate) use self::zero_copy::{ZeroCopy, ZeroCopyCandidate};
use crate::call::fingerprint;
use crate::call::key::Key;
use crate::call::name_of;
use crate::call::types::{DType, RedOp};
use crate::config::network::NetworkEstimate;
use crate::config::{CanonicalOrder, Config};
use crate::error::{Error, Result};
use crate::kernels::Kernel;
use crate::kernels::float_mode::DefaultFloatMode;
use crate::kernels::helpers::has_helpers;
use crate::log::{self, Level};

/// A range of blocks of one buffer. The numbers index the tables of [`BoundCall`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockRun {
    pub(crate) buffer: Buffer,
    pub(crate) block: usize,
    pub(crate) blocks: usize,
    /// Number of segments of the longest block; 1 for a token.
    pub(crate) segments: usize,
    /// Offset of the first block and bytes of all blocks, if they are adjacent and have one segment. The blocks are
    /// then one contiguous range, unless the caller passed a list of addresses.
    pub(crate) contiguous: Option<(usize, usize)>,
}

impl BlockRun {
    pub(crate) fn range(self) -> Range<usize> {
        self.block..self.block + self.blocks
    }
}

/// The blocks that a step takes from a message.
#[derive(Clone, Copy, Debug)]
pub(crate) struct IncomingMessage {
    pub(crate) recv_channel: usize,
    /// The whole message, in the block numbers of its sender.
    pub(crate) message: BlockRun,
    /// Number of blocks before the taken ones, and their bytes in the first segment.
    pub(crate) skipped_blocks: usize,
    pub(crate) first_skipped_bytes: usize,
}

/// A step with bound sizes; see [`smddp_plan::Step`].
#[derive(Clone, Debug)]
pub(crate) enum BoundStep {
    Send { channel: usize, source: BlockRun, tee: Option<BlockRun> },
    Receive { from: IncomingMessage, to: BlockRun, forward: Option<usize> },
    Reduce(Reduce),
    Copy { source: BlockRun, to: BlockRun, finish: bool },
}

/// A reduction of messages, and optionally of this rank's own input.
#[derive(Clone, Debug)]
pub(crate) struct Reduce {
    pub(crate) from: Vec<IncomingMessage>,
    /// This rank's own input, and its position among the sources.
    pub(crate) own: Option<(usize, BlockRun)>,
    pub(crate) result: BlockRun,
    /// True if the result is stored in a buffer of this rank.
    pub(crate) keep: bool,
    pub(crate) send: Option<usize>,
    pub(crate) finish: bool,
    pub(crate) association: Association,
}

/// A plan bound to the sizes, channels and routes of one call. Pipelines hold (lag, step).
#[derive(Clone, Debug)]
pub(crate) struct BoundCall {
    pub(crate) choice: Choice,
    pub(crate) kernel: Option<Kernel>,
    pub(crate) pipelines: Vec<Vec<(usize, BoundStep)>>,
    /// Loop iterations of each pipeline.
    pub(crate) iterations: Vec<usize>,
    pub(crate) channel_layout: Arc<Channels>,
    /// The same channels with their routes.
    pub(crate) routed: RoutedChannels,
    /// Byte offsets of the blocks of In, Out and Scratch, if each is one flat buffer.
    pub(crate) offsets: [Vec<usize>; 3],
    /// Bytes of the blocks of In, Out and Scratch.
    pub(crate) lengths: [Vec<usize>; 3],
    pub(crate) scratch: usize,
    /// Device memory only: true for each send channel and each receive channel whose messages are passed by
    /// reference.
    pub(crate) by_reference: [Vec<bool>; 2],
    /// Messages that bypass the staging slots.
    pub(crate) zero_copy: ZeroCopy,
    /// Format of messages between nodes; `None` for uncompressed calls.
    pub(crate) compression: Option<Compression>,
    /// Fingerprint of the call: operation, dtype, root, plan and element count. See `fingerprint::count`.
    pub(crate) fingerprint: CallFingerprint,
    /// Bytes of the whole buffer, as nccl-tests counts them.
    pub(crate) bytes: usize,
}

/// Compression between nodes. If all ranks receive the same data, the rank that has it first rounds its own copy,
/// too.
#[derive(Clone, Debug)]
pub(crate) struct Compression {
    pub(crate) format: Format,
    /// Per send channel and per receive channel: true if the peer is on another node.
    pub(crate) sends: Vec<bool>,
    pub(crate) receives: Vec<bool>,
    /// Inputs are rounded, because all ranks receive them.
    pub(crate) rounds_inputs: bool,
    /// Results of finished reductions are rounded, because all ranks receive them.
    pub(crate) rounds_results: bool,
}

impl Compression {
    fn new(format: Format, collective: Collective) -> Self {
        let equal_results = matches!(collective, Collective::AllGather | Collective::AllReduce);
        let reduces = collective.reduces();
        let (rounds_inputs, rounds_results) = (equal_results && !reduces, equal_results && reduces);
        Self { format, sends: Vec::new(), receives: Vec::new(), rounds_inputs, rounds_results }
    }

    /// Returns true if data read from `source` must be rounded.
    pub(crate) fn rounds(&self, source: BlockRun) -> bool {
        self.rounds_inputs && source.buffer == Buffer::In
    }

    /// Wire bytes of `bytes` bytes of a block.
    #[inline]
    pub(crate) fn size(&self, compressed: bool, bytes: usize) -> usize {
        if compressed { self.format.bytes(bytes / size_of::<f32>()) } else { bytes }
    }
}

impl BoundCall {
    /// The algorithm and the wire format between nodes.
    pub(crate) fn variant(&self) -> AlgorithmVariant {
        (self.choice.algorithm, self.compression.as_ref().map(|compression| compression.format))
    }

    pub(crate) fn length(&self, buffer: Buffer, block: usize) -> usize {
        self.lengths[buffer as usize][block]
    }

    /// Bytes of one segment of a block.
    pub(crate) fn segment_bytes(&self, buffer: Buffer, block: usize, segment: usize) -> usize {
        let length = self.length(buffer, block);
        let start = (segment * self.choice.segment).min(length);
        self.choice.segment.min(length - start)
    }

    /// Bytes of one segment of all blocks of a run.
    pub(crate) fn message_bytes(&self, run: BlockRun, segment: usize) -> usize {
        run.range().map(|block| self.segment_bytes(run.buffer, block, segment)).sum()
    }

    /// The same on the wire, compressed or not.
    fn wire_bytes(&self, compressed: bool, run: BlockRun, segment: usize) -> usize {
        match &self.compression {
            Some(compression) if compressed => {
                let pieces = run.range().map(|block| self.segment_bytes(run.buffer, block, segment));
                pieces.map(|bytes| compression.size(true, bytes)).sum()
            }
            _ => self.message_bytes(run, segment),
        }
    }

    /// Bytes of a message before the taken blocks.
    #[inline]
    pub(crate) fn skipped_bytes(&self, from: &IncomingMessage, segment: usize) -> usize {
        if segment == 0 {
            from.first_skipped_bytes
        } else {
            let compressed =
                self.compression.as_ref().is_some_and(|compression| compression.receives[from.recv_channel]);
            self.wire_bytes(compressed, BlockRun { blocks: from.skipped_blocks, ..from.message }, segment)
        }
    }

    /// Approximate memory of this value in bytes.
    fn memory_bytes(&self) -> usize {
        let steps = self.pipelines.iter().flatten();
        let sources = |step: &BoundStep| {
            if let BoundStep::Reduce(reduce) = step { reduce.from.len() } else { 0 }
        };
        let sources: usize = steps.clone().map(|(_, step)| sources(step)).sum();
        let Channels { send_channels, recv_channels, .. } = &*self.channel_layout;
        let readers: usize = send_channels.iter().map(|send_channel| send_channel.readers.len()).sum();
        let channels =
            size_of_val(&send_channels[..]) + size_of_val(&recv_channels[..]) + readers * size_of::<usize>();
        let blocks: usize = self.offsets.iter().chain(&self.lengths).map(Vec::len).sum();
        // `routed` holds the channels a second time.
        steps.count() * size_of::<(usize, BoundStep)>()
            + sources * size_of::<IncomingMessage>()
            + 2 * channels
            + blocks * size_of::<usize>()
    }
}

/// Position of this rank in its group.
#[derive(Clone, Debug)]
pub(crate) struct GroupFacts {
    pub(crate) rank: usize,
    pub(crate) topology: Topology,
    /// Payload bytes that travel with a header; 0 if the group spans several nodes.
    pub(crate) inline_bytes: usize,
    /// Routes to the other ranks.
    pub(crate) routes: Arc<Routes>,
    /// Default network model of the transport between nodes.
    pub(crate) assumed: Network,
    /// Measured or configured network model between nodes. Set at most once, before the first call, to the same value
    /// on all ranks.
    pub(crate) network: OnceLock<NetworkEstimate>,
    /// True if reductions use the canonical order whatever the setting says. Set like `network`.
    pub(crate) canonical: OnceLock<bool>,
}

impl GroupFacts {
    /// Returns the default network model for the transport `network_path` of a group.
    pub(crate) fn assumed(network_path: &str) -> Network {
        if network_path.starts_with("fabric efa") { Network::PACED } else { Network::ASSUMED }
    }

    /// Rates are measured. Incast depends on the transport and stays at its default.
    fn network(&self) -> Network {
        let incast = self.assumed.incast;
        self.network.get().map_or(self.assumed, |known| Network { incast, ..known.network })
    }

    fn is_canonical(&self) -> bool {
        self.canonical.get().is_some_and(|&canonical| canonical)
    }

    pub(crate) fn group(&self) -> GroupShape<'_> {
        GroupShape { topology: &self.topology, inline_bytes: self.inline_bytes, network: self.network() }
    }
}

/// Returns the planner's decision for a call.
pub(crate) fn plan_decision(key: &Key, facts: &GroupFacts, config: &Config) -> Decision {
    // Costs must be equal on ranks whose callers use different floating-point modes.
    let _mode = DefaultFloatMode::enter();
    let settings = config.plans();
    let formats = if key.lossless { Formats::default() } else { settings.formats };
    // Integers and bools give the same bits in any order.
    let order_matters = !key.dtype.is_integer() && key.dtype != DType::Bool;
    let canonical = settings.canonical || order_matters && facts.is_canonical();
    decide(&key.shape(), &facts.group(), &Settings { formats, canonical, ..settings })
}

/// Description of a decision for `smddp info` and tables. `path`: the transport.
pub(crate) fn describe_decision(path: &str, decision: &Decision) -> String {
    let Choice { algorithm, segment, .. } = decision.choice;
    let algorithm = variant_name((algorithm, decision.format));
    let slots = decision.choice.window();
    let order = if decision.canonical { " in canonical order" } else { "" };
    let fallback = match decision.reason {
        Reason::Unsupported(wanted) => format!(" ({} does not support this call)", wanted.name()),
        _ => String::new(),
    };
    if decision.inline {
        return format!("{path} {algorithm}{order}, one message{fallback}");
    }
    let segment = segment.div_ceil(1024);
    format!("{path} {algorithm}{order}, segments of {segment} KiB, {slots} slots{fallback}")
}

/// Returns the kernel of a reducing collective, or an error if the dtype does not support the reduction.
fn kernel(key: &Key) -> Result<Option<Kernel>> {
    if !key.collective.reduces() {
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

/// Plans a call, and binds the plan to its sizes, channels and routes.
pub(crate) fn bind(key: &Key, facts: &GroupFacts, config: &Config) -> Result<BoundCall> {
    let (rank, n) = (facts.rank, facts.topology.size());
    let kernel = kernel(key)?;
    let decision = plan_decision(key, facts, config);
    let choice = decision.choice;
    let request = PlanRequest {
        collective: key.collective,
        rank,
        size: n,
        root: if key.collective.has_root() { key.root } else { 0 },
        uneven_pairs: decision.uneven_pairs(),
        canonical: decision.canonical,
    };
    let program = plan(choice.algorithm, &request, &facts.topology).ok_or_else(|| {
        Error::Invalid(format!(
            "{}: algorithm {} does not support this collective on {n} ranks; check SMDDP_ALGO",
            name_of(key.collective),
            choice.algorithm.name()
        ))
    })?;
    if decision.canonical && key.memory != Memory::Host {
        return Err(not_canonical_on_device(name_of(key.collective), config));
    }
    if key.memory == Memory::Reference && writes_block_twice(&program) {
        return Err(Error::Invalid(format!(
            "{}: algorithm {} overwrites memory that peers may still read, which device memory does not support; check SMDDP_ALGO",
            name_of(key.collective),
            choice.algorithm.name()
        )));
    }
    let writes_once = !writes_block_twice(&program);
    let mut bound = BoundCall { kernel, ..binder::bind_program(key, facts, &decision, program) };
    if key.memory != Memory::Host {
        use_descriptors(&mut bound, key, facts);
    }
    bound.routed = facts.routes.route(&bound.channel_layout);
    if let Some(compression) =
        bound.compression.as_ref().filter(|compression| compression.rounds_inputs && rank == 0)
    {
        warn_rounded_all_gather(compression.format);
    }
    if key.memory == Memory::Host && writes_once && bound.compression.is_none() {
        // With helper threads, copies by this process are faster than single copies by the kernel.
        let single_copy = if has_helpers() { SingleCopy::Never } else { config.single_copy };
        bound.zero_copy = ZeroCopy::new(&bound, key.collective, single_copy);
    }
    Ok(bound)
}

fn not_canonical_on_device(call: &str, config: &Config) -> Error {
    Error::Invalid(if config.canonical == CanonicalOrder::Always {
        format!(
            "{call}: SMDDP_CANONICAL_ORDER=1 supports host memory only; this call uses device memory, which is reduced in the order of \
             the ranks of each node"
        )
    } else {
        format!(
            "{call}: nodes divide the ranks of this group differently from those of its sibling groups, so equal inputs would give \
             them different bits; the canonical order, which prevents this, is for host memory only. Choose a mesh whose groups \
             nodes divide alike, or set SMDDP_CANONICAL_ORDER=0 on all ranks to accept different bits"
        )
    })
}

/// Warns once that all_gather rounds: a caller that gathers parameters for a checkpoint may not expect it.
fn warn_rounded_all_gather(format: Format) {
    // No `Once`: see `startup::pending`.
    static WARNED: AtomicBool = AtomicBool::new(false);
    if !WARNED.swap(true, Ordering::Relaxed) {
        let text = format!(
            "SMDDP_WIRE_FORMAT: all_gather rounds float32 values to {} between nodes; gather checkpoints within \
             `with smddp.exact():`",
            format.name()
        );
        log::say(Level::Warn, &text);
    }
}

/// Sizes the channels of messages that are passed by reference: each message is one descriptor.
fn use_descriptors(bound: &mut BoundCall, key: &Key, facts: &GroupFacts) {
    let local = |rank: usize| key.memory == Memory::Reference && facts.topology.share_node(rank, facts.rank);
    let channel_layout = Arc::make_mut(&mut bound.channel_layout);
    bound.by_reference = [
        channel_layout
            .send_channels
            .iter()
            .map(|o| o.readers.first().is_some_and(|&reader| local(reader)))
            .collect(),
        channel_layout.recv_channels.iter().map(|i| local(i.rank)).collect(),
    ];
    let send_channels =
        channel_layout.send_channels.iter_mut().zip(&bound.by_reference[0]).filter(|(_, local)| **local);
    send_channels.for_each(|(send_channel, _)| send_channel.slot_bytes = DESCRIPTOR);
    let recv_channels =
        channel_layout.recv_channels.iter_mut().zip(&bound.by_reference[1]).filter(|(_, local)| **local);
    recv_channels.for_each(|(recv_channel, _)| recv_channel.slot_bytes = DESCRIPTOR);
    // All ranks must use a device, and the same site of the group.
    bound.fingerprint.call |= fingerprint::on_device(key.site);
}

/// Bytes of a message that is passed by reference.
pub(crate) const DESCRIPTOR: usize = 64;

/// Returns true if a program writes any block of Out or Scratch twice. Data sent by reference would then change under
/// its readers, and data received early would be overwritten.
fn writes_block_twice(program: &Program) -> bool {
    let mut written = Vec::new();
    for timed in program.pipelines.iter().flatten() {
        let to = match &timed.step {
            Step::Send { tee, .. } => *tee,
            Step::Receive { to, .. } | Step::Copy { to, .. } => Some(*to),
            Step::Reduce { to, .. } => *to,
        };
        for span in to.into_iter().filter(|span| span.buffer != Buffer::In) {
            written.extend((span.block..span.block + span.blocks).map(|block| (span.buffer, block)));
        }
    }
    let all = written.len();
    written.sort_unstable();
    written.dedup();
    written.len() < all
}

#[cfg(test)]
mod tests {
    use smddp_plan::{Collective, Counts, Topology};

    use super::*;

    #[test]
    fn device_sums_are_rejected_if_sibling_groups_need_the_canonical_order() {
        let topology = Topology::from_labels(&[0, 0, 1]);
        let (routes, assumed) = (Arc::new(Routes::local(0, 3)), GroupFacts::assumed(""));
        let (network, canonical) = (OnceLock::new(), OnceLock::from(true));
        let facts = GroupFacts { rank: 0, topology, inline_bytes: 0, routes, assumed, network, canonical };
        let key = |collective, dtype, memory| {
            let counts = Counts::Even(1000);
            Key { collective, dtype, redop: 0, root: 0, factor: 0, counts, memory, site: 0, lossless: false }
        };
        let bound = |collective, dtype, memory| {
            bind(&key(collective, dtype, memory), &facts, &Config::default()).map(drop)
        };
        let error = bound(Collective::AllReduce, DType::F32, Memory::Bounced).unwrap_err().to_string();
        for part in ["all_reduce", "sibling groups", "SMDDP_CANONICAL_ORDER=0"] {
            assert!(error.contains(part), "{error}");
        }
        // Calls whose bits do not depend on the order are allowed.
        assert_eq!(bound(Collective::AllReduce, DType::I32, Memory::Bounced), Ok(()));
        assert_eq!(bound(Collective::AllGather, DType::F32, Memory::Bounced), Ok(()));
        assert_eq!(bound(Collective::AllReduce, DType::F32, Memory::Host), Ok(()));
    }
}
