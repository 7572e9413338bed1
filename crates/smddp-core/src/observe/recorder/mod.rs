//! The recorder: what each group of this process does and did last, for whoever asks, whatever its threads are doing. Always
//! on; the driver pays two reads of the processor's counter and a cache line for an operation.

mod clock;
mod dump;
mod ring;
mod snapshot;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

use smddp_plan::Topology;
use smddp_transport::CallFingerprint;
use smddp_transport::fork::PerProcess;
use smddp_transport::process::{StatusQuery, set_responder};

use self::clock::Clock;
pub(crate) use self::clock::ticks;
pub(crate) use self::ring::Outcome;
use self::ring::Ring;
use self::snapshot::Seen;
use crate::call::fingerprint::mix;
use crate::call::message_label::Label;
pub use crate::observe::counters::Taken;
pub(crate) use crate::observe::counters::Tally;
use crate::sync::lock;

/// One group's.
pub(crate) struct Recorder {
    name: String,
    rank: usize,
    size: usize,
    nodes: usize,
    way: String,
    /// Collectives.
    ring: Ring,
    /// Sends and recvs, numbered in the order of their posting. Their headers are those of [`Label`].
    messages: Ring,
    tally: Arc<Tally>,
    failed: OnceLock<String>,
    /// Operations that ended in time, whatever is still in the ring.
    finished: AtomicU64,
}

static LIVE: PerProcess<Mutex<Vec<Weak<Recorder>>>> = PerProcess::new();

/// What questions about a rank of a group are about, the same wherever it is asked.
pub(crate) fn about(group: &str, rank: usize) -> u64 {
    group.bytes().fold(mix(rank as u64), |word, byte| mix(word ^ u64::from(byte)))
}

impl Recorder {
    /// Of the newest `capacity` operations. From now on this process answers questions.
    pub(crate) fn new(
        (name, way): (&str, &str),
        rank: usize,
        topology: &Topology,
        tally: Arc<Tally>,
        capacity: usize,
    ) -> Arc<Self> {
        clock::begin();
        set_responder(answer);
        let recorder = Arc::new(Self {
            name: name.to_owned(),
            rank,
            size: topology.size(),
            nodes: topology.nodes(),
            way: way.to_owned(),
            ring: Ring::new(capacity),
            messages: Ring::new(capacity),
            tally,
            failed: OnceLock::new(),
            finished: AtomicU64::new(0),
        });
        let mut live = lock(LIVE.get());
        live.retain(|known| known.strong_count() > 0);
        live.push(Arc::downgrade(&recorder));
        recorder
    }

    /// The driver knows of an operation since `now`, in [`ticks`]; `first`: nothing is before it.
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

    /// It is over, and the next one's turn has come.
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

    /// The driver knows of a send or recv.
    #[inline]
    pub(crate) fn posted(&self, seq: u64, label: &Label, bytes: usize) {
        self.messages.submit(seq, label.fingerprint(), bytes as u64, ticks(), false);
    }

    /// It is announced, or the message that it takes is.
    #[inline]
    pub(crate) fn begun(&self, seq: u64) {
        self.messages.start(seq, ticks());
    }

    #[inline]
    pub(crate) fn over(&self, seq: u64, outcome: Outcome) {
        self.messages.end(seq, ticks(), outcome);
    }

    /// The group is dead.
    pub(crate) fn failed(&self, reason: &str) {
        let _ = self.failed.set(reason.to_owned());
    }

    /// What ended last; and what has waited longest, of collectives and of messages.
    fn now(&self) -> (Option<Seen>, Vec<Seen>) {
        let (last, present) = snapshot::now(&self.ring, Seen::Collective);
        let (last_message, present_message) = snapshot::now(&self.messages, Seen::Message);
        let last = last.into_iter().chain(last_message).max_by_key(Seen::order);
        (last, present.into_iter().chain(present_message).collect())
    }
}

fn live() -> Vec<Arc<Recorder>> {
    lock(LIVE.get()).iter().filter_map(Weak::upgrade).collect()
}

fn answer(question: StatusQuery) -> String {
    match question {
        StatusQuery::Activity(key) => {
            // Ranks ask that where a deadline has passed and this one is not there: it may not know of any failure.
            dump::write_soon();
            doing(key)
        }
        StatusQuery::Status => dump::process(false).to_string(),
        StatusQuery::Dump => dump(),
    }
}

