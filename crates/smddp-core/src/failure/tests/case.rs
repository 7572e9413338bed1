//! Parser of cases. A case has a name, the number of ranks and one line per step: `MS | facts | pending -> verdict`.
//! `due MS` marks a step whose verdict is `wait` one nanosecond earlier.

use std::time::{Duration, Instant};

use smddp_base::{CallFingerprint, Mismatch};
use smddp_group::{AbortReport, CallMismatch, Facts, Liveness, QueryAnswer, RankFacts};

use crate::call::fingerprint;
use crate::error::Error;
use crate::failure::case_text::{Event, named_call};
use crate::failure::pending::{
    PeerMessages, Pending, PendingCall, PendingMessage, PendingMessages, WaitedMessage,
};

pub(crate) struct Case {
    pub(crate) name: String,
    pub(crate) size: usize,
    /// Rank that observes.
    pub(crate) me: usize,
    pub(crate) steps: Vec<Step>,
}

#[derive(Clone)]
pub(crate) struct Step {
    pub(crate) at: Duration,
    pub(crate) is_due: bool,
    pub(crate) event: Event,
    pub(crate) facts: Facts,
    pending: String,
    pub(crate) verdict: String,
}

/// Parses the name of a call, or `NAME:CALL:COUNT`.
fn call(text: &str) -> CallFingerprint {
    let mut parts = text.split(':');
    let named = named_call(parts.next().unwrap());
    let Some(word) = parts.next() else { return named.unwrap_or_else(|| panic!("call {text}")) };
    let call = u64::from_str_radix(word.trim_start_matches("0x"), 16).unwrap();
    CallFingerprint { call, count: parts.next().unwrap().parse().unwrap() }
}

/// Parses milliseconds with up to six decimals.
fn ms(text: &str) -> Duration {
    let (whole, part) = text.split_once('.').unwrap_or((text, ""));
    let nanoseconds: u64 = format!("{part:0<6}").parse().unwrap();
    Duration::from_millis(whole.parse().unwrap()) + Duration::from_nanos(nanoseconds)
}

fn list(text: &str) -> Vec<usize> {
    text.split(',').filter(|rank| !rank.is_empty()).map(|rank| rank.parse().unwrap()).collect()
}

/// Splits off the first word.
fn first(text: &str) -> (&str, &str) {
    let (word, rest) = text.trim().split_once(' ').unwrap_or((text.trim(), ""));
    (word, rest.trim())
}

/// Splits off a rank.
fn rank(text: &str) -> (usize, &str) {
    let (rank, rest) = first(text);
    (rank.parse().unwrap(), rest)
}

/// Splits at a separator that no backslash precedes.
fn split(text: &str, separator: char) -> Vec<&str> {
    let (mut parts, mut begin, mut is_escaped) = (Vec::new(), 0, false);
    for (at, character) in text.char_indices() {
        if character == separator && !is_escaped {
            parts.push(text[begin..at].trim());
            begin = at + 1;
        }
        is_escaped = character == '\\' && !is_escaped;
    }
    parts.push(text[begin..].trim());
    parts
}

/// Returns the words between semicolons.
fn words(text: &str) -> impl Iterator<Item = &str> {
    split(text, ';').into_iter().filter(|word| !word.is_empty())
}

/// Resolves the escapes of a free text.
fn unescape(text: &str) -> String {
    let (mut plain, mut is_escaped) = (String::new(), false);
    for character in text.chars() {
        match (is_escaped, character) {
            (false, '\\') => is_escaped = true,
            (true, 'n') => (plain.push('\n'), is_escaped = false).1,
            (_, character) => (plain.push(character), is_escaped = false).1,
        }
    }
    plain
}

