//! Socket writes with `MSG_NOSIGNAL`. In a process with the default action for SIGPIPE, a write to a socket that the
//! peer has closed would end the process. In the standard library only `TcpStream::write` sets the flag, and no
//! vectored write does.

use std::io::{self, IoSlice};
use std::os::fd::AsFd;

use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};

/// Sends the concatenated slices with one system call. Returns the number of bytes that it accepted.
pub(crate) fn send(socket: impl AsFd, slices: &[IoSlice<'_>]) -> io::Result<usize> {
    Ok(sendmsg(socket, slices, &mut SendAncillaryBuffer::default(), SendFlags::NOSIGNAL)?)
}

/// Sends all bytes to a blocking socket.
pub(crate) fn send_all(socket: impl AsFd, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match send(&socket, &[IoSlice::new(bytes)]) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(sent) => bytes = &bytes[sent..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::mem::MaybeUninit;
    use std::os::unix::net::UnixStream;

    /// Returns true if `writes` raises SIGPIPE. Runs it in a separate thread that blocks the signal.
    pub(crate) fn raises_sigpipe(writes: impl FnOnce() + Send) -> bool {
        let work = || {
            let mut set = MaybeUninit::<libc::sigset_t>::uninit();
            // SAFETY: the functions initialize the set that they receive and change this thread's mask only.
            unsafe {
                libc::sigemptyset(set.as_mut_ptr());
                libc::sigaddset(set.as_mut_ptr(), libc::SIGPIPE);
                libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), std::ptr::null_mut());
            }
            writes();
            // SAFETY: as above. A signal pending for a thread ends with the thread.
            unsafe {
                libc::sigpending(set.as_mut_ptr());
                libc::sigismember(set.as_ptr(), libc::SIGPIPE) == 1
            }
        };
        std::thread::scope(|scope| scope.spawn(work).join().unwrap())
    }

    #[test]
    fn write_to_a_closed_peer_returns_an_error_without_a_signal() {
        let raised = raises_sigpipe(|| {
            let (ours, theirs) = UnixStream::pair().unwrap();
            drop(theirs);
            assert_eq!(send_all(&ours, b"k").unwrap_err().kind(), io::ErrorKind::BrokenPipe);
        });
        assert!(!raised);
    }
}
