//! Text format of the failure monitor's cases, as the recorder writes it and the tests read it: one line
//! `MS | facts | pending -> verdict` per observation.
//!
//! In free texts, a backslash precedes semicolons, vertical bars, backslashes and the `>` of an arrow.

use std::fmt::Write;
use std::time::{Duration, Instant};

use smddp_base::{CallFingerprint, Mismatch};
use smddp_group::{Facts, Liveness, QueryAnswer, RankFacts};
use smddp_plan::Collective;

use crate::call::fingerprint;
use crate::call::name_of;
use crate::call::types::{DType, RedOp};
use crate::failure::monitor::Verdict;
use crate::failure::pending::{Pending, PendingCall, PendingMessage, PendingMessages, WaitedMessage};

/// Call of the monitor.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Event {
    Observe,
    /// Mismatched call of another rank: sequence number and fingerprint of this rank's call, and the other call.
    Differ(u64, CallFingerprint, Mismatch),
    /// Text of a transport error before the observation, and whether another cause is known already.
    TransportError(String, bool),
}

/// Name of the call by which a rank leaves.
const LEAVING: &str = "leaving";

/// Returns the fingerprint of the call with this name, over 5 elements.
pub(crate) fn named_call(name: &str) -> Option<CallFingerprint> {
    let of = |collective: Collective| CallFingerprint {
        call: collective as u64
            | (DType::F32 as u64) << 8
            | u64::from(RedOp::Sum.code()) << 16
            | if collective.has_root() { 1 } else { 0xffff } << 24,
        count: 5,
    };
    if name == LEAVING {
        return Some(fingerprint::leaving(of(Collective::AllReduce)));
    }
    Some(of(Collective::ALL.into_iter().find(|&collective| name_of(collective) == name)?))
}

/// Returns `NAME`, or `NAME:CALL:COUNT` for a call that differs from [`named_call`].
fn call(fingerprint: CallFingerprint) -> String {
    let name = match fingerprint::collective(fingerprint) {
        _ if fingerprint::is_leaving(fingerprint) => LEAVING,
        Some(collective) => name_of(collective),
        None => "unknown",
    };
    match named_call(name) == Some(fingerprint) {
        true => name.to_owned(),
        false => format!("{name}:{:#x}:{}", fingerprint.call, fingerprint.count),
    }
}

/// Escapes the separators in a free text.
fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '\n' => escaped += "\\n",
            '\\' | ';' | '|' => escaped.extend(['\\', character]),
            '>' if escaped.ends_with('-') => escaped += "\\>",
            _ => escaped.push(character),
        }
    }
    escaped
}

/// Returns the milliseconds, with six decimals unless they are zero.
pub(crate) fn ms(time: Duration) -> String {
    match (time.as_millis(), time.subsec_nanos() % 1_000_000) {
        (whole, 0) => whole.to_string(),
        (whole, part) => format!("{whole}.{part:06}"),
    }
}

/// Returns the facts as the cases state them, with `event`.
pub(crate) fn facts_text(event: &Event, facts: &Facts) -> String {
    let mut words = Vec::new();
    match event {
        Event::Observe => {}
        Event::Differ(seq, mine, found) => words.push(mismatch("differ", *seq, *mine, *found)),
        Event::TransportError(error, explained) => {
            let kind = if *explained { "device_error" } else { "transport_error" };
            words.push(format!("{kind} {}", escape(error)));
        }
    }
    words.extend(facts.mismatches.iter().map(|call| mismatch("mismatch", call.seq, call.mine, call.found)));
    for (rank, facts) in facts.ranks.iter().enumerate() {
        words.extend(rank_words(facts).into_iter().map(|word| format!("{rank} {word}")));
    }
    if facts.is_querying {
        words.push("querying".to_owned());
    }
    words.join("; ")
}

fn mismatch(kind: &str, seq: u64, mine: CallFingerprint, found: Mismatch) -> String {
    let bytes = found.bytes.map(|(expected, offered)| format!(" {expected} {offered}"));
    format!("{kind} {seq} {} {} {}{}", call(mine), found.rank, call(found.theirs), bytes.unwrap_or_default())
}

/// Returns the differences from a rank of this node that has arrived.
fn rank_words(facts: &RankFacts) -> Vec<String> {
    let mut words = Vec::new();
    let mut arrived = Some(true);
    if !facts.is_local {
        words.push("remote".to_owned());
        arrived = None;
    }
    match &facts.liveness {
        Liveness::Alive => {}
        Liveness::Left => words.push("left".to_owned()),
        Liveness::Unreachable { reason } => words.push(format!("unreachable {}", escape(reason))),
        Liveness::Lost { order, reason } => words.push(format!("lost {order} {}", escape(reason))),
    }
    if let Some(abort) = &facts.abort {
        let kind = if abort.is_later { "aborts_later" } else { "aborts" };
        words.push(format!("{kind} {}", escape(&abort.report)));
    }
    words.extend(facts.corrupted.as_ref().map(|text| format!("corrupted {}", escape(text))));
    if facts.missing {
        words.push("missing".to_owned());
        arrived = arrived.map(|_| false);
    }
    if facts.arrived != arrived {
        let word = facts.arrived.map_or("unknown", |arrived| if arrived { "arrived" } else { "late" });
        words.push(word.to_owned());
    }
    words.extend(facts.fingerprint.map(|fingerprint| format!("calls {}", call(fingerprint))));
    let flags = [
        (facts.completed, "completed"),
        (facts.undelivered, "undelivered"),
        (facts.awaited, "awaited"),
        (facts.messages_announced, "announced"),
    ];
    words.extend(flags.into_iter().filter(|(is_set, _)| *is_set).map(|(_, word)| word.to_owned()));
    words.extend(facts.last_error.as_ref().map(|(age, text)| format!("error {} {}", ms(*age), escape(text))));
    words.extend(facts.answer.map(|answer| {
        let word = match answer {
            QueryAnswer::Replied => "replied",
            QueryAnswer::Stopped => "stopped",
            QueryAnswer::ProcessUnresponsive => "unresponsive",
            QueryAnswer::HostSilent => "silent",
        };
        word.to_owned()
    }));
    words.extend(facts.activity.as_ref().map(|text| format!("does {}", escape(text))));
    words.extend(facts.unacknowledged.map(|payload| format!("unacknowledged {payload}")));
    words
}

