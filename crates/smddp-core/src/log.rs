//! One line a fact, in the shape NCCL's users know: `time host:pid [rank] SMDDP LEVEL text`. What Python has to tell comes
//! here, too.
//!
//! | level | what is told from there on |
//! |---|---|
//! | VERSION | rank 0's version; not at WARN, the default |
//! | WARN | what is wrong, or will be |
//! | INFO | each group's ways and network, who is seconds late, why a group failed |
//! | TRACE | each collective's begin and end |

use std::io::Write;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

use smddp_transport::fork::PerProcess;

use crate::sync::lock;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    None,
    Version,
    Warn,
    Info,
    Trace,
}

struct Log {
    level: Level,
    /// Instead of standard error.
    file: Option<String>,
    /// As the launcher counts.
    rank: Option<String>,
}

static LOG: OnceLock<Log> = OnceLock::new();

/// A line on its way to whoever wants them instead of a file.
pub struct Line {
    pub level: Level,
    /// Seconds since 1970.
    pub time: f64,
    pub text: String,
}

/// Where lines go instead, and from which level on they are told besides what the settings ask for. A forked child has neither:
/// the thread that reads is the parent's.
#[derive(Default)]
struct Diverted {
    to: Mutex<Option<Sender<Line>>>,
    level: AtomicU8,
}

static DIVERTED: PerProcess<Diverted> = PerProcess::new();

/// From here on lines come out of what this returns, those up to `level` and those that the settings ask for.
pub fn divert(level: Level) -> Receiver<Line> {
    let (to, lines) = channel();
    let diverted = DIVERTED.get();
    *lock(&diverted.to) = Some(to);
    diverted.level.store(level as u8, Ordering::Relaxed);
    lines
}

/// From here on facts of that level are told; the first one who opens it counts.
pub(crate) fn open(level: Level, file: Option<String>, rank: Option<String>) {
    // Where nobody asked for anything, only what is wrong is told.
    let asked = level != Level::Warn && rank.as_deref().is_none_or(|rank| rank == "0");
    if LOG.set(Log { level, file, rank }).is_ok() && asked {
        say(Level::Version, &format!("version {}", env!("CARGO_PKG_VERSION")));
    }
}

/// Restores the destination that log lines had before the diversion.
pub fn divert_no_more() {
    let diverted = DIVERTED.get();
    *lock(&diverted.to) = None;
    diverted.level.store(Level::None as u8, Ordering::Relaxed);
}

/// Whether facts of that level are told.
pub fn tells(level: Level) -> bool {
    LOG.get().is_some_and(|log| level <= log.level)
        || level as u8 <= DIVERTED.get().level.load(Ordering::Relaxed)
}

/// Tells `text` if the settings ask for this level.
pub fn say(level: Level, text: &str) {
    let Some(log) = LOG.get().filter(|_| tells(level)) else { return };
    if let Some(to) = lock(&DIVERTED.get().to).as_ref() {
        let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        if to.send(Line { level, time, text: text.to_owned() }).is_ok() {
            return;
        }
    }
    let (host, pid) = (smddp_transport::host_name(), std::process::id());
    let rank = log.rank.as_deref().unwrap_or("?");
    let (now, name) = (jiff::Timestamp::now(), format!("{level:?}").to_uppercase());
    let line = format!("{now:.6} {host}:{pid} [{rank}] SMDDP {name} {text}\n");
    let written = log.file.as_ref().map(|pattern| {
        let path = pattern.replace("%h", &host).replace("%p", &pid.to_string());
        append(&path, &line).map_err(|error| (path, error))
    });
    match written {
        Some(Ok(())) => return FILE_FAILED.store(false, Ordering::Relaxed),
        Some(Err((path, error))) if !FILE_FAILED.swap(true, Ordering::Relaxed) => {
            to_stderr(&format!(
                "smddp: SMDDP_DEBUG_FILE {path}: {error}; writing to standard error instead\n"
            ));
        }
        _ => {}
    }
    to_stderr(&line);
}

/// The last line could not be written to the file, which was reported.
static FILE_FAILED: AtomicBool = AtomicBool::new(false);

/// Opens the file for each line: it may be rotated, and a forked child writes to its own.
fn append(path: &str, line: &str) -> std::io::Result<()> {
    let mut file = std::fs::OpenOptions::new().create(true).append(true).open(path)?;
    file.write_all(line.as_bytes())
}

/// Writes without the standard library's lock, which a forked child may have inherited locked.
fn to_stderr(text: &str) {
    let copy = std::io::stderr().as_fd().try_clone_to_owned();
    // A line that cannot be written is lost.
    let _ = copy.and_then(|fd| std::fs::File::from(fd).write_all(text.as_bytes()));
}
