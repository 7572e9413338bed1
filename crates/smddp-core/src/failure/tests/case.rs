//! Cases of the failure monitor as text. A case has a name, the number of ranks and one line per step:
//! `MS | facts | pending -> verdict`. `due MS` marks a step whose verdict is `wait` one nanosecond earlier.

use std::time::{Duration, Instant};

use smddp_base::{CallFingerprint, Mismatch};
use smddp_group::{AbortReport, CallMismatch, Facts, Liveness, QueryAnswer, RankFacts};
use smddp_plan::Collective;

use crate::call::fingerprint;
use crate::call::types::{DType, RedOp};
use crate::error::Error;
use crate::failure::monitor::Verdict;
use crate::failure::pending::{ExpiredMessage, PeerMessages, Pending, PendingCall};

pub(super) struct Case {
    pub(super) name: String,
    pub(super) size: usize,
    pub(super) steps: Vec<Step>,
}

pub(super) enum Event {
    Observe,
    Differ(u64, CallFingerprint, Mismatch),
    TransportError(Error, bool),
}

pub(super) struct Step {
    pub(super) at: Duration,
    pub(super) is_due: bool,
    pub(super) event: Event,
    pub(super) facts: Facts,
    pending: String,
    pub(super) verdict: String,
}

/// Returns the fingerprint of the call with this name, over 5 elements.
fn call(name: &str) -> CallFingerprint {
    let of = |collective: Collective, root: u64| CallFingerprint {
        call: collective as u64 | (DType::F32 as u64) << 8 | u64::from(RedOp::Sum.code()) << 16 | root << 24,
        count: 5,
    };
    match name {
        "all_reduce" => of(Collective::AllReduce, 0xffff),
        "all_gather" => of(Collective::AllGather, 0xffff),
        "broadcast" => of(Collective::Broadcast, 1),
        "leaving" => fingerprint::leaving(of(Collective::AllReduce, 0xffff)),
        _ => panic!("call {name}"),
    }
}

fn ms(text: &str) -> Duration {
    Duration::from_millis(text.parse().unwrap())
}

fn list(text: &str) -> Vec<usize> {
    text.split(',').filter(|rank| !rank.is_empty()).map(|rank| rank.parse().unwrap()).collect()
}

/// Splits off the first word.
fn first(text: &str) -> (&str, &str) {
    let (word, rest) = text.trim().split_once(' ').unwrap_or((text.trim(), ""));
    (word, rest.trim())
}

impl Case {
    /// Reads the cases of a file. A case begins with `== name, N ranks`; lines with `#` are comments.
    pub(super) fn parse(file: &str) -> Vec<Self> {
        let path = format!("{}/src/failure/tests/{file}.txt", env!("CARGO_MANIFEST_DIR"));
        let text = std::fs::read_to_string(path).unwrap();
        let mut cases: Vec<Self> = Vec::new();
        for line in text.lines().filter(|line| !line.trim().is_empty() && !line.starts_with('#')) {
            if let Some(title) = line.strip_prefix("== ") {
                let (name, ranks) = title.rsplit_once(", ").unwrap();
                let size = first(ranks).0.parse().unwrap();
                cases.push(Self { name: name.to_owned(), size, steps: Vec::new() });
            } else {
                let case = cases.last_mut().unwrap();
                let step = Step::parse(line, case);
                case.steps.push(step);
            }
        }
        cases
    }
}

impl Step {
    pub(super) fn parse(line: &str, case: &Case) -> Self {
        let (line, verdict) = line.rsplit_once(" -> ").unwrap();
        let mut parts = line.splitn(3, '|');
        let (at, facts, pending) = (parts.next().unwrap(), parts.next().unwrap(), parts.next().unwrap_or(""));
        let at = at.trim();
        let is_due = at.starts_with("due ");
        let at = ms(at.trim_start_matches("due "));
        let (mut known, mut event) = (Facts::default(), Event::Observe);
        known.ranks =
            vec![RankFacts { is_local: true, arrived: Some(true), ..RankFacts::default() }; case.size];
        for fact in facts.split(';').map(str::trim).filter(|fact| !fact.is_empty()) {
            if let Some(found) = add(&mut known, fact) {
                event = found;
            }
        }
        Self {
            at,
            is_due,
            event,
            facts: known,
            pending: pending.to_owned(),
            verdict: verdict.trim().to_owned(),
        }
    }

