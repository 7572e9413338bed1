//! Sockets that end with this process, though it has forked: a child's copies would keep connections open, and nobody
//! would notice the parent's end. (What a process executes has none: they are close-on-exec.)

use std::ops::Deref;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicU64, Ordering};

/// One bit for each descriptor that is such a socket. Those beyond are left to the child.
static REGISTERED: [AtomicU64; 1024] = [const { AtomicU64::new(0) }; 1024];

fn bit(fd: RawFd) -> Option<(&'static AtomicU64, u64)> {
    let fd = usize::try_from(fd).ok()?;
    Some((REGISTERED.get(fd / 64)?, 1 << (fd % 64)))
}

/// In a forked child: such sockets are none any more. Their numbers stay taken, as copies of their owners will close them.
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
            // SAFETY: a number that an `CloseOnFork` holds open; the child has one thread, which does nothing else now.
            unsafe { libc::dup3(null, fd, libc::O_CLOEXEC) };
        }
    }
    // SAFETY: opened above.
    unsafe { libc::close(null) };
}

/// A socket that forked children do not keep.
pub(crate) struct CloseOnFork<S: AsRawFd>(S);

impl<S: AsRawFd> CloseOnFork<S> {
    pub(crate) fn new(socket: S) -> Self {
        if let Some((index, bit)) = bit(socket.as_raw_fd()) {
            index.fetch_or(bit, Ordering::AcqRel);
        }
        Self(socket)
    }

    /// The same descriptor as another type.
    pub(crate) fn map<T: AsRawFd>(self, into: impl FnOnce(S) -> T) -> CloseOnFork<T> {
        let this = std::mem::ManuallyDrop::new(self);
        // SAFETY: read once, as nobody drops or uses `this` any more; it belongs to this thread.
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
    /// Before the socket is closed and its number belongs to somebody else.
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
    fn a_forked_child_does_not_keep_a_connection_open() {
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
        // SAFETY: our own child, which is still there.
        unsafe {
            libc::kill(child, libc::SIGKILL);
            libc::waitpid(child, std::ptr::null_mut(), 0);
        }
        assert_eq!(end.unwrap(), 0);
    }
}
