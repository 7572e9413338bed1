//! The recorder: recent and pending operations of each group of this process, readable at any time from any thread.
//! It is always on. An operation costs the engine two reads of the cycle counter and one cache line.

mod clock;
mod dump;
mod job;
mod links;
mod ring;
mod snapshot;
mod waited;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

use smddp_base::CallFingerprint;
use smddp_base::fork::PerProcess;
use smddp_plan::Topology;
use smddp_process::{StatusQuery, set_responder};

use self::clock::Clock;
pub(crate) use self::clock::ticks;
pub(crate) use self::job::Members;
pub(crate) use self::ring::Outcome;
use self::ring::{Entry, Ring};
use self::snapshot::RecorderSnapshot;
use self::waited::Waited;
pub(crate) use self::waited::{RecordedCall, WaitedCalls};
use crate::call::fingerprint::mix;
use crate::call::message_label::MessageLabel;
use crate::config::network::NetworkEstimate;
pub use crate::observe::counters::Counters;
pub(crate) use crate::observe::counters::PathCounters;
use crate::sync::lock;

/// Recorder of one group.
pub(crate) struct Recorder {
    name: String,
    rank: usize,
    size: usize,
    nodes: usize,
    path: String,
    members: Members,
    /// Collectives.
    ring: Ring,
    /// Sends and recvs, numbered in posting order. Their fingerprints are those of [`MessageLabel`].
    messages: Ring,
    counters: Arc<PathCounters>,
    failed: OnceLock<String>,
    /// Network estimate between nodes, once it is known.
    network: OnceLock<NetworkEstimate>,
    /// Set once this process has closed the group. A recorder lives as long as its communicator.
    closed: AtomicBool,
    /// Calls in which threads of this process wait.
    pub(crate) waited: WaitedCalls,
    /// Number of operations that succeeded, with those already overwritten in the ring.
    finished: AtomicU64,
}

/// Maximum number of pending collectives in a status, and of pending messages.
const MAX_PENDING: usize = 32;
/// Age from which a pending call without a registered wait is not waited for.
const WAIT_REGISTRATION: Duration = Duration::from_secs(1);

static LIVE: PerProcess<Mutex<Vec<Weak<Recorder>>>> = PerProcess::new();

/// Key of status queries for a rank of a group, equal in all processes.
pub(crate) fn query_key(group: &str, rank: usize) -> u64 {
    group.bytes().fold(mix(rank as u64), |word, byte| mix(word ^ u64::from(byte)))
}

impl Recorder {
    /// Keeps the newest `capacity` operations. From now on, this process answers status queries.
    pub(crate) fn new(
        (name, path, members): (&str, &str, Members),
        rank: usize,
        topology: &Topology,
        counters: Arc<PathCounters>,
        capacity: usize,
    ) -> Arc<Self> {
        clock::begin();
        set_responder(respond);
        let recorder = Arc::new(Self {
            name: name.to_owned(),
            rank,
            size: topology.size(),
            nodes: topology.nodes(),
            path: path.to_owned(),
            members,
            ring: Ring::new(capacity),
            messages: Ring::new(capacity),
            counters,
            failed: OnceLock::new(),
            network: OnceLock::new(),
            closed: AtomicBool::new(false),
            waited: WaitedCalls::default(),
            finished: AtomicU64::new(0),
        });
        let mut live = lock(LIVE.get());
        live.retain(|known| known.strong_count() > 0);
        live.push(Arc::downgrade(&recorder));
        recorder
    }

    /// Records a submitted operation at time `now` in [`ticks`]. `first`: no operation is before it in the queue.
    #[inline]
    pub(crate) fn submitted(
        &self,
        seq: u64,
        fingerprint: CallFingerprint,
        bytes: usize,
        now: u64,
        first: bool,
    ) {
        self.ring.submit(seq, fingerprint, bytes as u64, now, first);
    }

    /// Records the end of an operation, and the start of the `next` one.
    #[inline]
    pub(crate) fn ended(&self, seq: u64, outcome: Outcome, now: u64, next: Option<u64>) {
        self.ring.end(seq, now, outcome);
        if outcome == Outcome::Ok {
            self.finished.store(seq + 1, Ordering::Relaxed);
        }
        if let Some(next) = next {
            self.ring.start(next, now);
        }
    }

    /// Records a posted send or recv.
    #[inline]
    pub(crate) fn posted(&self, seq: u64, label: &MessageLabel, bytes: usize) {
        self.messages.submit(seq, label.fingerprint(), bytes as u64, ticks(), false);
    }

