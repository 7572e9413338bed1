//! Dumps of the recorder: JSON, and files.

use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::{Value, json};
use smddp_base::fork::PerProcess;
use smddp_plan::Algorithm;
use smddp_plan::format::variant_name;

use super::clock::Clock;
use super::ring::{Entry, Ring};
use super::waited::Waited;
use super::{Outcome, Recorder, RecorderSnapshot, links, live};
use crate::call::message_label::Direction;
use crate::call::name_of;
use crate::config::Config;
use crate::log::{self, Level};
use crate::sync::lock;

pub(super) fn main_thread_location() -> String {
    smddp_process::main_thread_location()
}

/// Returns the state of this process and its groups. `with_operations`: all recorded operations, else only the
/// present and the last one.
pub(super) fn process(with_operations: bool) -> Value {
    let clock = Clock::now();
    let launch = Config::get().ok().and_then(|config| config.launch.rank.clone());
    let groups: Vec<Value> = live().iter().map(|recorder| group(recorder, &clock, with_operations)).collect();
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "host": smddp_base::host_name(),
        "pid": std::process::id(),
        "rank": launch.and_then(|rank| rank.parse::<u64>().ok()),
        "process": format!("{:016x}", PROCESS.get().0),
        "time_ns": clock.wall(super::ticks()),
        "at": main_thread_location(),
        "groups": groups,
    })
}

/// Random id of this process. Process ids of two containers may be equal.
static PROCESS: PerProcess<ProcessId> = PerProcess::new();

struct ProcessId(u64);

impl Default for ProcessId {
    fn default() -> Self {
        Self(u64::from_ne_bytes(smddp_base::random::bytes()))
    }
}

fn group(recorder: &Recorder, clock: &Clock, with_operations: bool) -> Value {
    let (last, present) = recorder.now();
    let (submitted, pending) = recorder.pending();
    let snapshot_json =
        |snapshot: Option<&RecorderSnapshot>| snapshot.map(|snapshot| operation(snapshot, clock));
    let mut json = json!({
        "name": recorder.name,
        "rank": recorder.rank,
        "size": recorder.size,
        "id": recorder.members.id(),
        "nodes": recorder.nodes,
        "way": recorder.path,
        "error": recorder.failed.get(),
        "finished": recorder.finished.load(std::sync::atomic::Ordering::Relaxed),
        "submitted": submitted,
        "recorded": !recorder.ring.is_off(),
        "present": snapshot_json(present.first()),
        "pending": pending.iter().map(|snapshot| pending_call(recorder, snapshot, clock)).collect::<Vec<_>>(),
        "last": snapshot_json(last.as_ref()),
        "taken": counters(recorder),
        "network": links::network(recorder),
        "links": links::links(recorder),
    });
    if with_operations {
        let entries_json = |ring: &Ring, kind: fn(Entry) -> RecorderSnapshot| -> Value {
            ring.entries().into_iter().map(|entry| operation(&kind(entry), clock)).collect()
        };
        json["operations"] = entries_json(&recorder.ring, RecorderSnapshot::Collective);
        json["messages"] = entries_json(&recorder.messages, RecorderSnapshot::Message);
    }
    json
}

/// Returns a pending call. A message has its direction, its peer (`null` for a recv from any rank) and its tag.
/// `waits`: a thread of this process waits in it; `null` if other code may wait for it. `waited_seconds`: duration of
/// that wait.
fn pending_call(recorder: &Recorder, snapshot: &RecorderSnapshot, clock: &Clock) -> Value {
    let entry = snapshot.entry();
    let (waits, since) = match recorder.waited.of(snapshot.recorded_call()) {
        Waited::Since(since) => (Some(true), Some(since)),
        Waited::No => (Some(false), None),
        Waited::Unknown => (None, None),
    };
    json!({
        "seq": entry.seq,
        "what": snapshot.call_name(),
        "call": snapshot.call(),
        "seconds": clock.since(entry.submitted).as_secs_f64(),
        "waits": waits,
        "waited_seconds": since.map(|since| since.elapsed().as_secs_f64()),
        "message": snapshot.message().map(|label| json!({
            "sends": matches!(label.direction, Direction::To(_)),
            "peer": label.direction.peer(),
            "tag": label.tag,
        })),
    })
}