    /// Returns the pending operations; all calls were submitted at `base`.
    pub(super) fn pending(&self, base: Instant) -> Pending {
        let mut pending = Pending::default();
        for word in self.pending.split(';').map(str::trim).filter(|word| !word.is_empty()) {
            let (kind, rest) = first(word);
            let messages = &mut pending.messages;
            match kind {
                // all_reduce 4 100: operation 4 with a timeout of 100 ms.
                "all_reduce" | "broadcast" | "leaving" | "device" => {
                    let (seq, timeout) = first(rest);
                    let fingerprint = call(if kind == "device" { "all_reduce" } else { kind });
                    let call = PendingCall {
                        collective: fingerprint::collective(fingerprint).unwrap(),
                        seq: seq.parse().unwrap(),
                        fingerprint,
                        since: base,
                        timeout: if timeout.is_empty() { Duration::MAX } else { ms(timeout) },
                        begun: true,
                    };
                    if kind == "device" { pending.on_device.push(call) } else { pending.call = Some(call) }
                }
                "oldest" => messages.oldest = Some(rest.to_owned()),
                "unconfirmed" => messages.unconfirmed = list(rest),
                "deadline" => messages.deadline = Some(base + ms(rest)),
                // expired 7 1 begun: message 7 of rank 1, whose transfer has begun.
                "expired" => {
                    let (number, rest) = first(rest);
                    let (peer, begun) = first(rest);
                    messages.expired.push(ExpiredMessage {
                        number: number.parse().unwrap(),
                        description: format!("recv #{number} (5 elements of float32, tag 0)"),
                        peer: peer.parse().ok(),
                        begun: begun == "begun",
                        timeout: Duration::from_millis(100),
                    });
                }
                "with" => {
                    let (rank, rest) = first(rest);
                    let mut with = PeerMessages { rank: rank.parse().unwrap(), ..PeerMessages::default() };
                    let (kind, rest) = first(rest);
                    with.needed = kind != "unneeded";
                    with.awaited = kind == "awaited" || kind == "wrong_tag";
                    with.unexpected =
                        (kind == "unexpected" || rest.starts_with("sends")).then(|| rest.to_owned());
                    with.wrong_tag = (kind == "wrong_tag").then(|| Error::Config(rest.to_owned()));
                    messages.departed.push(with);
                }
                "moving" => pending.moving = true,
                "advanced" => pending.advanced = true,
                _ => panic!("pending {word}"),
            }
        }
        pending
    }
}

/// Adds one fact, for example `1 left`. Returns an event other than an observation.
fn add(facts: &mut Facts, fact: &str) -> Option<Event> {
    let (subject, rest) = first(fact);
    match subject {
        "querying" => facts.is_querying = true,
        // differ 4 all_reduce 1 all_gather: this rank's call 4 and the one of rank 1.
        "differ" | "mismatch" => {
            let words: Vec<&str> = rest.split(' ').collect();
            let (seq, mine) = (words[0].parse().unwrap(), call(words[1]));
            let found = Mismatch { rank: words[2].parse().unwrap(), theirs: call(words[3]), bytes: None };
            if subject == "differ" {
                return Some(Event::Differ(seq, mine, found));
            }
            facts.mismatches.push(CallMismatch { seq, mine, found });
        }
        "transport_error" | "device_error" => {
            let error = Error::System { operation: "all_reduce #4".to_owned(), reason: rest.to_owned() };
            return Some(Event::TransportError(error, subject == "device_error"));
        }
        "all" => {
            for rank in 1..facts.ranks.len() {
                add(facts, &format!("{rank} {rest}"));
            }
        }
        ranks if ranks.contains('-') => {
            let (from, to) = ranks.split_once('-').unwrap();
            for rank in from.parse::<usize>().unwrap()..=to.parse().unwrap() {
                add(facts, &format!("{rank} {rest}"));
            }
        }
        rank => add_to(&mut facts.ranks[rank.parse::<usize>().unwrap()], rest),
    }
    None
}