    /// Records that the message of a send or recv is announced.
    #[inline]
    pub(crate) fn begun(&self, seq: u64) {
        self.messages.start(seq, ticks());
    }

    #[inline]
    pub(crate) fn over(&self, seq: u64, outcome: Outcome) {
        self.messages.end(seq, ticks(), outcome);
    }

    /// Records the reason of a group failure.
    pub(crate) fn failed(&self, reason: &str) {
        let _ = self.failed.set(reason.to_owned());
    }

    /// Records the network estimate by which this group selects algorithms.
    pub(crate) fn set_network(&self, estimate: NetworkEstimate) {
        let _ = self.network.set(estimate);
    }

    /// Describes a rank of the group: "rank 3 (host h1, pid 812)".
    pub(crate) fn describe(&self, rank: usize) -> String {
        self.members.names.get(rank).cloned().unwrap_or_else(|| format!("rank {rank}"))
    }

    /// Records that this process closes the group.
    pub(crate) fn closed(&self) {
        self.closed.store(true, Ordering::Relaxed);
    }

    /// Returns the number of collectives that were submitted, and the oldest pending collectives and messages.
    fn pending(&self) -> (u64, Vec<RecorderSnapshot>) {
        let collectives = self.ring.entries();
        let submitted = collectives.last().map_or(0, |entry| entry.seq + 1);
        let pending = |entries: Vec<Entry>, kind: fn(Entry) -> RecorderSnapshot| {
            let pending = entries.into_iter().filter(|e| e.ended == 0 && e.outcome == Outcome::Running);
            pending.take(MAX_PENDING).map(kind).collect::<Vec<_>>()
        };
        let mut found = pending(collectives, RecorderSnapshot::Collective);
        found.extend(pending(self.messages.entries(), RecorderSnapshot::Message));
        (submitted, found)
    }

    /// Returns the last operation that ended, and the longest pending collective and message.
    fn now(&self) -> (Option<RecorderSnapshot>, Vec<RecorderSnapshot>) {
        let (last, present) = snapshot::now(&self.ring, RecorderSnapshot::Collective);
        let (last_message, present_message) = snapshot::now(&self.messages, RecorderSnapshot::Message);
        let last = last.into_iter().chain(last_message).max_by_key(RecorderSnapshot::order);
        (last, present.into_iter().chain(present_message).collect())
    }
}

fn live() -> Vec<Arc<Recorder>> {
    lock(LIVE.get()).iter().filter_map(Weak::upgrade).collect()
}

fn respond(question: StatusQuery) -> String {
    match question {
        StatusQuery::Activity(key) => {
            // Peers send this query when this rank is missing: after a minute, and at the deadline. It may not have
            // seen any failure yet.
            dump::write_soon();
            doing(key)
        }
        StatusQuery::Status => dump::process(false).to_string(),
        StatusQuery::Dump => dump(),
        StatusQuery::Job => job::job().to_string(),
    }
}

/// Returns the newest operations of all groups of this process as JSON.
pub fn dump() -> String {
    dump::process(true).to_string()
}

pub(crate) use self::dump::write;

/// Describes the state of the rank with this query key: "is in all_reduce #3 of this group for 1.2 s, at train.py:88
/// in step".
fn doing(key: u64) -> String {
    let clock = Clock::now();
    let all = live();
    let (asked, others): (Vec<_>, Vec<_>) =
        all.iter().partition(|recorder| query_key(&recorder.name, recorder.rank) == key);
    let Some(recorder) = asked.last() else {
        return format!("has left the group, and is at {}", dump::main_thread_location());
    };
    if recorder.ring.is_off() {
        return format!("keeps no record (SMDDP_RECORDER=0), and is at {}", dump::main_thread_location());
    }
    let (last, present) = recorder.now();
    let ago = |ticks: u64| seconds(clock.since(ticks));
    // A wait is registered after about half a second.
    let is_posted = |snapshot: &RecorderSnapshot| {
        recorder.waited.of(snapshot.recorded_call()) == Waited::No
            && clock.since(snapshot.entry().submitted) > WAIT_REGISTRATION
    };
    let (posted, waiting): (Vec<_>, Vec<_>) = present.into_iter().partition(is_posted);
    let calls: Vec<String> = waiting
        .iter()
        .map(|snapshot| format!("in {} for {}", snapshot.call_name(), ago(snapshot.entry().submitted)))
        .collect();
    let mut text = match calls.is_empty() {
        false => format!("is {}", calls.join(" and ")),
        true => "is in no call of this group".to_owned(),
    };
    match last {
        Some(snapshot) => {
            let (call, ago) = (snapshot.call_name(), ago(snapshot.entry().ended));
            text += &match snapshot.entry().outcome {
                Outcome::Failed => format!(" ({call} failed {ago} ago)"),
                _ => format!(" (last finished {call}, {ago} ago)"),
            };
        }
        None => text += " (none finished before)",
    }
    for snapshot in &posted {
        text += &format!(", has posted {} and does not wait for it", snapshot.call_name());
    }
    for other in &others {
        if let Some(snapshot) = other.now().1.first() {
            let (call, since) = (snapshot.call_name(), ago(snapshot.entry().submitted));
            text += &format!(", but in {call} of group `{}` for {since}", other.name);
            break;
        }
    }
    if let Some((failed, name)) = last_failure(&others) {
        let (call, at) = (failed.call_name(), clock.since(failed.entry().ended));
        if at < JUST_NOW {
            text += &format!(", and {call} of group `{name}` failed {} ago", seconds(at));
        }
    }
    text + &format!(", at {}", dump::main_thread_location())
}

