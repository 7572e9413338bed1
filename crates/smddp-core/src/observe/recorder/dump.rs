//! What the recorder has, as JSON and as a file.

use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::{Value, json};
use smddp_plan::Algorithm;
use smddp_plan::format::variant_name;
use smddp_transport::fork::PerProcess;

use super::clock::Clock;
use super::ring::{Entry, Ring};
use super::{Outcome, Recorder, Seen, live};
use crate::call::name_of;
use crate::config::Config;
use crate::log::{self, Level};
use crate::sync::lock;

pub(super) fn main_thread_location() -> String {
    smddp_transport::process::main_thread_location()
}

/// This process with its groups; `all`: with every operation that is kept, else with the present and the last one.
pub(super) fn process(all: bool) -> Value {
    let clock = Clock::now();
    let launch = Config::get().ok().and_then(|config| config.launch.rank.clone());
    let groups: Vec<Value> = live().iter().map(|recorder| group(recorder, &clock, all)).collect();
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "host": smddp_transport::host_name(),
        "pid": std::process::id(),
        "rank": launch.and_then(|rank| rank.parse::<u64>().ok()),
        "time_ns": clock.wall(super::ticks()),
        "at": main_thread_location(),
        "groups": groups,
    })
}

fn group(recorder: &Recorder, clock: &Clock, all: bool) -> Value {
    let (last, present) = recorder.now();
    let one = |seen: Option<&Seen>| seen.map(|seen| operation(seen, clock));
    let mut told = json!({
        "name": recorder.name,
        "rank": recorder.rank,
        "size": recorder.size,
        "nodes": recorder.nodes,
        "way": recorder.way,
        "error": recorder.failed.get(),
        "finished": recorder.finished.load(std::sync::atomic::Ordering::Relaxed),
        "present": one(present.first()),
        "last": one(last.as_ref()),
        "taken": taken(recorder),
    });
    if all {
        let all = |ring: &Ring, kind: fn(Entry) -> Seen| -> Value {
            ring.entries().into_iter().map(|entry| operation(&kind(entry), clock)).collect()
        };
        told["operations"] = all(&recorder.ring, Seen::Collective);
        told["messages"] = all(&recorder.messages, Seen::Message);
    }
    told
}

fn taken(recorder: &Recorder) -> Vec<Value> {
    let taken = recorder.tally.taken().map(|taken| {
        json!({
            "collective": name_of(taken.collective),
            "algorithm": variant_name(taken.way),
            "operations": taken.operations,
            "bytes": taken.bytes,
            "crossed": taken.crossed,
        })
    });
    taken.collect()
}

fn operation(seen: &Seen, clock: &Clock) -> Value {
    let entry = seen.entry();
    let time = |ticks: u64| (ticks != 0).then(|| clock.wall(ticks));
    let algorithm = match seen {
        Seen::Collective(_) => {
            Algorithm::ALL.get((entry.fingerprint.call >> 40 & 0xf) as usize).map(|a| a.name())
        }
        Seen::Message(_) => None,
    };
    json!({
        "seq": entry.seq,
        "what": seen.numbered(),
        "call": seen.call(),
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

/// Has a thread of its own do what [`write`] does, where SMDDP_DUMP_DIR says so: the caller answers for this process, and a
/// disk may be slow. While one is at it, there is nothing to add.
pub(super) fn write_soon() {
    let Some(folder) = Config::get().ok().and_then(|config| config.dump_dir.clone()) else { return };
    let asked = &WRITING.get().asked;
    if asked.swap(true, Ordering::AcqRel) {
        return;
    }
    let thread = std::thread::Builder::new().name("smddp-dump".to_owned());
    let begun = thread.spawn(move || {
        write(&folder);
        WRITING.get().asked.store(false, Ordering::Release);
    });
    if begun.is_err() {
        asked.store(false, Ordering::Release);
    }
}

#[derive(Default)]
struct Writing {
    asked: AtomicBool,
    now: Mutex<()>,
}

static WRITING: PerProcess<Writing> = PerProcess::new();

/// Leaves all that is kept in a file of that folder, whole or not at all: a group has failed.
pub(crate) fn write(folder: &Path) {
    // The newest is the last one.
    let _one = lock(&WRITING.get().now);
    let name = format!("smddp-{}-{}.json", smddp_transport::host_name(), std::process::id());
    let (path, part) = (folder.join(&name), folder.join(format!(".{name}.part")));
    let written = std::fs::create_dir_all(folder)
        .and_then(|()| std::fs::write(&part, process(true).to_string()))
        .and_then(|()| std::fs::rename(&part, &path));
    match written {
        Ok(()) => log::say(Level::Info, &format!("what led to it is in {}", path.display())),
        Err(error) => {
            // A partial file is of no use. It may not exist.
            let _ = std::fs::remove_file(&part);
            log::say(Level::Warn, &format!("SMDDP_DUMP_DIR: {}: {error}", path.display()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dump_that_cannot_be_written_leaves_no_partial_file() {
        let folder = std::env::temp_dir().join(format!("smddp-test-dump-{}", std::process::id()));
        let name = format!("smddp-{}-{}.json", smddp_transport::host_name(), std::process::id());
        // A folder with contents cannot be replaced.
        std::fs::create_dir_all(folder.join(&name).join("inside")).unwrap();
        write(&folder);
        let left: Vec<_> =
            std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!(left, [std::ffi::OsString::from(name)]);
    }
}
