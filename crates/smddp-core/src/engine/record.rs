//! Recorder of the failure monitor's observations, for the cargo feature `record`. Each group writes the observations
//! in which something changed as a file of cases, which `tests/faults/recorded_cases.py` normalizes.

use std::fmt::Write as _;
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::ops::Deref;
use std::path::Path;
use std::time::Instant;

use smddp_base::{CallFingerprint, Mismatch};
use smddp_group::Facts;

use crate::error::Error;
use crate::failure::case_text::{Event, facts_text, ms, pending_text, verdict_text};
use crate::failure::limits::Limits;
use crate::failure::monitor::{FailureMonitor, Verdict};
use crate::failure::names::GroupNames;
use crate::failure::pending::Pending;

/// Variable with the folder of the records. Without it nothing is recorded.
const FOLDER: &str = "SMDDP_TEST_FAILURE_RECORDS";

/// Failure monitor that records its observations.
pub(super) struct RecordingMonitor {
    monitor: FailureMonitor,
    /// Origin of the recorded times.
    base: Instant,
    file: Option<File>,
    /// Transport error since the last observation.
    error: Option<(String, bool)>,
    last: Option<Recorded>,
}

/// Last observation.
struct Recorded {
    inputs: String,
    state: String,
    is_wait: bool,
    at: Instant,
    /// Line that is written only if an observation with a fault or an action follows.
    held: Option<String>,
}

impl Deref for RecordingMonitor {
    type Target = FailureMonitor;

    fn deref(&self) -> &FailureMonitor {
        &self.monitor
    }
}

impl RecordingMonitor {
    #[cfg_attr(not(feature = "record"), expect(dead_code, reason = "the test names its folder"))]
    pub(super) fn new(names: GroupNames, limits: Limits) -> Self {
        let folder = std::env::var_os(FOLDER);
        Self::in_folder(folder.as_ref().map(Path::new), Instant::now(), names, limits)
    }

    fn in_folder(folder: Option<&Path>, base: Instant, names: GroupNames, limits: Limits) -> Self {
        let mut file = folder.and_then(create);
        let mut title = format!("== {}, {} ranks, rank {}\n", names.group, names.size(), names.me);
        for rank in 0..names.size() {
            let _ = writeln!(title, "# {}", names.describe(rank));
        }
        write(&mut file, &title);
        Self { monitor: FailureMonitor::new(names, limits), base, file, error: None, last: None }
    }

    pub(super) fn transport_failed(&mut self, now: Instant, error: Error, explained: bool) {
        self.error = Some((error.to_string(), explained));
        self.monitor.transport_failed(now, error, explained);
    }

    pub(super) fn observe(&mut self, now: Instant, facts: &Facts, pending: &Pending) -> Verdict {
        let event = match self.error.take() {
            Some((error, explained)) => Event::TransportError(error, explained),
            None => Event::Observe,
        };
        // The error has changed the state already.
        let at_rest = event == Event::Observe && self.at_rest(pending);
        let verdict = self.monitor.observe(now, facts, pending);
        self.record(now, at_rest, (&event, facts, pending), &verdict);
        verdict
    }

    pub(super) fn fingerprints_differ(
        &mut self,
        now: Instant,
        call: (u64, CallFingerprint, Mismatch),
        facts: &Facts,
        pending: &Pending,
    ) -> Verdict {
        let at_rest = self.at_rest(pending);
        let verdict = self.monitor.fingerprints_differ(now, call, facts, pending);
        self.record(now, at_rest, (&Event::Differ(call.0, call.1, call.2), facts, pending), &verdict);
        verdict
    }

    fn at_rest(&self, pending: &Pending) -> bool {
        self.monitor.is_at_rest(pending.call.map(|call| call.seq))
    }

