//! Sizes, segments and channels of one rank's program.

use std::collections::HashMap;
use std::sync::Arc;

use smddp_base::{Channels, RecvChannel, SendChannel};
use smddp_group::RoutedChannels;
use smddp_plan::{Buffer, Collective, Decision, Program, Source, Span, Step};

use super::{BlockRun, BoundCall, BoundStep, Compression, GroupFacts, IncomingMessage, Reduce, ZeroCopy};
use crate::call::fingerprint;
use crate::call::key::Key;

fn running_sums(lengths: impl Iterator<Item = usize>) -> Vec<usize> {
    let mut at = 0;
    lengths
        .map(|length| {
            at += length;
            at - length
        })
        .collect()
}

/// Binds a rank's program to the block sizes of the decision.
pub(super) fn bind_program(
    key: &Key,
    facts: &GroupFacts,
    decision: &Decision,
    program: Program,
) -> BoundCall {
    let n = facts.topology.size();
    let [input, output] = decision.blocks.clone();
    // A buffer that holds only this rank's block starts with that block.
    let (own_in, own_out) = match key.collective {
        Collective::AllGather | Collective::Gather => (true, false),
        Collective::ReduceScatter | Collective::Scatter => (false, true),
        _ => (false, false),
    };
    let offsets_of = |lengths: &[usize], alone: bool| {
        if alone { vec![0; lengths.len()] } else { running_sums(lengths.iter().copied()) }
    };
    // Spans of a message are numbered in its sender's Scratch, which may have more blocks than this rank's.
    let sources = program.pipelines.iter().flatten().flat_map(|timed| timed.step.sources());
    let used = sources.filter(|source| source.message.buffer == Buffer::Scratch);
    let used = used.map(|source| source.message.block + source.message.blocks).max().unwrap_or(0);
    let scratch: Vec<usize> = (0..program.scratch_blocks.max(used)).map(|b| input[b % n]).collect();
    let aligned = scratch.iter().map(|length| length.next_multiple_of(64));
    let send_channel = |readers| SendChannel { readers, slot_bytes: 0, messages: 0, bytes: 0 };
    let mut binder = Binder {
        send_channels: program.channels.into_iter().map(|channel| send_channel(channel.readers)).collect(),
        recv_channels: Vec::new(),
        recv_index: HashMap::new(),
        uneven_pairs: decision.uneven_pairs(),
        remote: (0..n).map(|rank| !facts.topology.share_node(rank, facts.rank)).collect(),
        call: BoundCall {
            choice: decision.choice,
            kernel: None,
            pipelines: Vec::new(),
            iterations: Vec::new(),
            channel_layout: Arc::default(),
            routed: RoutedChannels::default(),
            scratch: aligned.clone().take(program.scratch_blocks).sum(),
            offsets: [offsets_of(&input, own_in), offsets_of(&output, own_out), running_sums(aligned)],
            lengths: [input, output, scratch],
            by_reference: Default::default(),
            zero_copy: ZeroCopy::default(),
            compression: decision.format.map(|format| Compression::new(format, key.collective)),
            fingerprint: fingerprint::of(key, decision),
            bytes: decision.bytes(),
        },
    };
    for pipeline in &program.pipelines {
        binder.pipeline(pipeline.iter().map(|timed| (timed.lag, &timed.step)));
    }
    let Binder { mut call, send_channels, recv_channels, remote, .. } = binder;
    if let Some(compression) = &mut call.compression {
        compression.sends =
            send_channels.iter().map(|send_channel| is_remote(send_channel, &remote)).collect();
        compression.receives = recv_channels.iter().map(|recv_channel| remote[recv_channel.rank]).collect();
    }
    let max_messages =
        send_channels.iter().map(|send_channel| send_channel.messages).max().unwrap_or(0) as usize;
    // One slot suffices for one message. Further messages need two: with one, two ranks could wait for each other.
    let least = if max_messages <= 1 { 1 } else { 2 };
    let depth = (call.choice.depth.min(max_messages).max(least), least);
    let (inline, window) = (decision.inline, call.choice.window());
    call.channel_layout = Arc::new(Channels { send_channels, recv_channels, inline, depth, window });
    call
}

struct Binder {
    call: BoundCall,
    send_channels: Vec<SendChannel>,
    /// Includes channels whose messages have no bytes: the fingerprints of their senders are checked, too.
    recv_channels: Vec<RecvChannel>,
    /// Index into `recv_channels` by (rank, channel).
    recv_index: HashMap<(usize, usize), usize>,
    uneven_pairs: bool,
    /// By rank: true if the rank is on another node.
    remote: Vec<bool>,
}

/// Returns true if the channel leads to another node. All readers of a channel are on one node.
fn is_remote(send_channel: &SendChannel, remote: &[bool]) -> bool {
    send_channel.readers.first().is_some_and(|&reader| remote[reader])
}

