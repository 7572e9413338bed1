//! Parsing and comparison of group errors, in the recording and in the replay.

use std::collections::BTreeSet;

use serde::Serialize;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Kind {
    Mismatch,
    Timeout,
    Lost,
    Other,
}

/// The first error of a group.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct GroupError {
    pub kind: Kind,
    /// Number of the call, in the numbering of the recording.
    pub number: Option<u64>,
    /// The mismatched calls, or the missing or dead ranks.
    pub about: BTreeSet<String>,
    pub text: String,
}

impl GroupError {
    /// Parses the errors of a group's ranks. `offset` is the difference of the recording's call numbers to theirs. Prefers the
    /// error of a rank that detected the failure itself.
    pub(crate) fn of<'a>(errors: impl Iterator<Item = &'a str>, offset: i64) -> Option<GroupError> {
        let all: Vec<&str> = errors.collect();
        let own = |text: &&&str| !text.contains(" reports: ") && kind(text) != Kind::Other;
        let text = all.iter().find(own).or(all.first())?;
        let kind = kind(text);
        let about = match kind {
            Kind::Mismatch => calls(text),
            Kind::Timeout => missing(text),
            Kind::Lost => lost(text).into_iter().collect(),
            Kind::Other => BTreeSet::new(),
        };
        let number = text.split_once('#').and_then(|(_, rest)| {
            rest.split(|c: char| !c.is_ascii_digit()).next().and_then(|digits| digits.parse::<u64>().ok())
        });
        let number = number.map(|number| number.saturating_add_signed(offset));
        Some(GroupError { kind, number, about, text: (*text).to_owned() })
    }

    /// Returns "hanging in CALL #N" for a hang of a live job, whose dumps contain no error.
    pub(crate) fn hang(&self) -> Option<&str> {
        let text = self.text.split(" for ").next()?;
        text.starts_with("hanging in ").then_some(text)
    }

    /// Returns true if the replay's error `self` matches the `recorded` error. No rank dies in a replay: a rank that died in the
    /// recording is missing in the replay.
    pub(crate) fn matches(&self, recorded: &GroupError) -> bool {
        let kinds = (self.kind, recorded.kind);
        (self.kind == recorded.kind || kinds == (Kind::Timeout, Kind::Lost))
            && (self.number, &self.about) == (recorded.number, &recorded.about)
    }
}

fn kind(text: &str) -> Kind {
    let patterns =
        [(" does not match: ", Kind::Mismatch), (" Timed out ", Kind::Timeout), ("` failed: ", Kind::Lost)];
    patterns.into_iter().find(|(words, _)| text.contains(words)).map_or(Kind::Other, |(_, kind)| kind)
}

/// Returns the call after each "calls", without hashes of unrecorded values.
fn calls(text: &str) -> BTreeSet<String> {
    let call = |rest: &str| {
        let call = &rest[..rest.find(')').map_or(rest.len(), |at| at + 1)];
        match call.split_once(" #") {
            Some((before, hash)) => {
                before.to_owned() + hash.trim_start_matches(|c: char| c.is_ascii_hexdigit())
            }
            None => call.to_owned(),
        }
    };
    text.split(" calls ").skip(1).map(call).collect()
}

/// Maximum number of ranks in a range.
const MAX_RANKS: usize = 1 << 16;

/// Returns the missing ranks, "rank 2" and "rank 5", without hosts and processes.
fn missing(text: &str) -> BTreeSet<String> {
    let Some((_, list)) = text.split_once("missing: ") else { return BTreeSet::new() };
    let list = list.split(';').next().unwrap_or(list);
    let (mut plain, mut depth) = (String::new(), 0);
    for letter in list.chars() {
        match letter {
            '(' => depth += 1,
            ')' => depth -= 1,
            _ if depth == 0 => plain.push(letter),
            _ => {}
        }
    }
    // In a list of many ranks only the first has the prefix: "rank 5, 7-9".
    let each = plain.split(',').filter_map(|part| {
        let part = part.trim().trim_start_matches("rank ");
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.parse::<usize>().ok()?..=last.parse().ok()?)
    });
    each.flat_map(|ranks| ranks.take(MAX_RANKS)).map(|rank| format!("rank {rank}")).collect()
}