/// The newest operations of all groups of this process, as JSON.
pub fn dump() -> String {
    dump::process(true).to_string()
}

pub(crate) use self::dump::write;

/// "is in all_reduce #3 of this group for 1.2 s, at train.py:88 in step": what the rank does that `key` is about.
fn doing(key: u64) -> String {
    let clock = Clock::now();
    let all = live();
    let (asked, others): (Vec<_>, Vec<_>) =
        all.iter().partition(|recorder| about(&recorder.name, recorder.rank) == key);
    let Some(recorder) = asked.last() else {
        return format!("has left the group, and is at {}", dump::main_thread_location());
    };
    if recorder.ring.is_off() {
        return format!("keeps no record (SMDDP_RECORDER=0), and is at {}", dump::main_thread_location());
    }
    let (last, present) = recorder.now();
    let ago = |ticks: u64| seconds(clock.since(ticks));
    let calls: Vec<String> = present
        .iter()
        .map(|seen| format!("in {} for {}", seen.numbered(), ago(seen.entry().submitted)))
        .collect();
    let mut text = match calls.is_empty() {
        false => format!("is {}", calls.join(" and ")),
        true => "is in no call of this group".to_owned(),
    };
    match last {
        Some(seen) => {
            let (call, ago) = (seen.numbered(), ago(seen.entry().ended));
            text += &match seen.entry().outcome {
                Outcome::Failed => format!(" ({call} failed {ago} ago)"),
                _ => format!(" (last finished {call}, {ago} ago)"),
            };
        }
        None => text += " (none finished before)",
    }
    for other in &others {
        if let Some(seen) = other.now().1.first() {
            let (call, since) = (seen.numbered(), ago(seen.entry().submitted));
            text += &format!(", but in {call} of group `{}` for {since}", other.name);
            break;
        }
    }
    if let Some((failed, name)) = last_failure(&others) {
        let (call, at) = (failed.numbered(), clock.since(failed.entry().ended));
        if at < JUST_NOW {
            text += &format!(", and {call} of group `{name}` failed {} ago", seconds(at));
        }
    }
    text + &format!(", at {}", dump::main_thread_location())
}

/// Ranks that wait for each other in different groups have one deadline as a rule, and who is asked last is out of its call.
const JUST_NOW: Duration = Duration::from_secs(5);

/// The call that failed last in any of these groups, and its group.
fn last_failure<'a>(of: &[&'a Arc<Recorder>]) -> Option<(Seen, &'a str)> {
    let last = |recorder: &&'a Arc<Recorder>| Some((recorder.now().0?, recorder.name.as_str()));
    let failed = of.iter().filter_map(last).filter(|(seen, _)| seen.entry().outcome == Outcome::Failed);
    failed.max_by_key(|(seen, _)| seen.order())
}

fn seconds(time: Duration) -> String {
    format!("{:.1} s", time.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;
    use smddp_plan::Collective;

    /// Of a group of this test's own.
    fn recorder(name: &str) -> Arc<Recorder> {
        Recorder::new((name, "shm"), 0, &Topology::single(2), Arc::default(), 4)
    }

    fn makes(recorder: &Recorder, collective: Collective, outcome: Option<Outcome>) {
        recorder.submitted(0, CallFingerprint { what: collective as u64, count: 1 }, 4, ticks(), true);
        if let Some(outcome) = outcome {
            recorder.ended(0, outcome, ticks(), None);
        }
    }

    #[test]
    fn who_is_in_no_call_says_which_one_of_another_group_has_just_failed() {
        let [asked, well, failed, waits] = ["who asked", "who well", "who failed", "who waits"].map(recorder);
        let says = || doing(about("who asked", 0));
        makes(&well, Collective::Barrier, Some(Outcome::Ok));
        assert!(!says().contains(" failed "), "{}", says());
        makes(&failed, Collective::AllGather, Some(Outcome::Failed));
        let failure = ", and all_gather #0 of group `who failed` failed 0.0 s ago";
        assert!(says().contains(failure), "{}", says());
        makes(&waits, Collective::AllReduce, None);
        assert!(says().contains(", but in all_reduce #0 of group `who waits` for "), "{}", says());
        assert!(says().contains(failure), "{}", says());
        makes(&asked, Collective::AllGather, Some(Outcome::Failed));
        assert!(says().contains(" (all_gather #0 failed 0.0 s ago)"), "{}", says());
    }
}