fn counters(recorder: &Recorder) -> Vec<Value> {
    let values = recorder.counters.nonzero().map(|counters| {
        json!({
            "collective": name_of(counters.collective),
            "algorithm": variant_name(counters.variant),
            "operations": counters.operations,
            "bytes": counters.bytes,
            "crossed": counters.internode_bytes,
        })
    });
    values.collect()
}

fn operation(snapshot: &RecorderSnapshot, clock: &Clock) -> Value {
    let entry = snapshot.entry();
    let time = |ticks: u64| (ticks != 0).then(|| clock.wall(ticks));
    let algorithm = match snapshot {
        RecorderSnapshot::Collective(_) => {
            Algorithm::ALL.get((entry.fingerprint.call >> 40 & 0xf) as usize).map(|a| a.name())
        }
        RecorderSnapshot::Message(_) => None,
    };
    json!({
        "seq": entry.seq,
        "what": snapshot.call_name(),
        "call": snapshot.call(),
        "algorithm": algorithm,
        "bytes": entry.bytes,
        "submitted_ns": time(entry.submitted),
        "started_ns": time(entry.started),
        "ended_ns": time(entry.ended),
        "seconds": match entry.ended {
            0 => clock.since(entry.submitted),
            ended => clock.since(entry.submitted).saturating_sub(clock.since(ended)),
        }.as_secs_f64(),
        "outcome": match entry.outcome {
            Outcome::Running => "running",
            Outcome::Ok => "ok",
            Outcome::Failed => "failed",
        },
    })
}

/// Runs [`write`] on a separate thread, if SMDDP_DUMP_DIR is set: the caller answers status queries, and a disk may
/// be slow. Does nothing while an earlier write is running.
pub(super) fn write_soon() {
    let Some(folder) = Config::get().ok().and_then(|config| config.dump_dir.clone()) else { return };
    let requested = &WRITING.get().requested;
    if requested.swap(true, Ordering::AcqRel) {
        return;
    }
    let thread = std::thread::Builder::new().name("smddp-dump".to_owned());
    let begun = thread.spawn(move || {
        write(&folder);
        WRITING.get().requested.store(false, Ordering::Release);
    });
    if begun.is_err() {
        requested.store(false, Ordering::Release);
    }
}

#[derive(Default)]
struct Writing {
    requested: AtomicBool,
    now: Mutex<()>,
}

static WRITING: PerProcess<Writing> = PerProcess::new();

/// Writes a dump of this process to `folder` after a failure. The file is complete or absent.
pub(crate) fn write(folder: &Path) {
    // One write at a time; the last file is the newest.
    let _one = lock(&WRITING.get().now);
    let name = format!("smddp-{}-{}.json", smddp_base::host_name(), std::process::id());
    let (path, part) = (folder.join(&name), folder.join(format!(".{name}.part")));
    let written = std::fs::create_dir_all(folder)
        .and_then(|()| std::fs::write(&part, process(true).to_string()))
        .and_then(|()| std::fs::rename(&part, &path));
    match written {
        Ok(()) => log::say(Level::Info, &format!("wrote the recorder dump to {}", path.display())),
        Err(error) => {
            // Removes the partial file, which may not exist.
            let _ = std::fs::remove_file(&part);
            log::say(Level::Warn, &format!("SMDDP_DUMP_DIR: {}: {error}", path.display()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_dump_leaves_no_partial_file() {
        let folder = std::env::temp_dir().join(format!("smddp-test-dump-{}", std::process::id()));
        let name = format!("smddp-{}-{}.json", smddp_base::host_name(), std::process::id());
        // A file cannot replace a folder with contents.
        std::fs::create_dir_all(folder.join(&name).join("inside")).unwrap();
        write(&folder);
        let left: Vec<_> =
            std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!(left, [std::ffi::OsString::from(name)]);
    }
}
