//! Stack of this process's main thread, without its cooperation. On a signal, Python's faulthandler writes the stack
//! of the receiving thread into a pipe and does not wait for the interpreter lock.

use std::os::fd::OwnedFd;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use smddp_base::fork::PerProcess;
use smddp_base::lock;

/// Time limit for the first bytes. A slower thread is in an uninterruptible system call or blocks the signal.
const FIRST_LIMIT: Duration = Duration::from_millis(200);
/// Pause after which the output is complete; it arrives in many small writes.
const QUIET_LIMIT: Duration = Duration::from_millis(10);
/// Validity of a cached stack, because several peers query at the same time.
const CACHE_TIME: Duration = Duration::from_millis(500);
/// Maximum bytes to read, of more frames than are reported.
const MAX_BYTES: usize = 16 << 10;
/// Reported frames, and maximum bytes of a file name.
const MAX_FRAMES: usize = 3;
const MAX_FILE_BYTES: usize = 80;

struct Source {
    signal: i32,
    pipe: OwnedFd,
    /// Folders of torch and of this library; their frames are not the user's.
    library_folders: Vec<String>,
    /// Folders of the standard library and of installed packages.
    package_folders: Vec<String>,
    cached: Option<(Instant, String)>,
}

/// Per process: a forked child inherits the handler without the pipe, and another thread may hold the parent's lock.
static SOURCE: PerProcess<Mutex<Option<Source>>> = PerProcess::new();

/// Sets the signal that makes the main thread write its stack into the other end of `pipe`. Frames under
/// `library_folders` and `package_folders` are omitted if there are others, and those under `package_folders` are
/// preferred to those under `library_folders`.
pub fn set_frame_source(
    signal: i32,
    pipe: OwnedFd,
    library_folders: Vec<String>,
    package_folders: Vec<String>,
) {
    let _ = rustix::io::ioctl_fionbio(&pipe, true);
    *lock(SOURCE.get()) = Some(Source { signal, pipe, library_folders, package_folders, cached: None });
}

/// Returns the stack, for example "/home/me/train.py:88 in step < /home/me/train.py:120 in main": the innermost user
/// frame first. Without a stack it returns the reason.
pub fn main_thread_location() -> String {
    let mut source = lock(SOURCE.get());
    let Some(source) = source.as_mut() else {
        return "an unknown line (stack capture is not enabled in this process)".to_owned();
    };
    if let Some((at, text)) = &source.cached
        && at.elapsed() < CACHE_TIME
    {
        return text.clone();
    }
    let text = match source.read() {
        Ok(text) => describe(&text, &source.library_folders, &source.package_folders),
        Err(reason) => format!("an unknown line ({reason})"),
    };
    source.cached = Some((Instant::now(), text.clone()));
    text
}

impl Source {
    fn read(&self) -> Result<String, &'static str> {
        // The default action of the signal would end the process.
        if !has_handler(self.signal) {
            return Err("the signal handler was removed");
        }
        let mut part = [0; 4096];
        while matches!(rustix::io::read(&self.pipe, &mut part), Ok(1..)) {}
        let pid = std::process::id() as libc::pid_t;
        // SAFETY: sends a signal with a handler to this process's main thread, whose id is that of the process.
        unsafe { libc::syscall(libc::SYS_tgkill, pid, pid, self.signal) };
        let mut text = Vec::new();
        while text.len() < MAX_BYTES {
            let at_most = Timespec::try_from(if text.is_empty() { FIRST_LIMIT } else { QUIET_LIMIT }).ok();
            let mut fds = [PollFd::new(&self.pipe, PollFlags::IN)];
            match poll(&mut fds, at_most.as_ref()) {
                Ok(0) => break,
                Ok(_) => {}
                Err(_) => continue,
            }
            match rustix::io::read(&self.pipe, &mut part) {
                Ok(0) => break,
                Ok(bytes) => text.extend(&part[..bytes]),
                Err(_) => {}
            }
        }
        if text.is_empty() {
            Err("the main thread does not handle the signal")
        } else {
            Ok(String::from_utf8_lossy(&text).into_owned())
        }
    }
}

/// Returns true if the process has a handler for the signal.
fn has_handler(signal: i32) -> bool {
    let mut action = std::mem::MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: reads the action of a signal into a value of this function; any thread may do so.
    let found = unsafe { libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr()) };
    if found != 0 {
        return false;
    }
    // SAFETY: the call above has filled it.
    let handler = unsafe { action.assume_init() }.sa_sigaction;
    handler != libc::SIG_DFL && handler != libc::SIG_IGN
}