impl Binder {
    fn pipeline<'a>(&mut self, steps: impl Iterator<Item = (usize, &'a Step)>) {
        let bound = steps.map(|(lag, step)| (lag, self.bind_step(step)));
        let mut steps: Vec<(usize, (BoundStep, usize))> =
            bound.filter(|(_, (_, segments))| *segments > 0).collect();
        // With one segment only, the steps run once each, in the order of their lags.
        if steps.iter().all(|(_, (_, segments))| *segments <= 1) {
            steps.sort_by_key(|(lag, _)| *lag);
            steps.iter_mut().for_each(|(lag, _)| *lag = 0);
        }
        self.call.iterations.push(steps.iter().map(|(lag, (_, segments))| lag + segments).max().unwrap_or(0));
        self.call.pipelines.push(steps.into_iter().map(|(lag, (bind_step, _))| (lag, bind_step)).collect());
    }

    /// Binds the blocks of a step; also returns its number of segments.
    fn bind_step(&mut self, step: &Step) -> (BoundStep, usize) {
        match step {
            Step::Send { channel, source, tee } => {
                let source = self.run(*source);
                self.add_messages(*channel, source);
                (
                    BoundStep::Send { channel: *channel, source, tee: tee.map(|t| self.run(t)) },
                    source.segments,
                )
            }
            Step::Receive { from, to, forward } => {
                let (from, to) = (self.incoming_message(from, Some(*to)), self.run(*to));
                forward.iter().for_each(|&channel| self.add_messages(channel, to));
                (BoundStep::Receive { from, to, forward: *forward }, from.message.segments)
            }
            Step::Reduce { from, own, to, send, finish, association } => {
                let result = match (to, own, from.first()) {
                    (Some(to), ..) => *to,
                    (None, Some((_, own)), _) => *own,
                    (None, None, Some(f)) => {
                        Span::new(f.message.buffer, f.message.block + f.take.0, f.take.1)
                    }
                    (None, None, None) => Span::TOKEN,
                };
                let result = self.run(result);
                send.iter().for_each(|&channel| self.add_messages(channel, result));
                let from: Vec<IncomingMessage> =
                    from.iter().map(|f| self.incoming_message(f, None)).collect();
                let segments = from.iter().map(|f| f.message.segments).fold(result.segments, usize::max);
                let own = own.map(|(at, span)| (at, self.run(span)));
                let (keep, send, finish, association) = (to.is_some(), *send, *finish, association.clone());
                (BoundStep::Reduce(Reduce { from, own, result, keep, send, finish, association }), segments)
            }
            Step::Copy { source, to, finish } => {
                let (source, to) = (self.run(*source), self.run(*to));
                (BoundStep::Copy { source, to, finish: *finish }, source.segments)
            }
        }
    }

    fn run(&self, span: Span) -> BlockRun {
        let table = &self.call.lengths[span.buffer as usize];
        let offsets = &self.call.offsets[span.buffer as usize];
        let range = span.block..span.block + span.blocks;
        let segments = range.clone().map(|block| table[block].div_ceil(self.call.choice.segment)).max();
        let segments = segments.unwrap_or(1);
        let mut next = offsets.get(span.block).copied().unwrap_or(0);
        let (first, mut is_contiguous) = (next, segments <= 1);
        for block in range {
            is_contiguous &= offsets[block] == next;
            next += table[block];
        }
        let contiguous = is_contiguous.then_some((first, next - first));
        BlockRun { buffer: span.buffer, block: span.block, blocks: span.blocks, segments, contiguous }
    }

    /// Bytes of all messages of a run, compressed or not.
    fn bytes(&self, compressed: bool, run: BlockRun) -> u64 {
        let (segment, compression) =
            (self.call.choice.segment, self.call.compression.as_ref().filter(|_| compressed));
        let length = |block: usize| self.call.lengths[run.buffer as usize][block];
        let size = |length: usize| match compression {
            Some(compression) => {
                length / segment * compression.size(true, segment) + compression.size(true, length % segment)
            }
            None => length,
        };
        run.range().map(|block| size(length(block)) as u64).sum()
    }

    /// Adds the segments of a run to a channel. The first segment is the largest.
    fn add_messages(&mut self, channel: usize, run: BlockRun) {
        let compressed = is_remote(&self.send_channels[channel], &self.remote);
        let (largest, bytes) = (self.call.wire_bytes(compressed, run, 0), self.bytes(compressed, run));
        let send_channel = &mut self.send_channels[channel];
        send_channel.slot_bytes = send_channel.slot_bytes.max(largest);
        send_channel.messages += run.segments as u64;
        send_channel.bytes += bytes;
    }

    /// Binds a message and its channel. With uneven pairs only the receiver's span `to` gives the size.
    fn incoming_message(&mut self, source: &Source, to: Option<Span>) -> IncomingMessage {
        let message = self.run(match to {
            Some(to) if self.uneven_pairs => to,
            None if self.uneven_pairs => Span::TOKEN,
            _ => source.message,
        });
        let (rank, channel) = (source.rank, source.channel);
        let compressed = self.remote[rank];
        let (largest, bytes) =
            (self.call.wire_bytes(compressed, message, 0), self.bytes(compressed, message));
        let recv_channel = *self.recv_index.entry((rank, channel)).or_insert_with(|| {
            self.recv_channels.push(RecvChannel {
                rank,
                channel,
                reader: source.reader,
                slot_bytes: 0,
                messages: 0,
                bytes: 0,
            });
            self.recv_channels.len() - 1
        });
        let recv_index = &mut self.recv_channels[recv_channel];
        recv_index.messages += message.segments as u64;
        recv_index.slot_bytes = recv_index.slot_bytes.max(largest);
        recv_index.bytes += bytes;
        let skipped_blocks = source.take.0;
        let first_skipped_bytes =
            self.call.wire_bytes(compressed, BlockRun { blocks: skipped_blocks, ..message }, 0);
        IncomingMessage { recv_channel, message, skipped_blocks, first_skipped_bytes }
    }
}
