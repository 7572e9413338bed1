//! Tests of the failure monitor: cases of a time, facts and pending operations, each with its verdict.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod case;
mod wait_times;

use std::time::{Duration, Instant};

use self::case::{Case, Event, Step};
use super::limits::Limits;
use super::monitor::{FailureMonitor, Verdict};
use super::names::GroupNames;

/// Returns the names of a group `g` of `size` ranks, as rank 0 sees them.
pub(crate) fn names(size: usize) -> GroupNames {
    GroupNames::new(0, "g", (0..size).map(|rank| format!("rank {rank} (host h, pid {})", 100 + rank)))
}

const CASES: [&str; 5] = ["deaths", "departures", "mismatches", "timeouts", "leaving"];

/// Runs the steps and returns the verdict of the last one. `early`: the last step is observed that much earlier.
fn replay(case: &Case, steps: &[Step], early: Duration, base: Instant) -> Verdict {
    run(case, steps, early, base).1
}

/// Implements [`replay`] and also returns the monitor.
fn run(case: &Case, steps: &[Step], early: Duration, base: Instant) -> (FailureMonitor, Verdict) {
    let mut monitor = FailureMonitor::new(names(case.size), Limits::default());
    let mut verdict = Verdict::Wait { until: None };
    for (index, step) in steps.iter().enumerate() {
        let early = if index + 1 == steps.len() { early } else { Duration::ZERO };
        let now = base + step.at - early;
        let (facts, pending) = (&step.facts, step.pending(base));
        verdict = match &step.event {
            Event::Observe => monitor.observe(now, facts, &pending),
            Event::Differ(seq, mine, found) => {
                monitor.fingerprints_differ(now, (*seq, *mine, *found), facts, &pending)
            }
            Event::TransportError(error, explained) => {
                monitor.transport_failed(now, error.clone(), *explained);
                monitor.observe(now, facts, &pending)
            }
        };
    }
    (monitor, verdict)
}

#[test]
fn recorded_cases_have_their_verdicts() {
    let base = Instant::now();
    let mut wrong = String::new();
    for file in CASES {
        for case in Case::parse(file) {
            for (index, step) in case.steps.iter().enumerate() {
                let verdict = case::text(&replay(&case, &case.steps[..=index], Duration::ZERO, base), base);
                if verdict != step.verdict {
                    wrong += &format!(
                        "{file}: {}, step {index}\n  expected {}\n  found    {verdict}\n",
                        case.name, step.verdict
                    );
                }
                let early = replay(&case, &case.steps[..=index], Duration::from_nanos(1), base);
                if step.is_due && !matches!(early, Verdict::Wait { .. }) {
                    wrong += &format!("{file}: {}, step {index}, 1 ns early: {early:?}\n", case.name);
                }
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
        let case = Case { name: state.to_owned(), size: 3, steps: Vec::new() };
        let step = Step::parse(&text, &case);
        let names = GroupNames::new(2, "g", (0..3).map(|rank| format!("rank {rank} (host h, pid {rank})")));
        let mut monitor = FailureMonitor::new(names, Limits::default());
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
fn every_due_step_is_announced_by_the_step_before() {
    let base = Instant::now();
    for file in CASES {
        for case in Case::parse(file) {
            for (index, step) in case.steps.iter().enumerate().filter(|(_, step)| step.is_due) {
                let before = replay(&case, &case.steps[..index], Duration::ZERO, base);
                let Verdict::Wait { until: Some(until) } = before else {
                    panic!("{file}: {}: {before:?}", case.name)
                };
                assert!(until <= base + step.at, "{file}: {}, step {index}", case.name);
            }
        }
    }
}
