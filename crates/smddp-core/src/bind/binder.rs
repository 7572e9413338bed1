//! Sizes, segments and channels of one rank's program.

use std::collections::HashMap;
use std::sync::Arc;

use smddp_plan::{Buffer, Collective, Decision, Program, Source, Span, Step};
use smddp_transport::{Channels, RecvChannel, RoutedChannels, SendChannel};

use super::{Act, Bound, Coding, Direct, GroupFacts, Incoming, Reduce, Run};
use crate::call::fingerprint;
use crate::call::key::Key;

fn running(lengths: impl Iterator<Item = usize>) -> Vec<usize> {
    let mut at = 0;
    lengths
        .map(|length| {
            at += length;
            at - length
        })
        .collect()
}

/// Binds a rank's program to the sizes on which all have decided.
pub(super) fn bound(key: &Key, facts: &GroupFacts, decision: &Decision, program: Program) -> Bound {
    let n = facts.topology.size();
    let [input, output] = decision.blocks.clone();
    // A buffer that holds only this rank's block has it at its beginning.
    let (own_in, own_out) = match key.collective {
        Collective::AllGather | Collective::Gather => (true, false),
        Collective::ReduceScatter | Collective::Scatter => (false, true),
        _ => (false, false),
    };
    let place = |lengths: &[usize], alone: bool| {
        if alone { vec![0; lengths.len()] } else { running(lengths.iter().copied()) }
    };
    // Messages have the names of their writers' spans, and a peer may have more Scratch than this rank.
    let sources = program.pipelines.iter().flatten().flat_map(|timed| timed.step.sources());
    let named = sources.filter(|source| source.message.buffer == Buffer::Scratch);
    let named = named.map(|source| source.message.block + source.message.blocks).max().unwrap_or(0);
    let scratch: Vec<usize> = (0..program.scratch_blocks.max(named)).map(|b| input[b % n]).collect();
    let aligned = scratch.iter().map(|length| length.next_multiple_of(64));
    let send_channel = |readers| SendChannel { readers, cell: 0, messages: 0, bytes: 0 };
    let mut binder = Binder {
        send_channels: program.channels.into_iter().map(|channel| send_channel(channel.readers)).collect(),
        recv_channels: Vec::new(),
        known: HashMap::new(),
        uneven_pairs: decision.uneven_pairs(),
        remote: (0..n).map(|rank| !facts.topology.share_node(rank, facts.rank)).collect(),
        bound: Bound {
            choice: decision.choice,
            kernel: None,
            lanes: Vec::new(),
            turns: Vec::new(),
            channel_layout: Arc::default(),
            routed: RoutedChannels::default(),
            scratch: aligned.clone().take(program.scratch_blocks).sum(),
            offsets: [place(&input, own_in), place(&output, own_out), running(aligned)],
            lengths: [input, output, scratch],
            local: Default::default(),
            direct: Direct::default(),
            coding: decision.format.map(|format| Coding::new(format, key.collective)),
            fingerprint: fingerprint::of(key, decision),
            bytes: decision.bytes(),
        },
    };
    for lane in &program.pipelines {
        binder.lane(lane.iter().map(|timed| (timed.lag, &timed.step)));
    }
    let Binder { mut bound, send_channels, recv_channels, remote, .. } = binder;
    if let Some(coding) = &mut bound.coding {
        coding.outs = send_channels.iter().map(|send_channel| is_remote(send_channel, &remote)).collect();
        coding.ins = recv_channels.iter().map(|recv_channel| remote[recv_channel.rank]).collect();
    }
    let most = send_channels.iter().map(|send_channel| send_channel.messages).max().unwrap_or(0) as usize;
    // One cell does for one message; more messages need two, or a writer waits for a reader that waits for it.
    let least = if most <= 1 { 1 } else { 2 };
    let depth = (bound.choice.depth.min(most).max(least), least);
    let (inline, window) = (decision.inline, bound.choice.window());
    bound.channel_layout = Arc::new(Channels { send_channels, recv_channels, inline, depth, window });
    bound
}

struct Binder {
    bound: Bound,
    send_channels: Vec<SendChannel>,
    /// Also of messages without bytes: their writers' headers are held against this rank's.
    recv_channels: Vec<RecvChannel>,
    /// The inlet of a rank's channel.
    known: HashMap<(usize, usize), usize>,
    uneven_pairs: bool,
    /// Of each rank, whether it is on another node.
    remote: Vec<bool>,
}

/// Whether a channel goes to another node; all its readers are on one.
fn is_remote(send_channel: &SendChannel, remote: &[bool]) -> bool {
    send_channel.readers.first().is_some_and(|&reader| remote[reader])
}

