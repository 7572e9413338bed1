//! Abort reports: the first cause of a group's end, as the rank that found it describes it. A rank that fails
//! because of another rank's report forwards that report unchanged.

use std::time::Duration;

use smddp_base::MAX_ABORT_REPORT;

use super::names::GroupNames;
use crate::error::Error;

/// Maximum length of a rank list, in bytes.
pub(crate) const MAX_RANK_LIST: usize = 360;

/// Remedy in errors about a lost rank.
pub(super) const LOST_REMEDY: &str = "this error follows from that rank's failure: see its log for the first cause; to continue \
     without it, destroy the group and create a new one";

/// Formats ranks in ascending order in at most about `limit` bytes: "5, 258-269, and 37 more".
pub(crate) fn ranges(ranks: &[usize], limit: usize) -> String {
    let mut text = String::new();
    let mut at = 0;
    while at < ranks.len() {
        let run = ranks[at..].iter().enumerate().take_while(|&(i, &rank)| rank == ranks[at] + i).count();
        let range = match run {
            1 => ranks[at].to_string(),
            2 => format!("{}, {}", ranks[at], ranks[at + 1]),
            _ => format!("{}-{}", ranks[at], ranks[at + run - 1]),
        };
        let comma = if text.is_empty() { "" } else { ", " };
        if text.len() + comma.len() + range.len() > limit {
            return text + comma + &format!("and {} more", ranks.len() - at);
        }
        text += comma;
        text += &range;
        at += run;
    }
    text
}

/// Parses a text of [`ranges`]. The result lacks the ranks that "and N more" replaces.
fn parse_ranges(text: &str, size: usize) -> Vec<usize> {
    let range = |text: &str| {
        let (first, last) = text.split_once('-').unwrap_or((text, text));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        (last < size).then_some(first..=last)
    };
    text.split(", ").filter_map(range).flatten().collect()
}

/// Lists ranks with name and host. A long list has them for the first rank only, then numbers.
pub(crate) fn list(group: &GroupNames, ranks: &[usize]) -> String {
    let mut names = String::new();
    for (i, &rank) in ranks.iter().enumerate() {
        names += if i == 0 { "" } else { ", " };
        names += &group.describe(rank);
        if names.len() > MAX_RANK_LIST {
            return format!("{}, {}", group.describe(ranks[0]), ranges(&ranks[1..], MAX_RANK_LIST / 2));
        }
    }
    names
}

/// Encodes an error of this rank. First line: kind, this rank, affected ranks, and the time waited in milliseconds.
/// Then a line with the call, and the text.
pub(crate) fn own(me: usize, error: &Error) -> String {
    let full_text = error.to_string();
    let (kind, ranks, after, operation, text) = match error {
        Error::Timeout { missing, after, operation, detail, .. } => {
            ('T', missing.as_slice(), *after, operation, detail)
        }
        Error::Mismatch { rank, operation, detail, .. } => {
            ('M', std::slice::from_ref(rank), Duration::ZERO, operation, detail)
        }
        Error::Corrupted { ranks, operation, detail, .. } => {
            ('D', ranks.as_slice(), Duration::ZERO, operation, detail)
        }
        Error::PeerLost { rank, operation, reason, .. } => {
            ('L', std::slice::from_ref(rank), Duration::ZERO, operation, reason)
        }
        Error::Deadlock { rank, operation, detail, .. } => {
            ('W', std::slice::from_ref(rank), Duration::ZERO, operation, detail)
        }
        // The receiving rank adds the group and the remedy.
        Error::Closed { reason, .. } => ('C', &[][..], Duration::ZERO, &String::new(), reason),
        _ => ('C', &[][..], Duration::ZERO, &String::new(), &full_text),
    };
    let mut report =
        format!("{kind};{me};{};{}\n{operation}\n{text}", ranges(ranks, MAX_RANK_LIST), after.as_millis());
    if report.len() > MAX_ABORT_REPORT {
        let end = (0..=MAX_ABORT_REPORT - "...".len()).rev().find(|&at| report.is_char_boundary(at));
        report.truncate(end.unwrap_or(0));
        report += "...";
    }
    report
}

/// Returns true if a report describes mismatched calls or corrupted data. Such an error concerns a rank that leaves, too.
pub(crate) fn is_error_of_calls_or_data(report: &str) -> bool {
    report.starts_with(['M', 'D'])
}

/// Returns the rank whose loss another rank reports.
pub(crate) fn lost_rank(report: &str) -> Option<usize> {
    let mut fields = report.split(';');
    let (kind, by, rank) = (fields.next()?, fields.next()?, fields.next()?);
    rank.parse().ok().filter(|_| kind == "L" && by != rank)
}