/// Returns the rank that died, "rank 1".
fn lost(text: &str) -> Option<String> {
    let (_, rest) = text.split_once("` failed: ")?;
    Some(rest.split(" (").next().unwrap_or(rest).trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MISMATCH: &str = "all_reduce #161 on group `0` does not match: rank 0 calls all_reduce(10 elements of float32, sum), \
        rank 1 (host vm, pid 11325) calls all_reduce(11 elements of float32, sum); all ranks of a group must make the same";
    const TIMEOUT: &str = "all_reduce #161 on group `0` Timed out waiting 3000ms: 2 of 4 ranks arrived, missing: rank 2 (host \
        vm, pid 11356), rank 3 (host vm, pid 11357); rank 2 is in no call of this group (last finished barrier #160)";

    fn of(errors: &[&str], offset: i64) -> GroupError {
        GroupError::of(errors.iter().copied(), offset).unwrap()
    }

    #[test]
    fn equal_errors_match_for_different_processes_and_times() {
        let again = TIMEOUT.replace("pid 11356", "pid 4").replace("3000ms", "500ms").replace("#161", "#1");
        let recorded = of(&[TIMEOUT], 0);
        assert!(of(&[&again], 160).matches(&recorded));
        assert_eq!(recorded.about.iter().collect::<Vec<_>>(), ["rank 2", "rank 3"]);
        assert!(!of(&[&TIMEOUT.replace("rank 3", "rank 1")], 0).matches(&recorded));
        let differ = of(&[MISMATCH], 0);
        // The other rank's error of the same mismatch.
        let seen = "all_reduce #161 on group `0` does not match: rank 1 calls all_reduce(11 elements of float32, sum), rank 0 \
            (host vm, pid 9) calls all_reduce(10 elements of float32, sum); all ranks";
        assert!(of(&[seen], 0).matches(&differ));
        assert!(!of(&[&MISMATCH.replace("11 elements", "12 elements")], 0).matches(&differ));
        assert!(!recorded.matches(&differ));
    }

    #[test]
    fn ranges_of_ranks_are_expanded() {
        let many = "barrier #3 on group `0` Timed out waiting 9ms: 1 of 9 ranks arrived, missing: rank 1 (host a, pid 3), 2, 6-8, \
            and 37 more; ";
        let about: Vec<String> = of(&[many], 0).about.into_iter().collect();
        assert_eq!(about, ["rank 1", "rank 2", "rank 6", "rank 7", "rank 8"]);
    }

    #[test]
    fn recorded_dead_rank_matches_a_missing_rank() {
        let lost = "all_reduce #405 on group `0` failed: rank 1 (host vm, pid 18753) died; its own log has the first cause";
        let missed = "all_reduce #64 on group `0` Timed out waiting 1000ms: 2 of 3 ranks arrived, missing: rank 1 (host vm, pid \
            3); rank 1 is in no call of this group";
        assert!(of(&[missed], 341).matches(&of(&[lost], 0)));
        assert!(!of(&[lost], 0).matches(&of(&[missed], 341)));
    }

    #[test]
    fn detecting_ranks_error_is_preferred_over_a_report() {
        let reported = "barrier #162 on group `0` does not match: rank 1 (host vm, pid 1) reports: all_reduce #161: rank 0 calls a()";
        assert!(of(&[reported, MISMATCH], 0).matches(&of(&[MISMATCH], 0)));
    }

    #[test]
    fn hashes_of_unrecorded_values_are_ignored() {
        let named = |name: &str| {
            format!(
                "all_gather #1 on group `0` does not match: rank 0 calls all_gather(6 elements of int8, blocks of sizes #{name}), x"
            )
        };
        assert!(of(&[&named("f8e93d94")], 0).matches(&of(&[&named("00000001")], 0)));
    }
}
