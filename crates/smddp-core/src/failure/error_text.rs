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
use crate::failure::pending::{PendingCall, PendingMessage, WaitedMessage};
use crate::failure::report;

/// Cause of missing progress on a rank whose host is reachable.
const NOT_RUNNING: &str = "its process is stopped or gets no CPU time";

/// Remedy for ranks that have not arrived.
const INSPECT_STACKS: &str = "inspect their stacks (py-spy dump --pid)";

/// Remedy for an operation that all ranks have begun.
const INSPECT_PROCESSES: &str = "inspect the processes (ps -o stat,pcpu -p PID, py-spy dump --pid PID)";

/// Second remedy after a deadline.
const LONGER_TIMEOUT: &str = ", or give the group a longer timeout";

/// Remedy for corrupted data.
pub(crate) const CHECK_HARDWARE: &str = "check the memory and the network devices of the named hosts (edac-util, ethtool -S, dmesg), \
     and restart from a checkpoint that was written before";

/// Remedy for hosts that sent no reply.
const CHECK_HOSTS: &str = "check that the host runs and that this host reaches it (ping)";

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
    let operation = match fingerprint::is_leaving(mine) {
        true => call(mine),
        false => numbered(collective, seq),
    };
    Error::Mismatch { operation, group: group.group(), rank: found.rank, detail }
}

pub(crate) fn timeout(group: &GroupNames, facts: &Facts, call: &PendingCall) -> Error {
    let (missing, detail) = absent(group, facts, call, LONGER_TIMEOUT);
    Error::Timeout { operation: call.name(), group: group.group(), after: call.timeout, missing, detail }
}