/// Converts a report from rank `from` to an error of the same kind, for `operation`.
pub(crate) fn to_error(group: &GroupNames, operation: String, from: usize, report: &str) -> Error {
    let mut lines = report.splitn(3, '\n');
    let (header, call, text) =
        (lines.next().unwrap_or_default(), lines.next().unwrap_or_default(), lines.next());
    let mut fields = header.split(';');
    let kind = fields.next().unwrap_or_default();
    let origin = fields.next().and_then(|rank| rank.parse().ok()).filter(|&rank| rank < group.size());
    let origin: usize = origin.unwrap_or(from);
    let ranks = parse_ranges(fields.next().unwrap_or_default(), group.size());
    let after = Duration::from_millis(fields.next().and_then(|after| after.parse().ok()).unwrap_or(0));
    let reporter = group.describe(origin);
    let in_group = group.group();
    // A report in an unknown format is quoted unchanged.
    let (kind, call, text) = text.map_or(("", "", report), |text| (kind, call, text));
    let call = if call.is_empty() || call == operation { String::new() } else { format!("{call}: ") };
    let detail = format!("{reporter} reports: {call}{text}");
    match kind {
        "T" => Error::Timeout { operation, group: in_group, after, missing: ranks, detail },
        "M" => Error::Mismatch { operation, group: in_group, rank: origin, detail },
        "D" => Error::Corrupted { operation, group: in_group, ranks, detail },
        "W" => {
            let rank = ranks.first().copied().unwrap_or(origin);
            Error::Deadlock { operation, group: in_group, rank, detail }
        }
        "L" => {
            let rank = ranks.first().copied().unwrap_or(origin);
            Error::PeerLost {
                operation,
                group: in_group,
                rank,
                peer: group.describe(rank),
                reason: if ranks.first() == Some(&origin) {
                    text.to_owned()
                } else {
                    format!("{text}, as {reporter} reports")
                },
                remedy: LOST_REMEDY,
            }
        }
        _ => Error::Closed { group: in_group, reason: format!("{operation}: {detail}") },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::tests::names;

    fn timeout(missing: Vec<usize>, detail: String) -> Error {
        let (operation, group) = ("barrier #7".to_owned(), "g".to_owned());
        Error::Timeout { operation, group, after: Duration::from_millis(1500), missing, detail }
    }

    #[test]
    fn long_rank_lists_end_with_a_complete_rank_and_a_count() {
        assert_eq!(ranges(&[5], 9), "5");
        assert_eq!(ranges(&[5, 6], 9), "5, 6");
        assert_eq!(ranges(&[5, 258, 259, 260, 269], 99), "5, 258-260, 269");
        assert_eq!(ranges(&[5, 258, 259, 260, 269], 10), "5, 258-260, and 1 more");
        assert_eq!(ranges(&[5, 258, 259, 260, 269], 9), "5, and 4 more");
        let odd: Vec<usize> = (0..4096).filter(|rank| rank % 2 == 1).collect();
        for limit in 0..400 {
            let text = ranges(&odd, limit);
            let ranks = parse_ranges(&text, 4096);
            assert_eq!(ranks, odd[..ranks.len()], "{text}");
            assert!(text.ends_with(&format!("and {} more", odd.len() - ranks.len())), "{text}");
        }
    }

    #[test]
    fn long_rank_lists_name_the_host_of_the_first_rank() {
        let group = names(300);
        let names = [3, 5, 9].map(|rank| group.describe(rank));
        assert!(names[0].starts_with("rank 3 (host "), "{names:?}");
        assert_eq!(list(&group, &[3, 9]), format!("{}, {}", names[0], names[2]));
        let many: Vec<usize> = std::iter::once(5).chain(258..270).collect();
        let many = [many, (280..300).collect()].concat();
        assert_eq!(list(&group, &many), format!("{}, 258-269, 280-299", names[1]));
    }

    #[test]
    fn report_preserves_error_and_waited_time() {
        let group = names(300);
        let missing: Vec<usize> = (0..300).filter(|rank| rank % 3 == 1).collect();
        let error = timeout(missing.clone(), format!("missing: {}", list(&group, &missing)));
        let report = own(9, &error);
        assert!(report.len() <= MAX_ABORT_REPORT, "{}", report.len());
        let received = to_error(&group, "all_reduce #8".to_owned(), 4, &report);
        let Error::Timeout { operation, after, missing: reported, detail, .. } = &received else {
            panic!("{received}")
        };
        assert_eq!((operation.as_str(), after.as_millis()), ("all_reduce #8", 1500));
        assert!(
            detail.starts_with(&format!(
                "{} reports: barrier #7: missing: {}",
                group.describe(9),
                group.describe(1)
            )),
            "{detail}"
        );
        assert_eq!(reported[..], missing[..reported.len()]);
        assert!(reported.len() > 60, "{}", reported.len());
    }

    #[test]
    fn long_report_is_cut_at_a_character_boundary() {
        for extra in 0..8 {
            let report = own(0, &timeout(vec![1], "x".repeat(extra) + &"ü€".repeat(2000)));
            assert!(report.len() <= MAX_ABORT_REPORT && report.ends_with("..."), "{}", report.len());
        }
    }

    #[test]
    fn malformed_report_is_quoted() {
        let group = names(4);
        let whole = own(2, &timeout(vec![1, 3], "missing".to_owned()));
        let cut = (0..whole.len()).map(|end| whole[..end].to_owned());
        let odd = [
            "",
            "T",
            "T;9;9-2;x\n\n",
            "L;;18446744073709551615;\na\nb",
            "T;1;0-18446744073709551615;7\na\nb",
        ];
        for text in cut.chain(odd.map(str::to_owned)) {
            let error = to_error(&group, "barrier #1".to_owned(), 3, &text);
            assert!(error.to_string().contains(" reports"), "{text:?}: {error}");
        }
    }
}
