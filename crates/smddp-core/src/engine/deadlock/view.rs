//! Wait-for edges of one group, as the owner of its engine sees them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use smddp_group::Facts;
use smddp_plan::Collective;

use crate::bind::BoundCall;
use crate::call::fingerprint;
use crate::engine::Engine;
use crate::engine::messages::{MessageView, MessageWait};
use crate::failure::deadlock::Needed;
use crate::observe::recorder::RecordedCall;
use crate::sync::completion::Completion;

/// Calls with a shorter time limit end at their deadline: their callers may expect that, and continue.
const MIN_TIMEOUT: Duration = Duration::from_secs(5);
/// Minimum time to the deadline of a message. A message that expires ends alone, and its group continues, so a cycle of them
/// resolves.
const MIN_MESSAGE_TIME: Duration = Duration::from_secs(60);

/// State of a group for the edges that point to its rank here.
pub(super) struct GroupView {
    /// Sequence number of the next collective.
    next: u64,
    messages: Option<MessageView>,
}

impl GroupView {
    /// Returns true if rank `from` waits for an action that this rank has not begun.
    pub(super) fn blocks(&self, from: usize, needed: &Needed) -> bool {
        match *needed {
            Needed::Collective(seq) => self.next <= seq,
            _ => self.messages.as_ref().is_some_and(|messages| messages.blocks(from, needed)),
        }
    }
}

/// Edges of one wait: the operation, and the awaited ranks with their needed actions.
#[derive(Default)]
pub(super) struct WaitEdges {
    pub(super) operation: String,
    pub(super) edges: Vec<(usize, Needed)>,
}

impl Engine {
    pub(super) fn group_view(&self) -> GroupView {
        GroupView { next: self.next, messages: self.messages.view() }
    }

    /// Returns the recorded call with this completion. `None`: it is over, or a comparison of results.
    pub(super) fn recorded_call(&self, work: usize) -> Option<RecordedCall> {
        let has_work = |own: &Arc<Completion>| Arc::as_ptr(own) as usize == work;
        let collective = self.queue.iter().find(|op| op.work.as_ref().is_some_and(has_work));
        let collective = collective.map(|op| RecordedCall::Collective(op.seq));
        collective.or_else(|| self.messages.number_of(work).map(RecordedCall::Message))
    }

    /// Returns the edges of the call with this completion. A collective waits for the first one of the queue, and for its
    /// missing ranks.
    pub(super) fn wait_edges(&mut self, work: usize, now: Instant) -> WaitEdges {
        if !self.is_running() {
            return WaitEdges::default();
        }
        let has_work = |own: &Arc<Completion>| Arc::as_ptr(own) as usize == work;
        if self.queue.iter().any(|op| op.work.as_ref().is_some_and(has_work)) {
            return self.collective_edges(now);
        }
        match self.messages.wait_for(work) {
            Some(MessageWait { peer, needed, operation, remaining }) if remaining >= MIN_MESSAGE_TIME => {
                WaitEdges { operation, edges: vec![(peer, needed)] }
            }
            _ => WaitEdges::default(),
        }
    }

    fn collective_edges(&mut self, now: Instant) -> WaitEdges {
        let Some(op) = self.queue.front().filter(|op| op.begun && op.timeout >= MIN_TIMEOUT) else {
            return WaitEdges::default();
        };
        let (seq, bound, collective, operation) = (op.seq, op.bound.clone(), op.collective, op.name());
        let mut facts = Facts::default();
        self.group.health().observe(now, seq, &mut facts);
        let me = self.names.me;
        let missing = |&rank: &usize| {
            rank != me && facts.ranks[rank].arrived != Some(true) && needs(&bound, collective, me, rank)
        };
        let edges = (0..facts.ranks.len()).filter(missing).map(|rank| (rank, Needed::Collective(seq)));
        WaitEdges { operation, edges: edges.collect() }
    }
}

/// Returns true if rank `me` certainly cannot complete the call before `rank` has begun it. The root of a broadcast, or a rank
/// other than the root of a reduction, may complete without the others, and so may a rank that receives no data.
fn needs(bound: &BoundCall, collective: Collective, me: usize, rank: usize) -> bool {
    let [input, output, _] = &bound.lengths;
    let (is_root, is_from_root) = {
        let root = fingerprint::root(bound.fingerprint);
        (root == me, root == rank)
    };
    let has_bytes = |lengths: &[usize], block: usize| lengths.get(block).is_some_and(|&bytes| bytes > 0);
    let any = |lengths: &[usize]| lengths.iter().any(|&bytes| bytes > 0);
    match collective {
        Collective::Barrier => true,
        Collective::AllReduce => any(input),
        Collective::AllGather | Collective::AllToAll => has_bytes(output, rank),
        Collective::ReduceScatter => has_bytes(input, me),
        Collective::Broadcast | Collective::Scatter => is_from_root && any(output),
        Collective::Reduce => is_root && any(input),
        Collective::Gather => is_root && has_bytes(output, rank),
    }
}
