//! Recorder dumps of a job as JSON: one file for each rank, or one file for all ranks.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;

use crate::error::{Error, Result};

/// The dump of one process.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Process {
    pub host: String,
    pub pid: u64,
    /// The rank that the launcher assigned.
    pub rank: Option<usize>,
    pub time_ns: u64,
    pub groups: Vec<Group>,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Group {
    pub name: String,
    pub rank: usize,
    pub size: usize,
    pub nodes: usize,
    pub error: Option<String>,
    /// The calls. `smddp status --json` omits them.
    pub operations: Option<Vec<Operation>>,
    /// Sends and receives, which are only counted.
    #[serde(default)]
    pub messages: Vec<serde::de::IgnoredAny>,
}

/// One call of one rank.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Operation {
    pub seq: u64,
    pub call: String,
    pub bytes: usize,
    pub submitted_ns: u64,
    pub ended_ns: Option<u64>,
    pub seconds: f64,
    pub outcome: Outcome,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Outcome {
    Running,
    Ok,
    Failed,
}

impl Process {
    /// Returns true if this is a placeholder for a rank without a dump.
    pub(crate) fn is_placeholder(&self) -> bool {
        self.pid == 0
    }
}

/// The call that leaves a group.
pub(crate) const LEAVING: &str = "destroy_process_group";

impl Operation {
    pub(crate) fn leaves(&self) -> bool {
        self.call == LEAVING
    }
}

/// Largest file of dumps in bytes.
const MAX_DUMP: usize = 1 << 30;

/// Replaces each folder by the dumps in it: the files that `smddp status --dump DIR` and SMDDP_DUMP_DIR write there.
fn expand(names: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for name in names {
        match name.is_dir() {
            true => files.extend(dumps_in(name)?),
            false => files.push(name.clone()),
        }
    }
    Ok(files)
}

/// Returns the dumps in a folder, or in its only `job-*` folder.
fn dumps_in(folder: &Path) -> Result<Vec<PathBuf>> {
    let list = |folder: &Path| -> Result<Vec<PathBuf>> {
        let failed = |error| Error::Usage(format!("reading the folder {}: {error}", folder.display()));
        let entries = std::fs::read_dir(folder).map_err(failed)?.collect::<std::io::Result<Vec<_>>>();
        let mut paths: Vec<PathBuf> = entries.map_err(failed)?.iter().map(std::fs::DirEntry::path).collect();
        paths.sort();
        Ok(paths)
    };
    let named = |path: &Path, prefix: &str| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(prefix))
    };
    let paths = list(folder)?;
    let json: Vec<&PathBuf> =
        paths.iter().filter(|path| path.extension().is_some_and(|end| end == "json")).collect();
    // Results and traces may be in the same folder.
    let dumps: Vec<PathBuf> = json.iter().copied().filter(|path| named(path, "smddp-")).cloned().collect();
    if !dumps.is_empty() {
        return Ok(dumps);
    }
    if !json.is_empty() {
        return Ok(json.into_iter().cloned().collect());
    }
    let jobs: Vec<&PathBuf> = paths.iter().filter(|path| named(path, "job-") && path.is_dir()).collect();
    match jobs[..] {
        [one] => list(one),
        [] => Err(Error::Usage(format!("the folder {} has no dump (*.json)", folder.display()))),
        _ => Err(Error::Usage(format!(
            "the folder {} has dumps of {} jobs: give one of its folders job-*",
            folder.display(),
            jobs.len()
        ))),
    }
}

/// Returns the processes of all files in rank order. Of several dumps of one process the newest is used.
pub(crate) fn read(files: &[PathBuf]) -> Result<Vec<Process>> {
    let mut found: BTreeMap<(String, u64), Process> = BTreeMap::new();
    for file in expand(files)? {
        let name = file.display();
        let text = smddp_core::files::read_text(&file, MAX_DUMP)
            .map_err(|error| Error::Usage(format!("{name} is not a dump: {error}")))?;
        let processes =
            parse(&text).map_err(|reason| Error::Usage(format!("{name} is not a dump: {reason}")))?;
        for process in processes {
            let which = (process.host.clone(), process.pid);
            if found.get(&which).is_none_or(|known| known.time_ns < process.time_ns) {
                found.insert(which, process);
            }
        }
    }
    let mut all: Vec<Process> = found.into_values().collect();
    all.sort_by_key(|process| (process.rank.is_none(), process.rank));
    Ok(all)
}

/// Parses a dump, a list of dumps, the output of `smddp status --json --dump`, or a concatenation of these.
pub(crate) fn parse(text: &str) -> std::result::Result<Vec<Process>, String> {
    let mut found = Vec::new();
    for value in serde_json::Deserializer::from_str(text).into_iter::<Value>() {
        let mut value = value.map_err(|error| error.to_string())?;
        let inner = value.get_mut("processes").map(Value::take).unwrap_or(value);
        match inner {
            Value::Array(list) => found.extend(list),
            one => found.push(one),
        }
    }
    if found.is_empty() {
        return Err("the file is empty".to_owned());
    }
    let one = |value| {
        let mut process: Process = serde_json::from_value(value).map_err(|error| error.to_string())?;
        match process.groups.iter().find(|group| group.operations.is_none()) {
            Some(group) => Err(format!(
                "it contains no operations of group `{}`; write it with smddp status --dump DIR, smddp.dump(FILE) or \
                 SMDDP_DUMP_DIR",
                group.name
            )),
            None => {
                for group in &mut process.groups {
                    group.operations.iter_mut().for_each(|all| all.sort_by_key(|op| op.seq));
                }
                Ok(process)
            }
        }
    };
    found.into_iter().map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: &str = r#"{"version": "0.1.0", "host": "h", "pid": 7, "rank": 1, "time_ns": 9, "at": "x.py:1", "groups": [
        {"name": "0", "rank": 1, "size": 2, "nodes": 1, "way": "shm", "error": null, "finished": 1, "operations": [
            {"seq": 0, "what": "barrier #0", "call": "barrier(0 elements of uint8)", "algorithm": "publish", "bytes": 0,
             "submitted_ns": 5, "started_ns": 5, "ended_ns": 6, "seconds": 1e-9, "outcome": "ok"}]}]}"#;

    #[test]
    fn dumps_lists_and_status_output_are_parsed() {
        let forms = [
            ONE.to_owned(),
            format!("[{ONE}]"),
            format!(r#"{{"processes": [{ONE}], "silent": {{}}, "stragglers": []}}"#),
        ];
        for form in forms {
            let found = parse(&form).unwrap();
            assert_eq!((found.len(), found[0].rank), (1, Some(1)), "{form}");
            assert_eq!(found[0].groups[0].operations.as_ref().unwrap()[0].outcome, Outcome::Ok);
        }
        assert_eq!(parse(&format!("{ONE}\n{ONE}")).unwrap().len(), 2);
    }

    #[test]
    fn other_files_are_rejected_with_the_reason() {
        for (text, expected) in [
            ("", "is empty"),
            ("{}", "host"),
            ("no", "expected"),
            (&ONE.replace("operations", "other"), "smddp status --dump"),
        ] {
            let reason = parse(text).unwrap_err();
            assert!(reason.contains(expected), "{text}: {reason}");
        }
    }
}
