//! Bytes into a socket, in a process that may have SIGPIPE at its default: without `MSG_NOSIGNAL` a peer that has closed its end
//! would end it. Of the standard library's writes that of a `TcpStream` alone has it, and none of several slices.

use std::io::{self, IoSlice};
use std::os::fd::AsFd;

use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};

/// What one call takes of the slices, one behind the other.
pub(crate) fn send(socket: impl AsFd, slices: &[IoSlice<'_>]) -> io::Result<usize> {
    Ok(sendmsg(socket, slices, &mut SendAncillaryBuffer::default(), SendFlags::NOSIGNAL)?)
}

/// All of them, into a socket that blocks.
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

    /// Whether `writes` brings this thread a SIGPIPE. In a thread of its own, which holds it back.
    pub(crate) fn signalled(writes: impl FnOnce() + Send) -> bool {
        let work = || {
            let mut set = MaybeUninit::<libc::sigset_t>::uninit();
            // SAFETY: the functions fill the set that they are given and change this thread's mask alone.
            unsafe {
                libc::sigemptyset(set.as_mut_ptr());
                libc::sigaddset(set.as_mut_ptr(), libc::SIGPIPE);
                libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), std::ptr::null_mut());
            }
            writes();
            // SAFETY: as above; what waits for a thread goes with it.
            unsafe {
                libc::sigpending(set.as_mut_ptr());
                libc::sigismember(set.as_ptr(), libc::SIGPIPE) == 1
            }
        };
        std::thread::scope(|scope| scope.spawn(work).join().unwrap())
    }

    #[test]
    fn a_peer_that_is_gone_is_an_error_and_no_signal() {
        let found = signalled(|| {
            let (ours, theirs) = UnixStream::pair().unwrap();
            drop(theirs);
            assert_eq!(send_all(&ours, b"k").unwrap_err().kind(), io::ErrorKind::BrokenPipe);
        });
        assert!(!found);
    }
}
