//! Errors in words: both calls of a mismatch, who is missing, who died.

use smddp_plan::Collective;
use smddp_transport::{Head, Link, Mismatch};

use crate::call::name_of;
use crate::device::Flight;
use crate::error::Error;
use crate::exec::Op;
use crate::head::{self, call};
use crate::types::DType;

pub(crate) fn mismatch(
    link: &dyn Link,
    group: &str,
    collective: Collective,
    seq: u64,
    mine: Head,
    found: Mismatch,
) -> Error {
    let who = link.describe(found.rank);
    let me = link.rank();
    let detail = match found.bytes {
        Some((expected, offered)) => {
            let element = head::dtype(mine).map_or(1, DType::size) as u64;
            format!(
                "rank {me} expects {} elements ({expected} bytes) from {who}, which sends {} ({offered} bytes); check the \
                 sizes that both ranks give",
                expected / element,
                offered / element
            )
        }
        None => format!(
            "rank {me} calls {}, {who} calls {}; all ranks of a group must make the same calls in the same order{}",
            call(mine),
            call(found.theirs),
            if call(mine) == call(found.theirs) { " with the same SMDDP_* settings" } else { "" },
        ),
    };
    let what = match head::is_leaving(mine) {
        true => call(mine),
        false => format!("{} #{seq}", name_of(collective)),
    };
    Error::Mismatch { what, group: group.to_owned(), rank: found.rank, detail }
}

pub(crate) fn timeout(link: &dyn Link, group: &str, op: &Op) -> Error {
    let (missing, detail) = absent(link, op.seq);
    let what = format!("{} #{}", name_of(op.collective), op.seq);
    Error::Timeout { what, group: group.to_owned(), after: op.timeout, missing, detail }
}

/// An operation that is on the device since, and does not end there.
pub(crate) fn stuck(group: &str, flight: &Flight) -> Error {
    Error::Timeout {
        what: format!("{} #{}", name_of(flight.collective), flight.seq),
        group: group.to_owned(),
        after: flight.timeout,
        missing: Vec::new(),
        detail: "all ranks have made this call and all of its work is on their devices, but this rank's device is not \
                 through with it: a kernel before it on the caller's stream may not end, or another rank's device hangs \
                 (nvidia-smi, py-spy dump --pid); or give the group a longer timeout"
            .to_owned(),
    }
}

/// The ranks that operation `seq` lacks, and that in words. A rank that has begun it and does not answer any more is one
/// of them: its host may be without power.
fn absent(link: &dyn Link, seq: u64) -> (Vec<usize>, String) {
    let (size, silent) = (link.size(), link.silent());
    let others = |&r: &usize| r != link.rank();
    let late: Vec<usize> = (0..size).filter(others).filter(|&r| !link.arrived(r, seq)).collect();
    let names = |ranks: &[usize]| ranks.iter().map(|&r| link.describe(r)).collect::<Vec<_>>().join(", ");
    let mut parts = Vec::new();
    if !late.is_empty() {
        parts.push(format!("{} of {size} ranks arrived, missing: {}", size - late.len(), names(&late)));
    } else if silent.is_empty() {
        parts.push(format!(
            "all {size} ranks arrived, but the operation did not end; a rank is stopped or starved of time"
        ));
    }
    if !silent.is_empty() {
        let verb = if silent.len() == 1 { "does" } else { "do" };
        parts.push(format!(
            "{} {verb} not answer: the host is down or cut off, or the process is stopped",
            names(&silent)
        ));
    }
    if late.iter().any(|r| !silent.contains(r)) {
        parts.push(
            "look at what those are doing (py-spy dump --pid), or give the group a longer timeout".to_owned(),
        );
    }
    let missing = (0..size).filter(|r| late.contains(r) || silent.contains(r)).collect();
    (missing, parts.join("; "))
}

pub(crate) fn lost(link: &dyn Link, group: &str, what: String, rank: usize, how: &str) -> Error {
    Error::PeerLost {
        what,
        group: group.to_owned(),
        rank,
        who: link.describe(rank),
        how: how.to_owned(),
        advice: "this error is a consequence, and its own log has the first cause; destroy the group and make a new one \
                 without it to go on",
    }
}

/// What a poisoned group tells its other ranks: a kind, the ranks it is about, the text.
pub(crate) fn report(error: &Error) -> String {
    let (kind, ranks) = match error {
        Error::Timeout { missing, .. } => ('T', missing.as_slice()),
        Error::Mismatch { rank, .. } => ('M', std::slice::from_ref(rank)),
        Error::PeerLost { rank, .. } => ('L', std::slice::from_ref(rank)),
        _ => ('C', &[][..]),
    };
    let ranks: Vec<String> = ranks.iter().map(ToString::to_string).collect();
    format!("{kind}{}\n{error}", ranks.join(","))
}

/// Whether another rank's report is of calls that differ.
pub(crate) fn is_mismatch(why: &str) -> bool {
    why.starts_with('M')
}

/// Another rank's report, as an error of the same kind here.
pub(crate) fn reported(link: &dyn Link, group: &str, what: String, from: usize, why: &str) -> Error {
    let (head, text) = why.split_once('\n').unwrap_or((why, why));
    let ranks: Vec<usize> = head
        .get(1..)
        .unwrap_or_default()
        .split(',')
        .filter_map(|r| r.parse().ok())
        .filter(|&r| r < link.size())
        .collect();
    let about = ranks.first().copied();
    let group = group.to_owned();
    let detail = format!("{} reports: {text}", link.describe(from));
    match head.chars().next() {
        Some('T') => Error::Timeout { what, group, after: std::time::Duration::ZERO, missing: ranks, detail },
        Some('M') => Error::Mismatch { what, group, rank: from, detail },
        Some('L') => Error::PeerLost {
            what,
            group,
            rank: about.unwrap_or(from),
            who: about.map_or_else(|| link.describe(from), |r: usize| link.describe(r)),
            how: format!("is lost ({detail})"),
            advice: "destroy the group and make a new one without it to go on",
        },
        _ => Error::Closed { group, why: format!("{what}: {detail}") },
    }
}
