//! Error texts: both calls of a mismatch, missing ranks, dead ranks.

use std::sync::Arc;
use std::time::{Duration, Instant};

use smddp_base::{CallFingerprint, Mismatch};
use smddp_group::{Facts, QueryAnswer, RankFacts};
use smddp_plan::Collective;
use smddp_process::STOPPED;

use crate::call::fingerprint::{self, call};
use crate::call::numbered;
use crate::call::types::DType;
use crate::error::Error;
use crate::failure::names::GroupNames;
use crate::failure::pending::{ExpiredMessage, PendingCall};
use crate::failure::report;

/// Description of a rank of another node whose process does not run.
const UNRESPONSIVE: &str = "does not answer, though its host does: its process is stopped, or has no time";

pub(crate) fn mismatch(
    group: &GroupNames,
    collective: Collective,
    seq: u64,
    mine: CallFingerprint,
    found: Mismatch,
) -> Error {
    let peer = group.describe(found.rank);
    let me = group.me;
    let detail = match found.bytes {
        Some((expected, offered)) => {
            let element = fingerprint::dtype(mine).map_or(1, DType::size) as u64;
            format!(
                "rank {me} expects {} elements ({expected} bytes) from {peer}, which sends {} ({offered} bytes); check the \
                 sizes on both ranks",
                expected / element,
                offered / element
            )
        }
        None => format!(
            "rank {me} calls {}, {peer} calls {}; all ranks of a group must make the same calls in the same order{}",
            call(mine),
            call(found.theirs),
            if call(mine) == call(found.theirs) { " with the same SMDDP_* settings" } else { "" },
        ),
    };
    let what = match fingerprint::is_leaving(mine) {
        true => call(mine),
        false => numbered(collective, seq),
    };
    Error::Mismatch { what, group: group.group(), rank: found.rank, detail }
}

pub(crate) fn timeout(group: &GroupNames, facts: &Facts, call: &PendingCall) -> Error {
    let (missing, detail) = absent(group, facts, call, ", or give the group a longer timeout");
    Error::Timeout { what: call.name(), group: group.group(), after: call.timeout, missing, detail }
}

/// Warning about a call that waits for a long time.
pub(crate) fn waiting(group: &GroupNames, facts: &Facts, call: &PendingCall, now: Instant) -> String {
    let (operation, name, waited) = (call.name(), &group.group, now.duration_since(call.since).as_secs());
    let limit = call.deadline().map(|_| format!(" of at most {} s", call.timeout.as_secs()));
    let (_, detail) = absent(group, facts, call, "");
    format!("{operation} on group `{name}` has waited for {waited} s{}: {detail}", limit.unwrap_or_default())
}

/// Log text for a call that waits for late ranks. `None` if no rank is known to be late.
pub(crate) fn late(group: &GroupNames, facts: &Facts, call: &PendingCall, after: Duration) -> Option<String> {
    let absent = |&rank: &usize| rank != group.me && facts.ranks[rank].arrived == Some(false);
    let absent: Vec<usize> = (0..group.size()).filter(absent).collect();
    (!absent.is_empty()).then(|| {
        let (operation, name, missing) = (call.name(), &group.group, report::list(group, &absent));
        format!("{operation} on group `{name}` has waited for {} s; missing: {missing}", after.as_secs())
    })
}

/// Timeout of an operation whose work is completely on the device but does not complete there.
pub(crate) fn device_timeout(group: &GroupNames, call: &PendingCall) -> Error {
    Error::Timeout {
        what: call.name(),
        group: group.group(),
        after: call.timeout,
        missing: Vec::new(),
        detail: "all ranks have made this call and all of its work is on their devices, but this rank's device has \
                 not completed it: a kernel before it on the caller's stream may not end, or another rank's device hangs \
                 (nvidia-smi, py-spy dump --pid); or give the group a longer timeout"
            .to_owned(),
    }
}

/// Diagnosis of ranks that answer but never acknowledge data: the network drops large packets (path MTU).
fn undelivered(group: &GroupNames, facts: &Facts) -> Option<String> {
    let answers = |rank: &RankFacts| rank.answer != Some(QueryAnswer::HostSilent);
    let mut ranks = facts.ranks.iter().enumerate().filter(|(_, rank)| answers(rank));
    let (first, payload) = ranks.find_map(|(rank, facts)| Some((rank, facts.unacknowledged?)))?;
    Some(format!(
        "{} does not acknowledge data although its host answers: packets with {payload} bytes of data do not arrive there, \
         smaller ones do; compare the MTU of the interfaces on both hosts and of tunnels between them (ip link), and try \
         ping -M do -s {}",
        group.describe(first),
        // The TCP header with timestamps (32 bytes), less the ICMP header (8 bytes).
        payload + 24
    ))
}