/// Warning about a call that waits for a long time. `is_indirect`: all ranks that it needs wait themselves.
pub(crate) fn waiting(
    group: &GroupNames,
    facts: &Facts,
    call: &PendingCall,
    now: Instant,
    is_indirect: bool,
) -> String {
    let (operation, name, waited) = (call.name(), &group.group, now.duration_since(call.since).as_secs());
    let limit = call.deadline().map(|_| format!(" of at most {} s", call.timeout.as_secs()));
    let detail = match is_indirect {
        true => "the ranks that it needs wait themselves; their logs name the late ranks".to_owned(),
        false => absent(group, facts, call, "").1,
    };
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
        operation: call.name(),
        group: group.group(),
        after: call.timeout,
        missing: Vec::new(),
        detail: "all ranks have made this call and all of its work is on their devices, but this rank's device has \
                 not completed it: an earlier kernel on the caller's stream still runs, or another rank's device hangs; \
                 inspect both (nvidia-smi, py-spy dump --pid PID), or give the group a longer timeout"
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
fn stalled(facts: &Facts) -> Vec<(usize, String)> {
    let with = |answer: QueryAnswer, text: String| {
        let ranks = facts.ranks.iter().enumerate().filter(move |(_, facts)| facts.answer == Some(answer));
        ranks.map(move |(rank, _)| (rank, text.clone()))
    };
    let unresponsive = format!("sent no reply, but its host did: {NOT_RUNNING}");
    let stopped = with(QueryAnswer::Stopped, STOPPED.to_owned());
    stopped.chain(with(QueryAnswer::ProcessUnresponsive, unresponsive)).collect()
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

/// Ranks that have not arrived at `op`, and the text of a timeout. `second_remedy`: appended to the first one.
fn absent(group: &GroupNames, facts: &Facts, op: &PendingCall, second_remedy: &str) -> (Vec<usize>, String) {
    let (me, size, silent, stalled) = (group.me, group.size(), silent(facts), stalled(facts));
    let (late, mut unknown) = late_and_unknown(me, facts, &silent);
    let undelivered = undelivered(group, facts);
    let the_call = format!("the call is {}", call(op.fingerprint));
    let mut parts = Vec::new();
    if !late.is_empty() || !unknown.is_empty() {
        let arrived = size - late.len() - unknown.len();
        let mut text = format!("{arrived} of {size} ranks arrived");
        if !late.is_empty() {
            text += &format!(", missing: {}", report::list(group, &late));
        }
        parts.extend([text, the_call]);
        parts.extend(activities(facts, &late));
        unknown.retain(|rank| stalled.iter().all(|(stalled, _)| stalled != rank));
        if !unknown.is_empty() {
            parts.push(format!("state unknown: {}, which sent no reply", report::list(group, &unknown)));
        }
    } else if !silent.is_empty() || !stalled.is_empty() {
        parts.extend([format!("all {size} ranks arrived"), the_call]);
    } else {
        let (awaited, all) = awaited_first(me, facts);
        parts.push(format!("all {size} ranks arrived, but the operation is not complete"));
        if !awaited.is_empty() {
            parts.push(format!("this rank waits for {}", report::list(group, &awaited)));
        }
        if undelivered.is_none() {
            parts.push(format!("possible cause on another rank: {NOT_RUNNING}"));
        }
        parts.push(the_call);
        parts.extend(activities(facts, &all));
    }
    for (rank, state) in stalled.iter().filter(|(rank, _)| !late.contains(rank)).take(MAX_QUERIED) {
        parts.push(format!("{} {state}", group.describe(*rank)));
    }
    if !silent.is_empty() {
        let list = report::list(group, &silent);
        parts.push(format!(
            "{list} sent no reply: the host is down or unreachable, or the process is stopped"
        ));
    }
    let remedy = match () {
        () if late.iter().any(|rank| !silent.contains(rank)) || !unknown.is_empty() => Some(INSPECT_STACKS),
        () if silent.is_empty() && undelivered.is_none() => Some(INSPECT_PROCESSES),
        () => None,
    };
    parts.extend(undelivered);
    parts.extend((!silent.is_empty()).then(|| CHECK_HOSTS.to_owned()));
    parts.extend(remedy.map(|remedy| format!("{remedy}{second_remedy}")));
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
pub(crate) fn expired(group: &GroupNames, facts: &Facts, message: &PendingMessage) -> Error {
    let missing = message.peer.into_iter().collect();
    let detail = message_state(group, facts, message, LONGER_TIMEOUT);
    let (operation, group) = (message.description.clone(), group.group());
    Error::Timeout { operation, group, after: message.timeout, missing, detail }
}

/// Warning about a send or recv in which a thread waits for a long time.
pub(crate) fn waiting_message(
    group: &GroupNames,
    facts: &Facts,
    waited: &WaitedMessage,
    now: Instant,
) -> String {
    let WaitedMessage { message, since, .. } = waited;
    let PendingMessage { description, timeout, .. } = message;
    let (name, seconds) = (&group.group, now.duration_since(*since).as_secs());
    let limit = since.checked_add(*timeout).map(|_| format!(" of at most {} s", timeout.as_secs()));
    let detail = message_state(group, facts, message, "");
    format!(
        "{description} on group `{name}` has waited for {seconds} s{}: {detail}",
        limit.unwrap_or_default()
    )
}

/// Describes the state of a send or recv and of its peer, with remedies. `second_remedy`: appended to the first one.
fn message_state(group: &GroupNames, facts: &Facts, message: &PendingMessage, second_remedy: &str) -> String {
    let Some(rank) = message.peer else {
        return format!("no rank sent a message with this tag; check the tag on the sender{second_remedy}");
    };
    let state = match message.begun {
        true => "the transfer is not complete",
        false => "the transfer did not begin",
    };
    let peer = format!("the peer is {}", group.describe(rank));
    let remedy = format!("check that the peer makes the matching call with the same tag{second_remedy}");
    let before = [state.to_owned(), peer].into_iter();
    before.chain(activities(facts, &[rank])).chain([remedy]).collect::<Vec<_>>().join("; ")
}

/// Maximum number of missing ranks that are queried for their activity.
pub(crate) const MAX_QUERIED: usize = 3;

/// Appends the other lost ranks to the description of a loss, since any of them may be the first cause.
pub(crate) fn with_others(group: &GroupNames, reason: &str, others: &[usize]) -> String {
    if others.is_empty() {
        reason.to_owned()
    } else {
        format!("{reason}; also lost: {}", report::list(group, others))
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
    let reason =
        format!("left the group (destroyed it or exited) with {pending} pending{}", last_error(own_error));
    lost(group, pending.to_owned(), group.me, &reason)
}

/// Error of `operation` for the loss of a rank.
pub(crate) fn lost(group: &GroupNames, operation: String, rank: usize, reason: &str) -> Error {
    Error::PeerLost {
        operation,
        group: group.group(),
        rank,
        peer: group.describe(rank),
        reason: reason.to_owned(),
        remedy: report::LOST_REMEDY,
    }
}

/// Error of `operation` for data of rank `from` that changed in transit to this rank. `what`: description of the data.
pub(crate) fn corrupted(group: &GroupNames, operation: String, from: usize, what: &str) -> Error {
    let (sender, receiver) = (group.describe(from), group.describe(group.me));
    let detail = format!(
        "data from {sender} to {receiver} was corrupted: {what}; the network, or the memory of one of these two hosts, \
         changed the data; the reduction is not the cause; {CHECK_HARDWARE}"
    );
    Error::Corrupted { operation, group: group.group(), ranks: vec![from], detail }
}

/// Error of a process that cannot reach a rank which may be healthy.
pub(crate) fn unreachable(group: &GroupNames, operation: &str, rank: usize, reason: &str) -> Error {
    let (me, other) = (group.describe(group.me), group.describe(rank));
    Error::System {
        operation: format!("{operation} on group `{}` failed: {me} cannot reach {other}", group.group),
        reason: format!(
            "{reason}; that rank may be healthy: check the limits and the network of this process (smddp doctor)"
        ),
    }
}