/// Maximum age of a failure in another group that is reported, too. Ranks that wait for each other in different
/// groups usually have equal deadlines, so the last one queried has already failed.
const JUST_NOW: Duration = Duration::from_secs(5);

/// Returns the last failed call of these groups, and the name of its group.
fn last_failure<'a>(of: &[&'a Arc<Recorder>]) -> Option<(RecorderSnapshot, &'a str)> {
    let last = |recorder: &&'a Arc<Recorder>| Some((recorder.now().0?, recorder.name.as_str()));
    let failed =
        of.iter().filter_map(last).filter(|(snapshot, _)| snapshot.entry().outcome == Outcome::Failed);
    failed.max_by_key(|(snapshot, _)| snapshot.order())
}

fn seconds(time: Duration) -> String {
    format!("{:.1} s", time.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;
    use smddp_plan::Collective;

    /// Recorder of a group of this test.
    fn recorder(name: &str) -> Arc<Recorder> {
        Recorder::new((name, "shm", Members::default()), 0, &Topology::single(2), Arc::default(), 4)
    }

    fn record_call(recorder: &Recorder, collective: Collective, outcome: Option<Outcome>) {
        recorder.submitted(0, CallFingerprint { call: collective as u64, count: 1 }, 4, ticks(), true);
        if let Some(outcome) = outcome {
            recorder.ended(0, outcome, ticks(), None);
        }
    }

    #[test]
    fn pending_calls_are_the_oldest_and_submitted_calls_are_counted() {
        let recorder = Recorder::new(
            ("pending", "shm", Members::default()),
            0,
            &Topology::single(2),
            Arc::default(),
            4 * MAX_PENDING,
        );
        assert_eq!((recorder.pending().0, recorder.pending().1.len()), (0, 0));
        let calls = MAX_PENDING as u64 + 3;
        for seq in 0..calls {
            recorder.submitted(seq, CallFingerprint::default(), 4, ticks(), seq == 0);
        }
        recorder.ended(0, Outcome::Ok, ticks(), Some(1));
        let (submitted, pending) = recorder.pending();
        let numbers: Vec<u64> = pending.iter().map(|snapshot| snapshot.entry().seq).collect();
        assert_eq!((submitted, numbers), (calls, (1..=MAX_PENDING as u64).collect()));
    }

    #[test]
    fn rank_in_no_call_reports_a_recent_failure_of_another_group() {
        let [queried, finished, failed, pending] = ["queried", "finished", "failed", "pending"].map(recorder);
        let description = || doing(query_key("queried", 0));
        record_call(&finished, Collective::Barrier, Some(Outcome::Ok));
        assert!(!description().contains(" failed "), "{}", description());
        record_call(&failed, Collective::AllGather, Some(Outcome::Failed));
        let failure = ", and all_gather #0 of group `failed` failed 0.0 s ago";
        assert!(description().contains(failure), "{}", description());
        record_call(&pending, Collective::AllReduce, None);
        assert!(
            description().contains(", but in all_reduce #0 of group `pending` for "),
            "{}",
            description()
        );
        assert!(description().contains(failure), "{}", description());
        record_call(&queried, Collective::AllGather, Some(Outcome::Failed));
        assert!(description().contains(" (all_gather #0 failed 0.0 s ago)"), "{}", description());
    }
}