impl Case {
    /// Parses the cases of a text. A case begins with `== name, N ranks` or `== name, N ranks, rank R`; lines with `#`
    /// are comments.
    pub(crate) fn parse(text: &str) -> Vec<Self> {
        let mut cases: Vec<Self> = Vec::new();
        for line in text.lines().filter(|line| !line.trim().is_empty() && !line.starts_with('#')) {
            if let Some(title) = line.strip_prefix("== ") {
                let (title, me) = title.rsplit_once(", rank ").unwrap_or((title, "0"));
                let (name, ranks) = title.rsplit_once(", ").unwrap();
                let (size, me) = (rank(ranks).0, me.parse().unwrap());
                cases.push(Self { name: name.to_owned(), size, me, steps: Vec::new() });
            } else {
                let case = cases.last_mut().unwrap();
                let step = Step::parse(line, case.size);
                case.steps.push(step);
            }
        }
        cases
    }
}

impl Step {
    pub(super) fn parse(line: &str, size: usize) -> Self {
        let (line, verdict) = line.split_once(" -> ").unwrap();
        let parts = split(line, '|');
        let at = parts[0];
        let is_due = at.starts_with("due ");
        let at = ms(at.trim_start_matches("due "));
        let (mut facts, mut event) = (Facts::default(), Event::Observe);
        facts.ranks = vec![RankFacts { is_local: true, arrived: Some(true), ..RankFacts::default() }; size];
        for fact in words(parts[1]) {
            if let Some(found) = add(&mut facts, fact) {
                event = found;
            }
        }
        let pending = parts.get(2).copied().unwrap_or_default().to_owned();
        Self { at, is_due, event, facts, pending, verdict: verdict.trim().to_owned() }
    }

    /// Returns the pending operations; calls were submitted at `base` unless they state another time.
    pub(crate) fn pending(&self, base: Instant) -> Pending {
        let mut pending = Pending::default();
        for word in words(&self.pending) {
            let (kind, rest) = first(word);
            match kind {
                "device" => pending.on_device.push(pending_call(rest, base)),
                "moving" => pending.moving = true,
                "advanced" => pending.advanced = true,
                _ if !add_messages(&mut pending.messages, kind, rest, base) => {
                    pending.call = Some(pending_call(word, base));
                }
                _ => {}
            }
        }
        pending
    }
}

/// Parses `CALL SEQ [TIMEOUT] [since MS] [queued]`: `all_reduce 4 100` is operation 4 with a timeout of 100 ms.
fn pending_call(text: &str, base: Instant) -> PendingCall {
    let mut words = text.split(' ').peekable();
    let fingerprint = call(words.next().unwrap());
    let mut pending = PendingCall {
        collective: fingerprint::collective(fingerprint).unwrap(),
        seq: words.next().unwrap().parse().unwrap(),
        fingerprint,
        since: base,
        timeout: Duration::MAX,
        begun: true,
    };
    while let Some(word) = words.next() {
        match word {
            "since" => pending.since = base + ms(words.next().unwrap()),
            "queued" => pending.begun = false,
            timeout => pending.timeout = ms(timeout),
        }
    }
    pending
}

/// Parses `7 1 begun 100 recv #7`: message 7 of rank 1, with a timeout of 100 ms. Its transfer has begun.
fn pending_message(text: &str) -> PendingMessage {
    let (number, rest) = first(text);
    let (peer, rest) = first(rest);
    let begun = rest.strip_prefix("begun");
    let (timeout, description) = first(begun.unwrap_or(rest));
    PendingMessage {
        number: number.parse().unwrap(),
        description: unescape(description),
        peer: peer.parse().ok(),
        begun: begun.is_some(),
        timeout: ms(timeout),
    }
}