    /// Writes an observation, unless it repeats the last one. `at_rest`: no earlier observation affects it.
    fn record(
        &mut self,
        now: Instant,
        at_rest: bool,
        (event, facts, pending): (&Event, &Facts, &Pending),
        verdict: &Verdict,
    ) {
        if self.file.is_none() {
            return;
        }
        let is_wait = matches!(verdict, Verdict::Wait { .. });
        let inputs = format!("{} | {}", facts_text(event, facts), pending_text(pending, self.base));
        let state = self.monitor.state_text();
        let last = self.last.take();
        let mut held = None;
        let mut since_last = now;
        if let Some(mut last) = last {
            if is_wait && last.is_wait && last.inputs == inputs && last.state == state {
                last.at = now;
                self.last = Some(last);
                return;
            }
            (held, since_last) = (last.held.take(), last.at);
        }
        let (at, since_last) = (now.duration_since(self.base), since_last.duration_since(self.base));
        let rest = if at_rest { "# rest\n" } else { "" };
        let verdict = verdict_text(verdict, self.base);
        let line = format!("# after {}\n{rest}{} | {inputs} -> {verdict}\n", ms(since_last), ms(at));
        let is_action = !is_wait || facts.has_faults() || !self.at_rest(pending) || !at_rest;
        let mut unwritten = Some(line);
        if is_action {
            write(&mut self.file, &(held.unwrap_or_default() + &unwritten.take().unwrap_or_default()));
        }
        self.last = Some(Recorded { inputs, state, is_wait, at: now, held: unwritten });
    }
}

/// Creates the file of a group in `folder`.
fn create(folder: &Path) -> Option<File> {
    let pid = std::process::id();
    let mut paths = (0..1000).map(|number| folder.join(format!("{pid}-{number}.txt")));
    paths.find_map(|path| OpenOptions::new().create_new(true).append(true).open(path).ok())
}

/// Writes a text at once: the process may end at any time.
fn write(file: &mut Option<File>, text: &str) {
    if let Some(open) = file
        && open.write_all(text.as_bytes()).is_err()
    {
        *file = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::tests::case::Case;
    use crate::failure::tests::{cases, names_at, replay};

    /// Replays a case through the recorder. Returns the recorded text.
    fn recorded(folder: &Path, case: &Case, base: Instant) -> String {
        let mut monitor =
            RecordingMonitor::in_folder(Some(folder), base, names_at(case.me, case.size), Limits::default());
        for step in &case.steps {
            let (now, facts, pending) = (base + step.at, &step.facts, step.pending(base));
            match &step.event {
                Event::Observe => _ = monitor.observe(now, facts, &pending),
                Event::Differ(seq, mine, found) => {
                    _ = monitor.fingerprints_differ(now, (*seq, *mine, *found), facts, &pending);
                }
                Event::TransportError(error, explained) => {
                    monitor.transport_failed(now, Error::Config(error.clone()), *explained);
                    _ = monitor.observe(now, facts, &pending);
                }
            }
        }
        let paths: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        let text = std::fs::read_to_string(&paths[0]).unwrap();
        std::fs::remove_file(&paths[0]).unwrap();
        text
    }

    #[test]
    fn records_have_the_same_verdicts_without_repeated_observations() {
        let folder = std::env::temp_dir().join(format!("smddp-failure-records-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let base = Instant::now();
        let mut count = 0;
        for (file, mut case) in cases("tests") {
            // Each observation twice, and the repetition at the same time.
            let pairs = case.steps.iter().flat_map(|step| [step.clone(), step.clone()]);
            case.steps = pairs.collect();
            let text = recorded(&folder, &case, base);
            let found = Case::parse(&text).remove(0);
            for (index, step) in found.steps.iter().enumerate() {
                let verdict = replay(&found, &found.steps[..=index], None, base);
                assert_eq!(verdict_text(&verdict, base), step.verdict, "{file}: {}, step {index}", case.name);
                let repeats = index > 0 && step.verdict == found.steps[index - 1].verdict;
                assert!(!repeats || step.verdict != "wait", "{file}: {}\n{text}", case.name);
            }
            count += found.steps.len();
        }
        std::fs::remove_dir(&folder).unwrap();
        assert!(count > 100, "{count}");
    }
}
