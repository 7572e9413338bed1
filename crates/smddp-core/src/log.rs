//! Log output in NCCL's format, one line per fact: `time host:pid [rank] SMDDP LEVEL text`. Python's log lines pass
//! through here, too.
//!
//! | level | lines from this level on |
//! |---|---|
//! | VERSION | version, on rank 0; not at WARN, the default |
//! | WARN | problems and expected problems |
//! | INFO | transports and network of each group, ranks that are seconds late, reason of a group's failure |
//! | TRACE | begin and end of each collective |

use std::io::Write;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

use smddp_base::fork::PerProcess;

use crate::sync::lock;

/// Level of a line, and of the log (`SMDDP_DEBUG`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// No lines.
    None,
    /// The version only.
    Version,
    /// Problems that the user should correct.
    Warn,
    /// Selected transports and paths, and failures.
    Info,
    /// Each operation.
    Trace,
}

struct Log {
    level: Level,
    /// Destination instead of standard error.
    file: Option<String>,
    /// Rank assigned by the launcher.
    rank: Option<String>,
}

static LOG: OnceLock<Log> = OnceLock::new();

/// A line for a receiver other than standard error or a file.
pub struct Line {
    /// Level of the line.
    pub level: Level,
    /// Seconds since 1970.
    pub time: f64,
    /// Text without time, host and rank.
    pub text: String,
}

/// Alternative receiver of log lines, and the level up to which it gets lines in addition to the settings. A forked
/// child has none, since the parent's thread reads them.
#[derive(Default)]
struct Diverted {
    to: Mutex<Option<Sender<Line>>>,
    level: AtomicU8,
}

static DIVERTED: PerProcess<Diverted> = PerProcess::new();

/// Diverts log lines to the returned receiver: lines up to `level` and lines that the settings select.
pub fn divert(level: Level) -> Receiver<Line> {
    let (to, lines) = channel();
    let diverted = DIVERTED.get();
    *lock(&diverted.to) = Some(to);
    diverted.level.store(level as u8, Ordering::Relaxed);
    lines
}

/// Sets the level and destination of the log. Only the first call has an effect.
pub(crate) fn open(level: Level, file: Option<String>, rank: Option<String>) {
    // The default level logs warnings only, without the version.
    let wants_version = level != Level::Warn && rank.as_deref().is_none_or(|rank| rank == "0");
    if LOG.set(Log { level, file, rank }).is_ok() && wants_version {
        say(Level::Version, &format!("version {}", env!("CARGO_PKG_VERSION")));
    }
}

/// Rank of this process in its first group, plus one; 0 before. For lines of a process without a launcher.
static GROUP_RANK: PerProcess<AtomicUsize> = PerProcess::new();

/// Records the rank of this process in a group. Only the first call has an effect.
pub(crate) fn set_group_rank(rank: usize) {
    let _ = GROUP_RANK.get().compare_exchange(0, rank + 1, Ordering::Relaxed, Ordering::Relaxed);
}

/// Restores the destination that log lines had before the diversion.
pub fn end_diversion() {
    let diverted = DIVERTED.get();
    *lock(&diverted.to) = None;
    diverted.level.store(Level::None as u8, Ordering::Relaxed);
}

/// Returns true if lines of this level are logged.
pub fn is_enabled(level: Level) -> bool {
    LOG.get().is_some_and(|log| level <= log.level)
        || level as u8 <= DIVERTED.get().level.load(Ordering::Relaxed)
}

/// Logs `text` if the level is enabled.
pub fn say(level: Level, text: &str) {
    let Some(log) = LOG.get().filter(|_| is_enabled(level)) else { return };
    if let Some(to) = lock(&DIVERTED.get().to).as_ref() {
        let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        if to.send(Line { level, time, text: text.to_owned() }).is_ok() {
            return;
        }
    }
    let (host, pid) = (smddp_base::host_name(), std::process::id());
    let group_rank = GROUP_RANK.get().load(Ordering::Relaxed).checked_sub(1).map(|rank| rank.to_string());
    let rank = log.rank.as_deref().or(group_rank.as_deref()).unwrap_or("?");
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

/// Set after a failed write to the log file has been reported, until a write succeeds.
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