/// Formats the output of faulthandler as one line: the frames of the user's files, else of installed packages, else all.
fn describe(text: &str, library_folders: &[String], package_folders: &[String]) -> String {
    let all: Vec<_> = text.lines().filter_map(frame).collect();
    let packages = outside(&all, library_folders);
    let users = outside(&packages, package_folders);
    let frames = [users, packages, all].into_iter().find(|frames| !frames.is_empty()).unwrap_or_default();
    let lines = frames.iter().take(MAX_FRAMES).map(|(file, line)| {
        let from = file.len().saturating_sub(MAX_FILE_BYTES);
        let from = (from..file.len()).find(|&at| file.is_char_boundary(at)).unwrap_or(0);
        let cut = if from > 0 { "..." } else { "" };
        let line: String = line.chars().take(MAX_FILE_BYTES).collect();
        format!("{cut}{}:{line}", &file[from..])
    });
    let lines: Vec<String> = lines.collect();
    if lines.is_empty() { "no Python frame".to_owned() } else { lines.join(" < ") }
}

/// Returns the frames of files that are in none of these folders.
fn outside<'a>(frames: &[(&'a str, &'a str)], folders: &[String]) -> Vec<(&'a str, &'a str)> {
    let is_outside = |(file, _): &&(&str, &str)| !folders.iter().any(|f| file.starts_with(f.as_str()));
    frames.iter().filter(is_outside).copied().collect()
}

/// Parses `  File "train.py", line 88 in step` into the file and "88 in step".
fn frame(line: &str) -> Option<(&str, &str)> {
    line.trim_start().strip_prefix("File \"")?.rsplit_once("\", line ")
}

#[cfg(test)]
mod tests {
    use super::*;

    const STACK: &str = "Stack (most recent call first):\n  File \"/site/torch/nn.py\", line 3 in wait\n  \
                         File \"/home/me/train.py\", line 88 in step\n  File \"/home/me/train.py\", line 120 in <module>\n";

    #[test]
    fn first_reported_frame_is_the_users() {
        let library_folders = ["/site/torch/".to_owned()];
        assert_eq!(
            describe(STACK, &library_folders, &[]),
            "/home/me/train.py:88 in step < /home/me/train.py:120 in <module>"
        );
        assert!(describe(STACK, &[], &[]).starts_with("/site/torch/nn.py:3 in wait < "));
    }

    #[test]
    fn frames_of_libraries_between_the_users_frames_are_omitted() {
        let stack = "  File \"/site/torch/nn.py\", line 3 in wait\n  File \"/lib/inspect.py\", line 5 in trace\n  \
                     File \"/me/train.py\", line 8 in step\n  File \"/site/torch/init.py\", line 9 in apply\n  \
                     File \"/me/train.py\", line 12 in main\n";
        let [torch, packages] = ["/site/torch/", "/lib/"].map(|folder| [folder.to_owned()]);
        assert_eq!(describe(stack, &torch, &packages), "/me/train.py:8 in step < /me/train.py:12 in main");
        // A program that is an installed package.
        let packages = ["/lib/".to_owned(), "/me/".to_owned()];
        assert!(
            describe(stack, &torch, &packages).starts_with("/lib/inspect.py:5 in trace < /me/train.py:8 in")
        );
        assert!(
            describe("File \"/site/torch/nn.py\", line 3 in wait", &torch, &packages)
                .ends_with("nn.py:3 in wait")
        );
    }

    #[test]
    fn description_of_any_text_is_bounded() {
        let long = format!("  File \"{}\", line 1 in {}\n", "ü/".repeat(400), "f".repeat(600));
        for text in ["", "Stack\n", "File \"", "File \"\", line ", &long.repeat(90)] {
            assert!(describe(text, &[], &[]).len() < 4 * 2 * MAX_FILE_BYTES, "{text}");
        }
    }

    #[test]
    fn signals_without_a_handler_are_detected() {
        assert!(!has_handler(50) && !has_handler(0) && !has_handler(65));
    }

    /// A query may hold the lock for [`FIRST_LIMIT`], and a fork may happen at any time.
    #[test]
    fn forked_child_answers_while_the_parent_holds_the_lock() {
        // Created before the fork, as in a process that has a group.
        drop(main_thread_location());
        let held = lock(SOURCE.get());
        // SAFETY: the child calls `main_thread_location`, which takes no lock of the parent, and ends without the parent's exit handlers.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: ends the child by a signal if it waits for a lock that no thread of it holds.
            unsafe { libc::alarm(10) };
            let cached = main_thread_location().contains("stack capture is not enabled in this process");
            // SAFETY: as above.
            unsafe { libc::_exit(i32::from(!cached)) };
        }
        let mut status = 0;
        // SAFETY: a child of this test.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0, "the forked child waited for the parent's lock");
        drop(held);
    }
}
