//! Stages of the straggler query: selects the ranks to query after an expired deadline.

use std::time::Instant;

use smddp_group::{Facts, QueryAnswer};

use super::error_text::queried_ranks;
use super::limits::Limits;

/// Largest number of ranks that are all queried at once.
pub(super) const QUERY_ALL_LIMIT: usize = 128;

/// Subject of a query.
#[derive(Debug, PartialEq)]
pub(super) enum Subject {
    /// The collective with this sequence number, whose deadline has passed.
    Call(u64),
    /// The collective with this sequence number, which waits for a long time.
    LateCall(u64),
    /// Sends and recvs past their deadlines.
    Messages,
    /// The send or recv with this number, in which a thread waits for a long time.
    LateMessage(u64),
}

/// Stage of the query for a collective.
#[derive(Debug, PartialEq)]
enum Stage {
    /// Ranks that this rank waits for directly. In a large group, most ranks wait for a rank that waits itself. Only
    /// ranks that wait for a straggler directly query it, and these ranks abort the group.
    Needed,
    /// Wait for the abort report of a rank that waits for the straggler directly.
    AwaitReport {
        until: Instant,
    },
    /// All ranks that are not known to have begun the operation.
    Others,
    /// Ranks that have begun the operation: they may be silent since then.
    Arrived,
    /// Activity of late ranks of this node.
    Activity,
    Complete,
}

/// Query in progress.
#[derive(Debug)]
pub(super) struct StragglerQuery {
    pub(super) subject: Subject,
    stage: Stage,
    /// Start of the stage.
    begun: Instant,
    /// End of the time limit for ranks of other nodes.
    until: Instant,
    /// Ranks of other nodes that are not known to have begun the operation when the query starts: the ranks that are
    /// queried first, and the others.
    first: Vec<usize>,
    rest: Vec<usize>,
    /// Ranks of other nodes that have begun it.
    arrived: Vec<usize>,
    /// All ranks that this rank waits for wait themselves, so they report the late ranks.
    pub(super) is_indirect: bool,
}

/// Next step of a query.
#[derive(Debug, PartialEq)]
pub(super) enum QueryStep {
    /// Query these ranks.
    Ask(Vec<usize>),
    /// Advance again at that time, or when a reply arrives.
    Wait(Instant),
    Complete,
}

impl StragglerQuery {
    /// Starts the query for the ranks that are late for the call of `subject`.
    pub(super) fn of_call(
        me: usize,
        subject: Subject,
        now: Instant,
        limits: &Limits,
        facts: &Facts,
    ) -> (Self, QueryStep) {
        let mut peers: Vec<usize> =
            (0..facts.ranks.len()).filter(|&rank| !facts.ranks[rank].is_local).collect();
        // Rotated by rank, so that the ranks do not all query the same peer first.
        let next = peers.iter().position(|&peer| peer > me).unwrap_or(0);
        peers.rotate_left(next);
        let (arrived, unknown): (Vec<_>, Vec<_>) =
            peers.into_iter().partition(|&peer| facts.ranks[peer].arrived == Some(true));
        let (stage, (first, rest)) = match unknown.len() <= QUERY_ALL_LIMIT {
            true => (Stage::Others, (unknown, Vec::new())),
            false => (Stage::Needed, unknown.into_iter().partition(|&peer| facts.ranks[peer].missing)),
        };
        let step = QueryStep::Ask(first.clone());
        let (begun, until) = (now, now + limits.query);
        (Self { subject, stage, begun, until, first, rest, arrived, is_indirect: false }, step)
    }

    /// Starts the query of the peers of messages.
    pub(super) fn of_messages(
        subject: Subject,
        peers: Vec<usize>,
        now: Instant,
        limits: &Limits,
    ) -> (Self, QueryStep) {
        let (first, rest, arrived) = (Vec::new(), Vec::new(), Vec::new());
        let (stage, until) = (Stage::Activity, now + limits.query);
        let query = Self { subject, stage, begun: now, until, first, rest, arrived, is_indirect: false };
        (query, QueryStep::Ask(peers))
    }

    /// Returns the next step. A report of a rank that aborted the group ends the queries of other nodes.
    pub(super) fn advance(&mut self, now: Instant, limits: &Limits, me: usize, facts: &Facts) -> QueryStep {
        let aborted = facts.ranks.iter().any(|rank| !rank.is_local && rank.abort.is_some());
        let over = now >= self.until || aborted;
        if facts.is_querying && !(over && (self.stage != Stage::Activity || now >= self.until)) {
            return QueryStep::Wait(self.until.min(self.next_poll(now, limits)));
        }
        let arrived = |rank: usize| facts.ranks[rank].arrived;
        let local_missing = facts.ranks.iter().any(|rank| rank.is_local && rank.arrived == Some(false));
        loop {
            match self.stage {
                Stage::Needed => {
                    let waits = self.first.iter().all(|&rank| arrived(rank) == Some(true));
                    if waits && !local_missing && matches!(self.subject, Subject::LateCall(_)) {
                        (self.stage, self.is_indirect) = (Stage::Complete, true);
                        continue;
                    }
                    self.stage = match !over && !local_missing && waits {
                        true => Stage::AwaitReport { until: now + limits.report_wait },
                        false => return self.ask_others(over),
                    };
                }
                Stage::AwaitReport { until } if now < until && !over => {
                    return QueryStep::Wait(until.min(self.next_poll(now, limits)));
                }
                Stage::AwaitReport { .. } => return self.ask_others(over),
                Stage::Others => {
                    let silent = Some(QueryAnswer::HostSilent);
                    let mut unknown = self.first.iter().chain(&self.rest);
                    let missing = local_missing || unknown.any(|&rank| arrived(rank) == Some(false));
                    let explained = missing && facts.ranks.iter().all(|rank| rank.answer != silent);
                    self.stage = Stage::Arrived;
                    if !over && !explained && !self.arrived.is_empty() {
                        return QueryStep::Ask(self.arrived.clone());
                    }
                }
                Stage::Arrived => {
                    self.stage = Stage::Activity;
                    (self.begun, self.until) = (now, now + limits.query);
                    let queried = queried_ranks(me, facts);
                    return QueryStep::Ask(
                        queried.into_iter().filter(|&rank| facts.ranks[rank].is_local).collect(),
                    );
                }
                Stage::Activity | Stage::Complete => {
                    self.stage = Stage::Complete;
                    return QueryStep::Complete;
                }
            }
        }
    }

    /// Returns the time of the next poll for replies. A running process replies within milliseconds, so the first
    /// intervals are short: another rank may end the group meanwhile.
    pub(super) fn next_poll(&self, now: Instant, limits: &Limits) -> Instant {
        now + now.duration_since(self.begun).clamp(limits.poll, limits.query_poll)
    }

    fn ask_others(&mut self, over: bool) -> QueryStep {
        self.stage = Stage::Others;
        QueryStep::Ask(if over { Vec::new() } else { self.rest.clone() })
    }
}
