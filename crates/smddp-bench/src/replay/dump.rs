//! What the recorders of a job's ranks left, as JSON: one file of each rank, or one of all.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::Deserialize;
use serde_json::Value;

use crate::error::{Error, Result};

/// One rank's, of all its groups.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Process {
    pub host: String,
    pub pid: u64,
    /// As its launcher numbered it.
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
    /// What `smddp status --json` leaves out.
    pub operations: Option<Vec<Operation>>,
    /// Sends and recvs, which are counted here and no more.
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
    /// It stands in for a rank that left no dump.
    pub(crate) fn is_made_up(&self) -> bool {
        self.pid == 0
    }
}

/// The call by which a rank leaves its group.
pub(crate) const LEAVING: &str = "destroy_process_group";

impl Operation {
    pub(crate) fn leaves(&self) -> bool {
        self.call == LEAVING
    }
}

/// Largest file of dumps.
const MAX_DUMP: usize = 1 << 30;

/// The processes of all files, in the order of their ranks. Of two dumps of one process the later one counts.
pub(crate) fn read(files: &[PathBuf]) -> Result<Vec<Process>> {
    let mut found: BTreeMap<(String, u64), Process> = BTreeMap::new();
    for file in files {
        let name = file.display();
        let text =
            smddp_core::files::read_text(file, MAX_DUMP).map_err(Error::io(format!("reading {name}")))?;
        let processes =
            parse(&text).map_err(|reason| Error::Usage(format!("{name} is no dump: {reason}")))?;
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

/// A dump, a list of them, what `smddp status --json --dump` prints, or several of these one after the other.
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
        return Err("there is nothing in it".to_owned());
    }
    let one = |value| {
        let mut process: Process = serde_json::from_value(value).map_err(|error| error.to_string())?;
        match process.groups.iter().find(|group| group.operations.is_none()) {
            Some(group) => Err(format!(
                "it has no operations of group `{}`; write it with smddp status --dump DIR, smddp.dump(FILE) or \
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
    fn a_dump_a_list_of_them_and_what_status_prints_are_read_alike() {
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
    fn what_is_no_dump_is_said_to_be_none_and_why() {
        for (text, says) in [
            ("", "nothing in it"),
            ("{}", "host"),
            ("no", "expected"),
            (&ONE.replace("operations", "other"), "smddp status --dump"),
        ] {
            let reason = parse(text).unwrap_err();
            assert!(reason.contains(says), "{text}: {reason}");
        }
    }
}