/// Adds a fact about messages. Returns false for a word of another kind.
fn add_messages(messages: &mut PendingMessages, kind: &str, rest: &str, base: Instant) -> bool {
    match kind {
        "oldest" => messages.oldest = Some(unescape(rest)),
        "unconfirmed" => messages.unconfirmed = list(rest),
        "deadline" => messages.deadline = Some(base + ms(rest)),
        "expired" => messages.expired.push(pending_message(rest)),
        // waited 400 4096 7 1 ...: a thread waits in the message since 400 ms, and 4096 bytes of it have arrived.
        "waited" => {
            let (since, rest) = first(rest);
            let (moved, rest) = first(rest);
            let (since, moved) = (base + ms(since), moved.parse().unwrap());
            messages.waited = Some(WaitedMessage { message: pending_message(rest), since, moved });
        }
        "with" => {
            let (rank, rest) = rank(rest);
            let mut with = PeerMessages { rank, ..PeerMessages::default() };
            with.needed = rest.contains("needed");
            with.awaited = rest.contains("awaited");
            messages.departed.push(with);
        }
        "unexpected" | "wrong_tag" => {
            let (rank, text) = rank(rest);
            let with = messages.departed.iter_mut().find(|with| with.rank == rank).unwrap();
            match kind {
                "unexpected" => with.unexpected = Some(unescape(text)),
                _ => with.wrong_tag = Some(Error::Config(unescape(text))),
            }
        }
        _ => return false,
    }
    true
}

/// Adds one fact, for example `1 left`. Returns an event other than an observation.
fn add(facts: &mut Facts, fact: &str) -> Option<Event> {
    let (subject, rest) = first(fact);
    match subject {
        "querying" => facts.is_querying = true,
        // differ 4 all_reduce 1 all_gather: this rank's call 4 and the one of rank 1. Two numbers of bytes may follow.
        "differ" | "mismatch" => {
            let words: Vec<&str> = rest.split(' ').collect();
            let (seq, mine) = (words[0].parse().unwrap(), call(words[1]));
            let bytes = words.get(4).map(|expected| (expected.parse().unwrap(), words[5].parse().unwrap()));
            let found = Mismatch { rank: words[2].parse().unwrap(), theirs: call(words[3]), bytes };
            if subject == "differ" {
                return Some(Event::Differ(seq, mine, found));
            }
            facts.mismatches.push(CallMismatch { seq, mine, found });
        }
        "transport_error" | "device_error" => {
            return Some(Event::TransportError(unescape(rest), subject == "device_error"));
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
            let (order, reason) = rank(rest);
            facts.liveness = Liveness::Lost { order, reason: unescape(reason) };
        }
        "left" => facts.liveness = Liveness::Left,
        "unreachable" => facts.liveness = Liveness::Unreachable { reason: unescape(rest) },
        "aborts" | "aborts_later" => {
            facts.abort =
                Some(AbortReport { report: unescape(rest).into(), is_later: kind == "aborts_later" });
        }
        "corrupted" => facts.corrupted = Some(unescape(rest).into()),
        "missing" => (facts.missing, facts.arrived) = (true, facts.arrived.map(|_| false)),
        "arrived" => facts.arrived = Some(true),
        "late" => facts.arrived = Some(false),
        "completed" => facts.completed = true,
        "unknown" => facts.arrived = None,
        "undelivered" => facts.undelivered = true,
        "awaited" => facts.awaited = true,
        "announced" => facts.messages_announced = true,
        "calls" => facts.fingerprint = Some(call(rest)),
        // error 1500 text: the last error of the process, recorded 1500 ms ago.
        "error" => {
            let (age, text) = first(rest);
            facts.last_error = Some((ms(age), unescape(text).into()));
        }
        "does" => facts.activity = Some(unescape(rest).into()),
        "replied" => facts.answer = Some(QueryAnswer::Replied),
        "stopped" => facts.answer = Some(QueryAnswer::Stopped),
        "unresponsive" => facts.answer = Some(QueryAnswer::ProcessUnresponsive),
        "silent" => facts.answer = Some(QueryAnswer::HostSilent),
        "unacknowledged" => facts.unacknowledged = Some(rest.parse().unwrap()),
        _ => panic!("fact {fact}"),
    }
}
