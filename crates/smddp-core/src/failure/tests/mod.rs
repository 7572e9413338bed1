//! Tests of the failure monitor: cases of a time, facts and pending operations, each with its verdict.
//! `tests/*.txt` are written by hand, `tests/recorded/*.txt` were recorded during faults.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

pub(crate) mod case;
mod wait_times;

use std::path::Path;
use std::time::{Duration, Instant};

use self::case::{Case, Step};
use super::case_text::{Event, facts_text, pending_text, verdict_text};
use super::limits::Limits;
use super::monitor::{FailureMonitor, Verdict};
use super::names::GroupNames;
use crate::error::Error;

/// Returns the names of a group `g` of `size` ranks, as rank 0 sees them.
pub(crate) fn names(size: usize) -> GroupNames {
    names_at(0, size)
}

/// Returns the names of a group `g` of `size` ranks, as rank `me` sees them.
pub(crate) fn names_at(me: usize, size: usize) -> GroupNames {
    GroupNames::new(me, "g", (0..size).map(|rank| format!("rank {rank} (host h, pid {})", 100 + rank)))
}

/// Returns the cases of all files of a folder beside this one, with the names of the files.
pub(crate) fn cases(folder: &str) -> Vec<(String, Case)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/failure").join(folder);
    let paths = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut paths: Vec<_> = paths.filter(|path| path.extension().is_some_and(|kind| kind == "txt")).collect();
    paths.sort();
    let parse = |path: &Path| {
        let file = path.file_name().unwrap().to_string_lossy().into_owned();
        Case::parse(&std::fs::read_to_string(path).unwrap()).into_iter().map(move |case| (file.clone(), case))
    };
    paths.iter().flat_map(|path| parse(path)).collect()
}

/// Runs the steps and returns the verdict of the last one, which is observed at `last` if that is given.
pub(crate) fn replay(case: &Case, steps: &[Step], last: Option<Duration>, base: Instant) -> Verdict {
    run(case, steps, last, base).1
}

/// Implements [`replay`] and also returns the monitor.
fn run(case: &Case, steps: &[Step], last: Option<Duration>, base: Instant) -> (FailureMonitor, Verdict) {
    let mut monitor = FailureMonitor::new(names_at(case.me, case.size), Limits::default());
    let mut verdict = Verdict::Wait { until: None };
    for (index, step) in steps.iter().enumerate() {
        let now = base + last.filter(|_| index + 1 == steps.len()).unwrap_or(step.at);
        let (facts, pending) = (&step.facts, step.pending(base));
        verdict = match &step.event {
            Event::Observe => monitor.observe(now, facts, &pending),
            Event::Differ(seq, mine, found) => {
                monitor.fingerprints_differ(now, (*seq, *mine, *found), facts, &pending)
            }
            Event::TransportError(error, explained) => {
                monitor.transport_failed(now, Error::Config(error.clone()), *explained);
                monitor.observe(now, facts, &pending)
            }
        };
    }
    (monitor, verdict)
}

/// Replays all steps, and due steps also one nanosecond earlier.
fn assert_verdicts(cases: &[(String, Case)]) {
    let base = Instant::now();
    let mut wrong = String::new();
    for (file, case) in cases {
        for (index, step) in case.steps.iter().enumerate() {
            let steps = &case.steps[..=index];
            let verdict = verdict_text(&replay(case, steps, None, base), base);
            if verdict != step.verdict {
                wrong += &format!(
                    "{file}: {}, step {index}\n  expected {}\n  found    {verdict}\n",
                    case.name, step.verdict
                );
            }
            let early = || replay(case, steps, Some(step.at - Duration::from_nanos(1)), base);
            if step.is_due && !matches!(early(), Verdict::Wait { .. }) {
                wrong += &format!("{file}: {}, step {index}, 1 ns early: {:?}\n", case.name, early());
            }
        }
    }
    assert!(wrong.is_empty(), "\n{wrong}");
}

