//! Error texts: both calls of a mismatch, missing ranks, dead ranks.

use std::time::Duration;

use smddp_plan::Collective;
use smddp_transport::process::record_error;
use smddp_transport::{CallFingerprint, Group, Mismatch};

use crate::call::fingerprint::{self, call};
use crate::call::numbered;
use crate::call::types::DType;
use crate::device::Enqueued;
use crate::error::Error;
use crate::failure::report;
use crate::observe::recorder;

/// A pending collective, as error texts name it.
#[derive(Clone, Copy)]
pub(crate) struct PendingCall {
    pub(crate) collective: Collective,
    pub(crate) seq: u64,
    pub(crate) fingerprint: CallFingerprint,
    pub(crate) timeout: Duration,
}

pub(crate) fn mismatch(
    group: &Group,
    name: &str,
    collective: Collective,
    seq: u64,
    mine: CallFingerprint,
    found: Mismatch,
) -> Error {
    let peer = group.info().describe(found.rank);
    let me = group.info().rank;
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
    Error::Mismatch { what, group: name.to_owned(), rank: found.rank, detail }
}

pub(crate) fn timeout(group: &Group, name: &str, op: PendingCall) -> Error {
    let (missing, detail) = absent(group, name, op);
    let what = numbered(op.collective, op.seq);
    Error::Timeout { what, group: name.to_owned(), after: op.timeout, missing, detail }
}

/// Log text for a call that waits for late ranks. `None` if no rank is known to be late; this does not query the
/// ranks.
pub(crate) fn late(group: &Group, name: &str, op: PendingCall, after: Duration) -> Option<String> {
    let absent = |&rank: &usize| rank != group.info().rank && group.arrived(rank, op.seq) == Some(false);
    let absent: Vec<usize> = (0..group.info().size).filter(absent).collect();
    (!absent.is_empty()).then(|| {
        let (operation, missing) = (numbered(op.collective, op.seq), report::list(group, &absent));
        format!("{operation} on group `{name}` has waited for {} s; missing: {missing}", after.as_secs())
    })
}

/// Timeout of an operation whose work is completely on the device but does not complete there.
pub(crate) fn device_timeout(name: &str, enqueued: &Enqueued) -> Error {
    Error::Timeout {
        what: numbered(enqueued.collective, enqueued.seq),
        group: name.to_owned(),
        after: enqueued.timeout,
        missing: Vec::new(),
        detail: "all ranks have made this call and all of its work is on their devices, but this rank's device has \
                 not completed it: a kernel before it on the caller's stream may not end, or another rank's device hangs \
                 (nvidia-smi, py-spy dump --pid); or give the group a longer timeout"
            .to_owned(),
    }
}

/// Diagnosis of ranks that answer but never acknowledge data: the network drops large packets (path MTU).
fn undelivered(group: &Group, silent: &[usize]) -> Option<String> {
    let mut ranks = group.unacknowledged();
    ranks.retain(|(rank, _)| !silent.contains(rank));
    let &(first, payload) = ranks.first()?;
    Some(format!(
        "{} does not acknowledge data although its host answers: packets with {payload} bytes of data do not arrive there, \
         smaller ones do; compare the MTU of the interfaces on both hosts and of tunnels between them (ip link), and try \
         ping -M do -s {}",
        group.info().describe(first),
        // The headers of TCP with its timestamps, less that of ICMP.
        payload + 24
    ))
}