/// Returns the pending operations as the cases state them, with times relative to `base`.
pub(crate) fn pending_text(pending: &Pending, base: Instant) -> String {
    let mut words: Vec<String> = pending.call.iter().map(|call| call_word(call, base)).collect();
    words.extend(pending.on_device.iter().map(|call| format!("device {}", call_word(call, base))));
    words.extend(message_words(&pending.messages, base));
    let flags = [(pending.moving, "moving"), (pending.advanced, "advanced")];
    words.extend(flags.into_iter().filter(|(is_set, _)| *is_set).map(|(_, word)| word.to_owned()));
    words.join("; ")
}

/// Returns `CALL SEQ [TIMEOUT] [since MS] [queued]`.
fn call_word(pending: &PendingCall, base: Instant) -> String {
    // A collective on a device has no fingerprint here.
    let call = match fingerprint::collective(pending.fingerprint) == Some(pending.collective) {
        true => call(pending.fingerprint),
        false => name_of(pending.collective).to_owned(),
    };
    let mut text = format!("{call} {}", pending.seq);
    if pending.timeout != Duration::MAX {
        let _ = write!(text, " {}", ms(pending.timeout));
    }
    if pending.since != base {
        let _ = write!(text, " since {}", ms(pending.since.duration_since(base)));
    }
    text + if pending.begun { "" } else { " queued" }
}

fn message_words(messages: &PendingMessages, base: Instant) -> Vec<String> {
    let mut words = Vec::new();
    words.extend(messages.oldest.as_ref().map(|name| format!("oldest {}", escape(name))));
    for peer in &messages.departed {
        let rank = peer.rank;
        let needed = if peer.needed { " needed" } else { "" };
        words.push(format!("with {rank}{needed}{}", if peer.awaited { " awaited" } else { "" }));
        words.extend(peer.unexpected.as_ref().map(|text| format!("unexpected {rank} {}", escape(text))));
        let wrong_tag = peer.wrong_tag.as_ref();
        words.extend(wrong_tag.map(|error| format!("wrong_tag {rank} {}", escape(&error.to_string()))));
    }
    if !messages.unconfirmed.is_empty() {
        words.push(format!("unconfirmed {}", list(&messages.unconfirmed)));
    }
    words.extend(messages.expired.iter().map(|message| format!("expired {}", message_words_of(message))));
    words.extend(messages.waited.iter().map(|WaitedMessage { message, since, moved }| {
        format!("waited {} {moved} {}", ms(since.duration_since(base)), message_words_of(message))
    }));
    words.extend(messages.deadline.map(|due| format!("deadline {}", ms(due.duration_since(base)))));
    words
}

/// Returns `NUMBER PEER [begun] TIMEOUT DESCRIPTION`.
fn message_words_of(message: &PendingMessage) -> String {
    let PendingMessage { number, timeout, .. } = message;
    let peer = message.peer.map_or_else(|| "any".to_owned(), |rank| rank.to_string());
    let begun = if message.begun { " begun" } else { "" };
    format!("{number} {peer}{begun} {} {}", ms(*timeout), escape(&message.description))
}

fn list(ranks: &[usize]) -> String {
    ranks.iter().map(usize::to_string).collect::<Vec<_>>().join(",")
}

/// Returns a verdict as the cases state it, with times relative to `base`.
pub(crate) fn verdict_text(verdict: &Verdict, base: Instant) -> String {
    let text = match verdict {
        Verdict::Wait { until: None } => "wait".to_owned(),
        Verdict::Wait { until: Some(until) } => format!("wait {}", ms(until.duration_since(base))),
        Verdict::Query { ranks } => format!("query {}", list(ranks)).trim_end().to_owned(),
        Verdict::Log(text) => format!("log {text}"),
        Verdict::Warn { text, quiet } => format!("{} {text}", if *quiet { "warn_quietly" } else { "warn" }),
        Verdict::EndMessages(ended) => {
            let ended: Vec<String> =
                ended.iter().map(|(number, error)| format!("{number}: {error}")).collect();
            format!("end_messages {}", ended.join(" & "))
        }
        Verdict::EndLeaveCall { reason, report } => {
            let report = report.as_ref().map(|report| format!(" & report {report}"));
            format!("end_leave_call {reason}{}", report.unwrap_or_default())
        }
        Verdict::Fail(failure) => {
            let report = failure.report.as_ref().map(|report| format!(" & forward {report}"));
            let last = failure.last_error.as_ref().map(|text| format!(" & last error {text}"));
            format!("fail {}{}{}", failure.error, report.unwrap_or_default(), last.unwrap_or_default())
        }
    };
    text.replace('\n', "\\n")
}
