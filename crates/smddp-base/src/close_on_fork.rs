//! Sockets that a forked child does not inherit. A child's copy would keep a connection open after the parent has
//! ended, so peers would not detect the end. Executed programs inherit none of these sockets: they are close-on-exec.

use std::ops::Deref;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicU64, Ordering};

/// One bit per descriptor; set for registered sockets. A child keeps descriptors beyond the table.
static REGISTERED: [AtomicU64; 1024] = [const { AtomicU64::new(0) }; 1024];

fn bit(fd: RawFd) -> Option<(&'static AtomicU64, u64)> {
    let fd = usize::try_from(fd).ok()?;
    Some((REGISTERED.get(fd / 64)?, 1 << (fd % 64)))
}

/// Replaces the registered sockets of a forked child by `/dev/null`. The numbers remain allocated, because the copies
/// of their owners close them.
pub(crate) fn forked() {
    // SAFETY: a constant string; `open` may be called between fork and exec.
    let null = unsafe { libc::open(c"/dev/null".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC) };
    if null < 0 {
        return;
    }
    for (index, bits) in REGISTERED.iter().enumerate() {
        let mut bits = bits.load(Ordering::Acquire);
        while bits != 0 {
            let fd = index as RawFd * 64 + bits.trailing_zeros() as RawFd;
            bits &= bits - 1;
            // SAFETY: a `CloseOnFork` holds this number open; the child has one thread, which runs this function.
            unsafe { libc::dup3(null, fd, libc::O_CLOEXEC) };
        }
    }
    // SAFETY: opened above.
    unsafe { libc::close(null) };
}

/// Socket that forked children do not keep.
pub struct CloseOnFork<S: AsRawFd>(S);

impl<S: AsRawFd> CloseOnFork<S> {
    /// Registers the socket.
    pub fn new(socket: S) -> Self {
        if let Some((index, bit)) = bit(socket.as_raw_fd()) {
            index.fetch_or(bit, Ordering::AcqRel);
        }
        Self(socket)
    }

    /// Converts the socket to another type with the same descriptor.
    pub fn map<T: AsRawFd>(self, into: impl FnOnce(S) -> T) -> CloseOnFork<T> {
        let this = std::mem::ManuallyDrop::new(self);
        // SAFETY: read once; `this` is neither dropped nor used afterwards and belongs to this thread.
        CloseOnFork(into(unsafe { std::ptr::read(&raw const this.0) }))
    }
}

impl<S: AsRawFd> Deref for CloseOnFork<S> {
    type Target = S;

    fn deref(&self) -> &S {
        &self.0
    }
}

impl<S: AsRawFd> Drop for CloseOnFork<S> {
    /// Clears the bit before the socket is closed, because the number may be reused afterwards.
    fn drop(&mut self) {
        if let Some((index, bit)) = bit(self.0.as_raw_fd()) {
            index.fetch_and(!bit, Ordering::AcqRel);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::{TcpListener, TcpStream};
    use std::time::Duration;

    use super::*;

    #[test]
    fn forked_child_does_not_keep_a_connection_open() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let ours = CloseOnFork::new(TcpStream::connect(listener.local_addr().unwrap()).unwrap());
        let (mut theirs, _) = listener.accept().unwrap();
        // Registers the handler.
        let _ = crate::fork::generation();
        // SAFETY: the child calls nothing but `pause`.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: as above; it is killed below.
            unsafe { libc::pause() };
        }
        drop(ours);
        theirs.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let end = theirs.read(&mut [0]);
        // SAFETY: a child of this test, not yet reaped.
        unsafe {
            libc::kill(child, libc::SIGKILL);
            libc::waitpid(child, std::ptr::null_mut(), 0);
        }
        assert_eq!(end.unwrap(), 0);
    }
}