/// Ranks that have not arrived at operation `op`, and the text of a timeout. They include a rank that has begun the
/// operation but no longer answers: its host may have lost power.
fn absent(group: &Group, name: &str, op: PendingCall) -> (Vec<usize>, String) {
    let seq = op.seq;
    let (me, size, silent, stalled) = (group.info().rank, group.info().size, group.silent(), group.stalled());
    let (mut late, mut unknown) = (Vec::new(), Vec::new());
    for rank in (0..size).filter(|&rank| rank != me) {
        match group.arrived(rank, seq) {
            // The rank is leaving the group instead of making this call.
            Some(true) if group.fingerprint_of(rank, seq).is_some_and(fingerprint::is_leaving) => {
                late.push(rank)
            }
            Some(true) => {}
            None if !silent.contains(&rank) => unknown.push(rank),
            _ => late.push(rank),
        }
    }
    let mut parts = Vec::new();
    if !late.is_empty() || !unknown.is_empty() {
        let arrived = size - late.len() - unknown.len();
        let mut text = format!("{arrived} of {size} ranks arrived");
        if !late.is_empty() {
            text += &format!(", missing: {}", report::list(group, &late));
        }
        parts.push(text);
        parts.push(format!("the call is {}", call(op.fingerprint)));
        parts.extend(activities(group, name, &late));
        unknown.retain(|rank| stalled.iter().all(|(stalled, _)| stalled != rank));
        if !unknown.is_empty() {
            parts.push(format!("unknown: {}, which did not answer", report::list(group, &unknown)));
        }
    } else if silent.is_empty() && !stalled.is_empty() {
        parts.push(format!("all {size} ranks arrived; the call is {}", call(op.fingerprint)));
    } else if silent.is_empty() {
        let mut awaited = group.missing_peers();
        let waits = match awaited.is_empty() {
            true => String::new(),
            false => format!(", and this rank waits for {}", report::list(group, &awaited)),
        };
        parts.push(format!(
            "all {size} ranks arrived, but the operation did not end{waits}; a rank is stopped or gets no processor time; the \
             call is {}",
            call(op.fingerprint)
        ));
        // The awaited ranks come first, because only a few are queried.
        awaited.extend((0..size).filter(|rank| *rank != me && !awaited.contains(rank)).collect::<Vec<_>>());
        parts.extend(activities(group, name, &awaited));
    }
    parts.extend(undelivered(group, &silent));
    for (rank, state) in stalled.iter().filter(|(rank, _)| !late.contains(rank)).take(MAX_QUERIED) {
        parts.push(format!("{} {state}", group.info().describe(*rank)));
    }
    if !silent.is_empty() {
        let verb = if silent.len() == 1 { "does" } else { "do" };
        parts.push(format!(
            "{} {verb} not answer: the host is down or cut off, or the process is stopped",
            report::list(group, &silent)
        ));
    }
    if late.iter().any(|r| !silent.contains(r)) {
        parts.push("inspect their stacks (py-spy dump --pid), or give the group a longer timeout".to_owned());
    }
    let is_missing =
        |r: &usize| late.contains(r) || silent.contains(r) || stalled.iter().any(|(s, _)| s == r);
    let missing = (0..size).filter(is_missing).collect();
    (missing, parts.join("; "))
}

/// Queries the first of these late ranks for their activity.
pub(crate) fn activities(group: &Group, name: &str, late: &[usize]) -> Vec<String> {
    let queried = late.iter().take(MAX_QUERIED);
    queried.filter_map(|&rank| Some(format!("rank {rank} {}", activity_of(group, name, rank)?))).collect()
}

/// Returns the activity that a rank reports, if any.
pub(crate) fn activity_of(group: &Group, name: &str, rank: usize) -> Option<String> {
    Some(group.activity(rank, recorder::query_key(name, rank))).filter(|activity| !activity.is_empty())
}

/// Maximum number of missing ranks that are queried for their activity.
pub(crate) const MAX_QUERIED: usize = 3;

/// Appends the other lost ranks to the description of a loss, since any of them may be the first cause.
pub(crate) fn with_others(group: &Group, how: &str, others: &[usize]) -> String {
    if others.is_empty() {
        how.to_owned()
    } else {
        format!("{how}; also lost: {}", report::list(group, others))
    }
}

/// Records this error of the group for processes that later find this process dead.
pub(crate) fn record_last_error(group: &Group, name: &str, error: &Error) {
    record_error(&format!("{} of group `{name}`: {error}", group.info().describe(group.info().rank)));
}

/// Returns the last error that the process of a lost rank recorded, if any.
pub(crate) fn last_error(group: &Group, rank: usize) -> String {
    group.last_error(rank).map_or_else(String::new, |(ago, text)| {
        format!("; its last recorded error, {:.2} s before this one: {text}", ago.as_secs_f64())
    })
}

/// Error that the other ranks report when this rank closes the group with `pending` unfinished.
pub(crate) fn departure(group: &Group, name: &str, pending: &str) -> Error {
    let me = group.info().rank;
    let how =
        format!("left the group (destroyed it or exited) with {pending} pending{}", last_error(group, me));
    lost(group, name, pending.to_owned(), me, &how)
}

/// Error of operation `what` for the loss of a rank.
pub(crate) fn lost(group: &Group, name: &str, what: String, rank: usize, how: &str) -> Error {
    Error::PeerLost {
        what,
        group: name.to_owned(),
        rank,
        who: group.info().describe(rank),
        how: how.to_owned(),
        advice: report::LOST_ADVICE,
    }
}

/// Error of a process that cannot reach a rank which may be healthy.
pub(crate) fn unreachable(group: &Group, name: &str, what: &str, rank: usize, reason: &str) -> Error {
    let (me, other) = (group.info().describe(group.info().rank), group.info().describe(rank));
    Error::System {
        what: format!("{what} on group `{name}` failed: {me} cannot reach {other}"),
        reason: reason.to_owned(),
    }
}
