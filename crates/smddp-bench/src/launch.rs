//! `--nproc N`: starts the ranks on this machine and supervises them.
//!
//! The parent serves the store and waits on the ranks' process descriptors. The first rank that fails ends the run: the other
//! ranks get a grace period to report their errors, then they are killed. The ranks are killed when the parent dies
//! ([`follow_parent`]), so the default action of Ctrl-C is sufficient.

use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, set_parent_process_death_signal};

use crate::error::{Error, Result};
use crate::startup::{BEGAN, since_the_epoch};
use smddp_rendezvous::Server;

/// Time for the other ranks to exit after a rank failed. They detect the failure within a second.
const EXIT_GRACE: Duration = Duration::from_secs(3);

struct Rank {
    index: u32,
    child: Child,
    exit: OwnedFd,
}

/// The running ranks. They are killed on drop.
struct Ranks(Vec<Rank>);

impl Drop for Ranks {
    fn drop(&mut self) {
        for rank in &mut self.0 {
            let _ = rank.child.kill();
        }
        for rank in &mut self.0 {
            let _ = rank.child.wait();
        }
    }
}

/// Starts `count` ranks with the command `spawn` followed by `args`, and waits for them. Returns the common exit status.
pub(crate) fn launch(count: u32, spawn: &[String], args: &[String]) -> Result<i32> {
    launch_with(count, spawn, args, &[])
}

/// As [`launch`], with additional environment variables.
pub(crate) fn launch_with(
    count: u32,
    spawn: &[String],
    args: &[String],
    settings: &[(&str, String)],
) -> Result<i32> {
    let Some((program, first)) = spawn.split_first() else {
        return Err(Error::Usage("the command that starts a rank is empty".into()));
    };
    let server =
        Server::bind("127.0.0.1:0", count as usize).map_err(Error::io("binding the store's socket"))?;
    let mut ranks = Ranks(Vec::new());
    let began = since_the_epoch().as_nanos().to_string();
    for index in 0..count {
        let mut command = Command::new(program);
        command.args(first).args(args).arg("--store").arg(server.addr().to_string()).stdin(Stdio::null());
        for (name, value) in
            [("RANK", index), ("LOCAL_RANK", index), ("WORLD_SIZE", count), ("LOCAL_WORLD_SIZE", count)]
        {
            command.env(name, value.to_string());
        }
        command.env(BEGAN, &began).envs(settings.iter().map(|(name, value)| (name, value)));
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", server.addr().port().to_string());
        let mut child = command.spawn().map_err(Error::io(format!("starting rank {index} ({program})")))?;
        match pidfd_open(Pid::from_child(&child), PidfdFlags::empty()) {
            Ok(exit) => ranks.0.push(Rank { index, child, exit }),
            Err(error) => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(Error::Io { what: format!("watching rank {index}"), source: error.into() });
            }
        }
    }
    watch(&mut ranks)
}

/// Makes the kernel kill this rank when the parent dies.
pub(crate) fn follow_parent() -> Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(|e| Error::Io { what: "setting the parent death signal".into(), source: e.into() })
}

fn watch(ranks: &mut Ranks) -> Result<i32> {
    let mut until: Option<Instant> = None;
    while !ranks.0.is_empty() {
        let timeout = until.map(|t| {
            let left = t.saturating_duration_since(Instant::now());
            Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) }
        });
        let mut fds: Vec<_> = ranks.0.iter().map(|r| PollFd::new(&r.exit, PollFlags::IN)).collect();
        let ready = match poll(&mut fds, timeout.as_ref()) {
            Ok(0) => break, // The grace period is over.
            Ok(_) => fds.iter().position(|fd| !fd.revents().is_empty()),
            Err(rustix::io::Errno::INTR) => None,
            Err(e) => {
                return Err(Error::Io { what: "waiting for the ranks".into(), source: e.into() });
            }
        };
        let Some(at) = ready else { continue };
        let mut rank = ranks.0.swap_remove(at);
        let pid = rank.child.id();
        let status = rank.child.wait().map_err(Error::io(format!("waiting for rank {}", rank.index)))?;
        if !status.success() && until.is_none() {
            until = Some(Instant::now() + EXIT_GRACE);
            let others = if ranks.0.is_empty() { "" } else { "; stopping the others" };
            eprintln!("smddp-bench: rank {} (pid {pid}) {}{others}", rank.index, fate(status));
        }
    }
    Ok(i32::from(until.is_some()))
}

fn fate(status: ExitStatus) -> String {
    match (status.signal(), status.code()) {
        (Some(signal), _) => format!("was killed by signal {signal}"),
        (None, Some(code)) => format!("ended with exit status {code}"),
        (None, None) => format!("ended: {status}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Vec<String> {
        vec!["sh".into(), "-c".into(), script.into()]
    }

    #[test]
    fn successful_ranks_return_zero() {
        assert_eq!(launch(3, &shell("test $WORLD_SIZE = 3 && test -n \"$MASTER_PORT\""), &[]).unwrap(), 0);
    }

    #[test]
    fn failed_rank_stops_the_others() {
        // Rank 1 fails; the others would never end.
        let begun = Instant::now();
        let status =
            launch(3, &shell("if [ $RANK = 1 ]; then exit 7; else exec sleep 1000; fi"), &[]).unwrap();
        assert_eq!(status, 1);
        assert!(begun.elapsed() < Duration::from_secs(60));
    }

    #[test]
    fn missing_program_is_named() {
        let error = launch(2, &["/no/such/program".into()], &[]).unwrap_err().to_string();
        assert!(error.contains("rank 0") && error.contains("/no/such/program"), "{error}");
    }
}