impl Binder {
    fn lane<'a>(&mut self, steps: impl Iterator<Item = (usize, &'a Step)>) {
        let bound = steps.map(|(lag, step)| (lag, self.act(step)));
        let mut acts: Vec<(usize, (Act, usize))> = bound.filter(|(_, (_, segments))| *segments > 0).collect();
        // One segment only: a straight line, in the order of the lags.
        if acts.iter().all(|(_, (_, segments))| *segments <= 1) {
            acts.sort_by_key(|(lag, _)| *lag);
            acts.iter_mut().for_each(|(lag, _)| *lag = 0);
        }
        self.bound.turns.push(acts.iter().map(|(lag, (_, segments))| lag + segments).max().unwrap_or(0));
        self.bound.lanes.push(acts.into_iter().map(|(lag, (act, _))| (lag, act)).collect());
    }

    /// A step with its blocks, and how many segments it has.
    fn act(&mut self, step: &Step) -> (Act, usize) {
        match step {
            Step::Send { channel, source, tee } => {
                let source = self.run(*source);
                self.sends(*channel, source);
                (Act::Send { channel: *channel, source, tee: tee.map(|t| self.run(t)) }, source.segments)
            }
            Step::Receive { from, to, forward } => {
                let (from, to) = (self.incoming(from, Some(*to)), self.run(*to));
                forward.iter().for_each(|&channel| self.sends(channel, to));
                (Act::Receive { from, to, forward: *forward }, from.message.segments)
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
                send.iter().for_each(|&channel| self.sends(channel, result));
                let from: Vec<Incoming> = from.iter().map(|f| self.incoming(f, None)).collect();
                let segments = from.iter().map(|f| f.message.segments).fold(result.segments, usize::max);
                let own = own.map(|(at, span)| (at, self.run(span)));
                let (keep, send, finish, association) = (to.is_some(), *send, *finish, association.clone());
                (Act::Reduce(Reduce { from, own, result, keep, send, finish, association }), segments)
            }
            Step::Copy { source, to, finish } => {
                let (source, to) = (self.run(*source), self.run(*to));
                (Act::Copy { source, to, finish: *finish }, source.segments)
            }
        }
    }

    fn run(&self, span: Span) -> Run {
        let table = &self.bound.lengths[span.buffer as usize];
        let offsets = &self.bound.offsets[span.buffer as usize];
        let range = span.block..span.block + span.blocks;
        let segments = range.clone().map(|block| table[block].div_ceil(self.bound.choice.segment)).max();
        let segments = segments.unwrap_or(1);
        let mut next = offsets.get(span.block).copied().unwrap_or(0);
        let (first, mut in_a_row) = (next, segments <= 1);
        for block in range {
            in_a_row &= offsets[block] == next;
            next += table[block];
        }
        let row = in_a_row.then_some((first, next - first));
        Run { buffer: span.buffer, block: span.block, blocks: span.blocks, segments, row }
    }

    /// Bytes of all messages of a run, coded or not.
    fn bytes(&self, coded: bool, run: Run) -> u64 {
        let (segment, coding) = (self.bound.choice.segment, self.bound.coding.as_ref().filter(|_| coded));
        let length = |block: usize| self.bound.lengths[run.buffer as usize][block];
        let size = |length: usize| match coding {
            Some(coding) => {
                length / segment * coding.size(true, segment) + coding.size(true, length % segment)
            }
            None => length,
        };
        run.range().map(|block| size(length(block)) as u64).sum()
    }

    /// The channel carries the segments of a run; the first is its largest.
    fn sends(&mut self, channel: usize, run: Run) {
        let coded = is_remote(&self.send_channels[channel], &self.remote);
        let (largest, bytes) = (self.bound.coded(coded, run, 0), self.bytes(coded, run));
        let send_channel = &mut self.send_channels[channel];
        send_channel.cell = send_channel.cell.max(largest);
        send_channel.messages += run.segments as u64;
        send_channel.bytes += bytes;
    }

    /// `to`: the span that takes it, which alone tells the size where only the pair knows it.
    fn incoming(&mut self, source: &Source, to: Option<Span>) -> Incoming {
        let message = self.run(match to {
            Some(to) if self.uneven_pairs => to,
            None if self.uneven_pairs => Span::TOKEN,
            _ => source.message,
        });
        let (rank, channel) = (source.rank, source.channel);
        let coded = self.remote[rank];
        let (largest, bytes) = (self.bound.coded(coded, message, 0), self.bytes(coded, message));
        let recv_channel = *self.known.entry((rank, channel)).or_insert_with(|| {
            self.recv_channels.push(RecvChannel {
                rank,
                channel,
                reader: source.reader,
                cell: 0,
                messages: 0,
                bytes: 0,
            });
            self.recv_channels.len() - 1
        });
        let known = &mut self.recv_channels[recv_channel];
        known.messages += message.segments as u64;
        known.cell = known.cell.max(largest);
        known.bytes += bytes;
        let before = source.take.0;
        let skip = self.bound.coded(coded, Run { blocks: before, ..message }, 0);
        Incoming { recv_channel, message, before, skip }
    }
}
