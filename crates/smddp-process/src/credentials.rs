//! User and process id of the peer of a unix socket, as the kernel recorded them at connect time.

use std::io;
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd};

use rustix::process::Pid;

/// Credentials of the peer of a unix socket.
#[derive(Clone, Copy, Debug)]
pub struct PeerCredentials {
    uid: u32,
    /// `None` for a process of another PID namespace that this one does not contain. The kernel reports 0 for it, which
    /// rustix's `socket_peercred` cannot represent.
    pub(super) pid: Option<Pid>,
}

impl PeerCredentials {
    pub(super) fn of(socket: impl AsFd) -> io::Result<Self> {
        let mut found = libc::ucred { pid: 0, uid: 0, gid: 0 };
        let mut length = size_of::<libc::ucred>() as libc::socklen_t;
        // SAFETY: the kernel writes at most `length` bytes into `found`, and their number into `length`; both are this thread's.
        let outcome = unsafe {
            libc::getsockopt(
                socket.as_fd().as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERCRED,
                (&raw mut found).cast(),
                &raw mut length,
            )
        };
        if outcome != 0 {
            let error = io::Error::last_os_error();
            return Err(io::Error::new(error.kind(), format!("cannot read peer credentials: {error}")));
        }
        Ok(Self { uid: found.uid, pid: Pid::from_raw(found.pid) })
    }
}

impl std::fmt::Display for PeerCredentials {
    /// "uid 1001, pid 812", for a log.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "uid {}, ", self.uid)?;
        match self.pid {
            Some(pid) => write!(f, "pid {}", pid.as_raw_pid()),
            None => f.write_str("in another PID namespace"),
        }
    }
}

/// Checks that the peer of a unix socket runs as this process's user.
///
/// # Errors
/// The peer runs as another user, or the kernel does not report its credentials.
pub fn check_user(socket: impl AsFd) -> io::Result<PeerCredentials> {
    let (found, mine) = (PeerCredentials::of(socket)?, rustix::process::geteuid().as_raw());
    match found.uid == mine {
        true => Ok(found),
        false => Err(io::Error::other(format!("peer uid {}, expected {mine}", found.uid))),
    }
}

/// Returns this process's user id in the parent of its user namespace. Users of two rootless containers may both be 0
/// inside.
pub fn outer_uid() -> u32 {
    let uid = rustix::process::geteuid().as_raw();
    let map = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    map.lines().find_map(|line| mapped(line, uid)).unwrap_or(uid)
}

/// Returns `uid` mapped to the parent namespace, if this line of a uid_map (first id inside, first id outside, count)
/// contains it.
fn mapped(line: &str, uid: u32) -> Option<u32> {
    let mut numbers = line.split_whitespace().map(str::parse::<u32>);
    let mut next = || numbers.next()?.ok();
    let (inside, outside, count) = (next()?, next()?, next()?);
    let offset = uid.checked_sub(inside).filter(|offset| *offset < count)?;
    outside.checked_add(offset)
}

/// Returns the inode number of this process's PID namespace; 0 if it is unknown.
pub(super) fn pid_namespace() -> u64 {
    std::fs::metadata("/proc/self/ns/pid").map_or(0, |found| std::os::unix::fs::MetadataExt::ino(&found))
}

/// Returns true if `/proc` belongs to this process's PID namespace. A process may enter a PID namespace and keep the
/// `/proc` of the parent namespace.
pub(super) fn proc_is_ours() -> bool {
    let me = std::fs::read_link("/proc/self");
    me.is_ok_and(|me| me.to_str() == Some(&std::process::id().to_string()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn peer_credentials_are_those_of_this_process() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let found = check_user(&ours).unwrap();
        assert_eq!(found.pid, Some(rustix::process::getpid()));
        assert!(proc_is_ours() && pid_namespace() > 0);
    }

    #[test]
    fn unreadable_credentials_are_a_separate_error() {
        let file = std::fs::File::open("/dev/null").unwrap();
        let text = check_user(&file).unwrap_err().to_string();
        assert!(text.starts_with("cannot read peer credentials: "), "{text}");
    }

    #[test]
    fn user_ids_are_mapped_to_the_parent_namespace() {
        assert_eq!(mapped("         0       1000          1", 0), Some(1000));
        assert_eq!(mapped("0 100000 65536", 33), Some(100_033));
        assert_eq!(mapped("0 0 4294967295", 65534), Some(65534));
        for line in ["0 1000 1", "", "0", "0 1 x", "5 0 3"] {
            assert_eq!(mapped(line, 2), None, "{line}");
        }
    }
}