/// Several ranks of a node wait for the same rank, and their logs go to one terminal.
#[test]
fn one_rank_of_a_node_warns_of_a_long_wait() {
    let base = Instant::now();
    for (state, quiet) in
        [("0 arrived", true), ("0 late", false), ("0 completed", false), ("0 stopped", false)]
    {
        let text = format!("2000 | 1 late; {state} | all_reduce 4 1800000 -> ?");
        let step = Step::parse(&text, 3);
        let mut monitor = FailureMonitor::new(names_at(2, 3), Limits::default());
        let pending = step.pending(base);
        let mut verdict = Verdict::Wait { until: None };
        for at in [2_000, 62_000, 62_000, 62_000, 62_001, 62_002] {
            verdict = monitor.observe(base + Duration::from_millis(at), &step.facts, &pending);
            if matches!(verdict, Verdict::Warn { .. }) {
                break;
            }
        }
        let Verdict::Warn { quiet: found, .. } = verdict else { panic!("{state}: {verdict:?}") };
        assert_eq!(found, quiet, "rank {state}");
    }
}

/// A wait without a time would end at the next event only, although something is due.
#[test]
fn written_cases_have_their_verdicts() {
    assert_verdicts(&cases("tests"));
}

#[test]
fn recorded_cases_have_their_verdicts() {
    let begun = Instant::now();
    let cases = cases("tests/recorded");
    assert_verdicts(&cases);
    assert!(cases.len() >= 20, "{} recorded cases", cases.len());
    let steps: usize = cases.iter().map(|(_, case)| case.steps.len()).sum();
    eprintln!("{} recorded cases with {steps} observations: {:?}", cases.len(), begun.elapsed());
}

/// A recorded verdict that the passing of time causes is marked as due, so its time is tested.
#[test]
fn recorded_verdicts_that_are_not_due_do_not_depend_on_time() {
    let base = Instant::now();
    for (file, case) in cases("tests/recorded") {
        for (index, step) in case.steps.iter().enumerate().filter(|(_, step)| !step.is_due) {
            let before = index.checked_sub(1).map_or(Duration::ZERO, |index| case.steps[index].at);
            let verdict = replay(&case, &case.steps[..=index], Some(before), base);
            let is_wait = matches!(verdict, Verdict::Wait { .. });
            if !is_wait || !step.verdict.starts_with("wait") {
                assert_eq!(verdict_text(&verdict, base), step.verdict, "{file}: {}, step {index}", case.name);
            }
        }
    }
}

/// A wait without a time would end at the next event only, although something is due.
#[test]
fn every_due_step_is_announced_by_the_step_before() {
    let base = Instant::now();
    for (file, case) in [cases("tests"), cases("tests/recorded")].into_iter().flatten() {
        for (index, step) in case.steps.iter().enumerate().filter(|(_, step)| step.is_due) {
            let before = replay(&case, &case.steps[..index], None, base);
            let Verdict::Wait { until: Some(until) } = before else {
                panic!("{file}: {}: {before:?}", case.name)
            };
            assert!(until <= base + step.at, "{file}: {}, step {index}", case.name);
        }
    }
}

#[test]
fn cases_are_equal_after_they_are_written_and_parsed_again() {
    let base = Instant::now();
    for (file, case) in [cases("tests"), cases("tests/recorded")].into_iter().flatten() {
        for step in &case.steps {
            let facts = facts_text(&step.event, &step.facts);
            let pending = pending_text(&step.pending(base), base);
            let text = format!("== again, {} ranks\n0 | {facts} | {pending} -> wait", case.size);
            let again = &Case::parse(&text)[0].steps[0];
            assert_eq!((&again.event, &again.facts), (&step.event, &step.facts), "{file}: {facts}");
            assert_eq!(again.pending(base), step.pending(base), "{file}: {pending}");
        }
    }
}