/// Returns the ranks whose hosts did not reply to a query.
fn silent(facts: &Facts) -> Vec<usize> {
    let ranks = facts.ranks.iter().enumerate();
    ranks.filter(|(_, facts)| facts.answer == Some(QueryAnswer::HostSilent)).map(|(rank, _)| rank).collect()
}

/// Returns the ranks whose processes do not run although their hosts do, with a description.
fn stalled(facts: &Facts) -> Vec<(usize, &'static str)> {
    let with = |answer: QueryAnswer, text: &'static str| {
        let ranks = facts.ranks.iter().enumerate().filter(move |(_, facts)| facts.answer == Some(answer));
        ranks.map(move |(rank, _)| (rank, text))
    };
    with(QueryAnswer::Stopped, STOPPED).chain(with(QueryAnswer::ProcessUnresponsive, UNRESPONSIVE)).collect()
}

/// Returns the ranks that are late for the observed operation, and the ranks whose progress is unknown. A rank that
/// leaves the group is late. A rank of unknown progress is late if its host is silent.
fn late_and_unknown(me: usize, facts: &Facts, silent: &[usize]) -> (Vec<usize>, Vec<usize>) {
    let (mut late, mut unknown) = (Vec::new(), Vec::new());
    for (rank, facts) in facts.ranks.iter().enumerate().filter(|(rank, _)| *rank != me) {
        match facts.arrived {
            // The rank is leaving the group instead of making this call.
            Some(true) if facts.fingerprint.is_some_and(fingerprint::is_leaving) => late.push(rank),
            Some(true) => {}
            None if !silent.contains(&rank) => unknown.push(rank),
            _ => late.push(rank),
        }
    }
    (late, unknown)
}

/// Returns the ranks that the operation in progress waits for, and all ranks except `me`. The awaited ranks come first,
/// because only a few ranks are queried.
fn awaited_first(me: usize, facts: &Facts) -> (Vec<usize>, Vec<usize>) {
    let others = (0..facts.ranks.len()).filter(|&rank| rank != me);
    let (awaited, others): (Vec<_>, Vec<_>) = others.partition(|&rank| facts.ranks[rank].awaited);
    let all = [&awaited[..], &others[..]].concat();
    (awaited, all)
}

/// Returns the ranks whose activities the text of a timeout contains.
pub(crate) fn queried_ranks(me: usize, facts: &Facts) -> Vec<usize> {
    let silent = silent(facts);
    let (late, unknown) = late_and_unknown(me, facts, &silent);
    let mut ranks = match () {
        () if !late.is_empty() || !unknown.is_empty() => late,
        () if silent.is_empty() && stalled(facts).is_empty() => awaited_first(me, facts).1,
        () => Vec::new(),
    };
    ranks.truncate(MAX_QUERIED);
    ranks
}

