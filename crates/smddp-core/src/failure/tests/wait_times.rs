//! Times that the monitor requests: a time in the past would make the progress loop poll without a pause.

use std::time::{Duration, Instant};

use smddp_group::{Facts, RankFacts};

use super::{cases, run};
use crate::failure::monitor::Verdict;
use crate::failure::pending::Pending;

#[test]
fn no_wait_ends_in_the_past() {
    let base = Instant::now();
    for (file, case) in cases("tests") {
        for index in 0..case.steps.len() {
            let (_, verdict) = run(&case, &case.steps[..=index], None, base);
            let Verdict::Wait { until: Some(until) } = verdict else { continue };
            assert!(until > base + case.steps[index].at, "{file}: {}, step {index}", case.name);
        }
    }
}

/// The operation of a query may complete or fail between two observations.
#[test]
fn query_ends_with_its_operation() {
    let base = Instant::now();
    let mut queries = 0;
    for (file, case) in cases("tests") {
        for index in 0..case.steps.len() {
            let (mut monitor, _) = run(&case, &case.steps[..=index], None, base);
            if !monitor.is_querying() {
                continue;
            }
            queries += 1;
            let ranks = vec![RankFacts::default(); case.size];
            let facts = Facts { ranks, is_querying: true, ..Facts::default() };
            let name = format!("{file}: {}, step {index}", case.name);
            let now = base + case.steps[index].at + Duration::from_millis(1);
            let verdict = monitor.observe(now, &facts, &Pending::default());
            // The report of another rank may still be due.
            let Verdict::Wait { until } = verdict else { panic!("{name}: {verdict:?}") };
            assert!(until.is_none_or(|until| until > now), "{name}");
            let later = now + Duration::from_secs(20);
            let verdict = monitor.observe(later, &facts, &Pending::default());
            assert_eq!(verdict, Verdict::Wait { until: None }, "{name}");
            assert!(!monitor.is_querying(), "{name}");
        }
    }
    assert!(queries > 20, "{queries}");
}
