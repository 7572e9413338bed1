//! How a group ended, by the words of its errors: what is held against what the replay ended with.

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

/// A group's first cause.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Ending {
    pub kind: Kind,
    /// Of the call, as the recording counts.
    pub number: Option<u64>,
    /// The calls that differ, or the ranks that are missed or died.
    pub about: BTreeSet<String>,
    pub text: String,
}

impl Ending {
    /// Of what a group's ranks say; `ahead`: what the recording's numbers are ahead of theirs. The rank that found out says most.
    pub(crate) fn of<'a>(errors: impl Iterator<Item = &'a str>, ahead: i64) -> Option<Ending> {
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
        let number = number.map(|number| number.saturating_add_signed(ahead));
        Some(Ending { kind, number, about, text: (*text).to_owned() })
    }

    /// Whether a replay that ended like `self` did what the `recorded` job did. Nobody dies in a replay: who died then does
    /// not come any more.
    pub(crate) fn is_like(&self, recorded: &Ending) -> bool {
        let kinds = (self.kind, recorded.kind);
        (self.kind == recorded.kind || kinds == (Kind::Timeout, Kind::Lost))
            && (self.number, &self.about) == (recorded.number, &recorded.about)
    }
}

fn kind(text: &str) -> Kind {
    let told =
        [(" does not match: ", Kind::Mismatch), (" Timed out ", Kind::Timeout), ("` failed: ", Kind::Lost)];
    told.into_iter().find(|(words, _)| text.contains(words)).map_or(Kind::Other, |(_, kind)| kind)
}

/// What follows each "calls", without names of what is not recorded.
fn calls(text: &str) -> BTreeSet<String> {
    let call = |rest: &str| {
        let call = &rest[..rest.find(')').map_or(rest.len(), |at| at + 1)];
        match call.split_once(" #") {
            Some((before, name)) => {
                before.to_owned() + name.trim_start_matches(|c: char| c.is_ascii_hexdigit())
            }
            None => call.to_owned(),
        }
    };
    text.split(" calls ").skip(1).map(call).collect()
}

/// More ranks than this no range has.
const MOST: usize = 1 << 16;

/// "rank 2", "rank 5": who is missing, without hosts and processes.
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
    // Of many ranks all but the first are numbers: "rank 5, 7-9".
    let each = plain.split(',').filter_map(|part| {
        let part = part.trim().trim_start_matches("rank ");
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.parse::<usize>().ok()?..=last.parse().ok()?)
    });
    each.flat_map(|ranks| ranks.take(MOST)).map(|rank| format!("rank {rank}")).collect()
}

/// "rank 1": who died.
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

    fn of(errors: &[&str], ahead: i64) -> Ending {
        Ending::of(errors.iter().copied(), ahead).unwrap()
    }

    #[test]
    fn the_same_end_is_one_whatever_processes_and_times_are() {
        let again = TIMEOUT.replace("pid 11356", "pid 4").replace("3000ms", "500ms").replace("#161", "#1");
        let recorded = of(&[TIMEOUT], 0);
        assert!(of(&[&again], 160).is_like(&recorded));
        assert_eq!(recorded.about.iter().collect::<Vec<_>>(), ["rank 2", "rank 3"]);
        assert!(!of(&[&TIMEOUT.replace("rank 3", "rank 1")], 0).is_like(&recorded));
        let differ = of(&[MISMATCH], 0);
        // The other rank's view of the same.
        let seen = "all_reduce #161 on group `0` does not match: rank 1 calls all_reduce(11 elements of float32, sum), rank 0 \
            (host vm, pid 9) calls all_reduce(10 elements of float32, sum); all ranks";
        assert!(of(&[seen], 0).is_like(&differ));
        assert!(!of(&[&MISMATCH.replace("11 elements", "12 elements")], 0).is_like(&differ));
        assert!(!recorded.is_like(&differ));
    }

    #[test]
    fn ranges_of_ranks_are_all_of_them() {
        let many = "barrier #3 on group `0` Timed out waiting 9ms: 1 of 9 ranks arrived, missing: rank 1 (host a, pid 3), 2, 6-8, \
            and 37 more; ";
        let about: Vec<String> = of(&[many], 0).about.into_iter().collect();
        assert_eq!(about, ["rank 1", "rank 2", "rank 6", "rank 7", "rank 8"]);
    }

    #[test]
    fn who_died_then_is_missed_now() {
        let lost = "all_reduce #405 on group `0` failed: rank 1 (host vm, pid 18753) died; its own log has the first cause";
        let missed = "all_reduce #64 on group `0` Timed out waiting 1000ms: 2 of 3 ranks arrived, missing: rank 1 (host vm, pid \
            3); rank 1 is in no call of this group";
        assert!(of(&[missed], 341).is_like(&of(&[lost], 0)));
        assert!(!of(&[lost], 0).is_like(&of(&[missed], 341)));
    }

    #[test]
    fn who_found_out_is_believed_before_who_heard_of_it() {
        let heard = "barrier #162 on group `0` does not match: rank 1 (host vm, pid 1) reports: all_reduce #161: rank 0 calls a()";
        assert!(of(&[heard, MISMATCH], 0).is_like(&of(&[MISMATCH], 0)));
    }

    #[test]
    fn names_of_what_is_not_recorded_make_no_difference() {
        let named = |name: &str| {
            format!(
                "all_gather #1 on group `0` does not match: rank 0 calls all_gather(6 elements of int8, blocks of sizes #{name}), x"
            )
        };
        assert!(of(&[&named("f8e93d94")], 0).is_like(&of(&[&named("00000001")], 0)));
    }
}