/// Ranks that have not arrived at `op`, and the text of a timeout. `remedy`: appended to the advice about late ranks.
fn absent(group: &GroupNames, facts: &Facts, op: &PendingCall, remedy: &str) -> (Vec<usize>, String) {
    let (me, size, silent, stalled) = (group.me, group.size(), silent(facts), stalled(facts));
    let (late, mut unknown) = late_and_unknown(me, facts, &silent);
    let mut parts = Vec::new();
    if !late.is_empty() || !unknown.is_empty() {
        let arrived = size - late.len() - unknown.len();
        let mut text = format!("{arrived} of {size} ranks arrived");
        if !late.is_empty() {
            text += &format!(", missing: {}", report::list(group, &late));
        }
        parts.push(text);
        parts.push(format!("the call is {}", call(op.fingerprint)));
        parts.extend(activities(facts, &late));
        unknown.retain(|rank| stalled.iter().all(|(stalled, _)| stalled != rank));
        if !unknown.is_empty() {
            parts.push(format!("unknown: {}, which did not answer", report::list(group, &unknown)));
        }
    } else if silent.is_empty() && !stalled.is_empty() {
        parts.push(format!("all {size} ranks arrived; the call is {}", call(op.fingerprint)));
    } else if silent.is_empty() {
        let (awaited, all) = awaited_first(me, facts);
        let waits = match awaited.is_empty() {
            true => String::new(),
            false => format!(", and this rank waits for {}", report::list(group, &awaited)),
        };
        parts.push(format!(
            "all {size} ranks arrived, but the operation did not end{waits}; a rank is stopped or gets no processor time; the \
             call is {}",
            call(op.fingerprint)
        ));
        parts.extend(activities(facts, &all));
    }
    parts.extend(undelivered(group, facts));
    for (rank, state) in stalled.iter().filter(|(rank, _)| !late.contains(rank)).take(MAX_QUERIED) {
        parts.push(format!("{} {state}", group.describe(*rank)));
    }
    if !silent.is_empty() {
        let verb = if silent.len() == 1 { "does" } else { "do" };
        parts.push(format!(
            "{} {verb} not answer: the host is down or cut off, or the process is stopped",
            report::list(group, &silent)
        ));
    }
    if late.iter().any(|r| !silent.contains(r)) {
        parts.push(format!("inspect their stacks (py-spy dump --pid){remedy}"));
    }
    let is_missing =
        |r: &usize| late.contains(r) || silent.contains(r) || stalled.iter().any(|(s, _)| s == r);
    let missing = (0..size).filter(is_missing).collect();
    (missing, parts.join("; "))
}

/// Returns the activities that the first of these ranks reported.
fn activities(facts: &Facts, ranks: &[usize]) -> Vec<String> {
    let queried = ranks.iter().take(MAX_QUERIED);
    queried
        .filter_map(|&rank| Some(format!("rank {rank} {}", facts.ranks[rank].activity.as_deref()?)))
        .collect()
}

/// Error of a send or recv past its deadline.
pub(crate) fn expired(group: &GroupNames, facts: &Facts, message: &ExpiredMessage) -> Error {
    let missing: Vec<usize> = message.peer.into_iter().collect();
    let detail = match missing.first() {
        Some(&rank) => {
            let other =
                format!("the transfer did not begin or complete; the peer is {}", group.describe(rank));
            [vec![other], activities(facts, &missing)].concat().join("; ")
        }
        None => "no rank sent a message with this tag".to_owned(),
    };
    let (what, group) = (message.description.clone(), group.group());
    Error::Timeout { what, group, after: message.timeout, missing, detail }
}

/// Maximum number of missing ranks that are queried for their activity.
pub(crate) const MAX_QUERIED: usize = 3;

/// Appends the other lost ranks to the description of a loss, since any of them may be the first cause.
pub(crate) fn with_others(group: &GroupNames, how: &str, others: &[usize]) -> String {
    if others.is_empty() {
        how.to_owned()
    } else {
        format!("{how}; also lost: {}", report::list(group, others))
    }
}

/// Text of an error of the group for processes that later find this process dead.
pub(crate) fn recorded(group: &GroupNames, error: &Error) -> String {
    format!("{} of group `{}`: {error}", group.describe(group.me), group.group)
}

/// Describes the last error that a process recorded, and its age. Empty if there is none.
pub(crate) fn last_error(error: Option<&(Duration, Arc<str>)>) -> String {
    error.map_or_else(String::new, |(ago, text)| {
        format!("; its last recorded error, {:.2} s before this one: {text}", ago.as_secs_f64())
    })
}

/// Error that the other ranks report when this rank closes the group with `pending` unfinished.
pub(crate) fn departure(
    group: &GroupNames,
    pending: &str,
    own_error: Option<&(Duration, Arc<str>)>,
) -> Error {
    let how =
        format!("left the group (destroyed it or exited) with {pending} pending{}", last_error(own_error));
    lost(group, pending.to_owned(), group.me, &how)
}

/// Error of operation `what` for the loss of a rank.
pub(crate) fn lost(group: &GroupNames, what: String, rank: usize, how: &str) -> Error {
    Error::PeerLost {
        what,
        group: group.group(),
        rank,
        who: group.describe(rank),
        how: how.to_owned(),
        advice: report::LOST_ADVICE,
    }
}

/// Error of a process that cannot reach a rank which may be healthy.
pub(crate) fn unreachable(group: &GroupNames, what: &str, rank: usize, reason: &str) -> Error {
    let (me, other) = (group.describe(group.me), group.describe(rank));
    Error::System {
        what: format!("{what} on group `{}` failed: {me} cannot reach {other}", group.group),
        reason: reason.to_owned(),
    }
}