fn add_to(facts: &mut RankFacts, fact: &str) {
    let (kind, rest) = first(fact);
    match kind {
        "remote" => (facts.is_local, facts.arrived) = (false, None),
        "lost" => {
            let (order, reason) = first(rest);
            facts.liveness = Liveness::Lost { order: order.parse().unwrap(), reason: reason.to_owned() };
        }
        "left" => facts.liveness = Liveness::Left,
        "unreachable" => facts.liveness = Liveness::Unreachable { reason: rest.to_owned() },
        "aborts" | "aborts_later" => {
            // The header is separated by commas here.
            let (header, text) = rest.split_once("\\n").unwrap_or((rest, ""));
            let lines = if rest.contains("\\n") { format!("\n{text}") } else { String::new() };
            let report = (header.replace(',', ";") + &lines.replace("\\n", "\n")).into();
            facts.abort = Some(AbortReport { report, is_later: kind == "aborts_later" });
        }
        "missing" => (facts.missing, facts.arrived) = (true, facts.arrived.map(|_| false)),
        "arrived" => facts.arrived = Some(true),
        "late" => facts.arrived = Some(false),
        "completed" => facts.completed = true,
        "undelivered" => facts.undelivered = true,
        "awaited" => facts.awaited = true,
        "announced" => facts.messages_announced = true,
        "calls" => facts.fingerprint = Some(call(rest)),
        "error" => facts.last_error = Some((Duration::from_millis(1500), rest.into())),
        "does" => facts.activity = Some(rest.into()),
        "replied" => facts.answer = Some(QueryAnswer::Replied),
        "stopped" => facts.answer = Some(QueryAnswer::Stopped),
        "unresponsive" => facts.answer = Some(QueryAnswer::ProcessUnresponsive),
        "silent" => facts.answer = Some(QueryAnswer::HostSilent),
        "unacknowledged" => facts.unacknowledged = Some(rest.parse().unwrap()),
        _ => panic!("fact {fact}"),
    }
}

/// Returns a verdict as the cases state it.
pub(super) fn text(verdict: &Verdict, base: Instant) -> String {
    match verdict {
        Verdict::Wait { until: None } => "wait".to_owned(),
        Verdict::Wait { until: Some(until) } => format!("wait {}", until.duration_since(base).as_millis()),
        Verdict::Query { ranks } => {
            let ranks: Vec<String> = ranks.iter().map(usize::to_string).collect();
            format!("query {}", ranks.join(",")).trim_end().to_owned()
        }
        Verdict::Log(text) => format!("log {text}"),
        Verdict::Warn { text, quiet } => format!("{} {text}", if *quiet { "warn_quietly" } else { "warn" }),
        Verdict::EndMessages(ended) => {
            let ended: Vec<String> =
                ended.iter().map(|(number, error)| format!("{number}: {error}")).collect();
            format!("end_messages {}", ended.join(" & "))
        }
        Verdict::EndLeaveCall { reason, report } => {
            let report = report.as_ref().map(|report| format!(" & report {}", report.replace('\n', "\\n")));
            format!("end_leave_call {reason}{}", report.unwrap_or_default())
        }
        Verdict::Fail(failure) => {
            let report = failure.report.as_ref();
            let report = report.map(|report| format!(" & forward {}", report.replace('\n', "\\n")));
            let last = failure.last_error.as_ref().map(|text| format!(" & last error {text}"));
            format!("fail {}{}{}", failure.error, report.unwrap_or_default(), last.unwrap_or_default())
        }
    }
}
