//! Answers that take long, on short-lived threads: the service thread continues to serve other connections.

use std::io::{self, ErrorKind, IoSlice};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use smddp_base::CloseOnFork;
use smddp_base::fork::PerProcess;
use smddp_base::threads::spawn;
use smddp_net::socket_io::{send, would_block};

/// Maximum number of threads. Further connections are closed without an answer.
const MAX_THREADS: usize = 4;
/// Time limit of sending an answer. A client that reads slowly must not keep a thread.
const SEND_LIMIT: Duration = Duration::from_secs(5);

static THREADS: PerProcess<AtomicUsize> = PerProcess::new();

/// Thread that is counted in [`THREADS`] until this is dropped.
struct Counted;

impl Counted {
    fn new() -> Option<Self> {
        let counted = Self;
        (THREADS.get().fetch_add(1, Ordering::AcqRel) < MAX_THREADS).then_some(counted)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        THREADS.get().fetch_sub(1, Ordering::AcqRel);
    }
}

/// Starts a thread that computes an answer, sends it and closes the connection. Without a thread the connection is closed.
pub(crate) fn send_answer(socket: CloseOnFork<OwnedFd>, answer: fn() -> String) {
    let Some(counted) = Counted::new() else { return };
    // An error has closed the connection. The client reports the missing answer.
    let _ = spawn("smddp-status", move || {
        let _counted = counted;
        let text = answer();
        let _ = send_until(socket.as_fd(), text.as_bytes(), Instant::now() + SEND_LIMIT);
    });
}

/// Sends bytes over a non-blocking socket until that time.
fn send_until(socket: BorrowedFd<'_>, mut bytes: &[u8], until: Instant) -> io::Result<()> {
    while !bytes.is_empty() {
        match send(socket, &[IoSlice::new(bytes)]) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(sent) => bytes = &bytes[sent..],
            Err(error) if would_block(&error) => {}
            Err(error) => return Err(error),
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        let mut ready = [PollFd::from_borrowed_fd(socket, PollFlags::OUT)];
        // After an error the next send reports it.
        let _ = poll(&mut ready, Timespec::try_from(left).ok().as_ref());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixStream;
    use std::sync::Mutex;
    use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};

    use super::*;

    /// The end of the channel on which an answer waits.
    static GO: Mutex<Option<Receiver<()>>> = Mutex::new(None);

    fn wait() -> String {
        let go = GO.lock().unwrap();
        let _ = go.as_ref().unwrap().recv();
        "x".repeat(1 << 20)
    }

    fn connection() -> (CloseOnFork<OwnedFd>, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        (CloseOnFork::new(ours.into()), theirs)
    }

    #[test]
    fn client_that_reads_slowly_does_not_keep_the_sender() {
        let (ours, mut theirs) = connection();
        let (end, ended) = channel::<()>();
        let reader = std::thread::spawn(move || {
            let mut bytes = 0;
            // Each read makes room for a further write.
            while ended.recv_timeout(Duration::from_millis(20)) == Err(RecvTimeoutError::Timeout) {
                bytes += theirs.read(&mut [0; 64 << 10]).unwrap();
            }
            bytes
        });
        let until = Instant::now() + Duration::from_millis(300);
        let outcome = send_until(ours.as_fd(), &vec![0; 256 << 20], until);
        drop((end, ours));
        assert_eq!(outcome.unwrap_err().kind(), ErrorKind::TimedOut);
        assert!(reader.join().unwrap() > 0 && Instant::now() >= until);
    }

    #[test]
    fn slow_answers_arrive_whole_and_a_further_connection_is_closed() {
        let (go, waits): (Sender<()>, _) = channel();
        *GO.lock().unwrap() = Some(waits);
        let mut peers = Vec::new();
        for _ in 0..MAX_THREADS {
            let (socket, peer) = connection();
            send_answer(socket, wait);
            peers.push(peer);
        }
        let (socket, mut peer) = connection();
        send_answer(socket, wait);
        assert_eq!(peer.read(&mut [0]).unwrap(), 0, "a connection above the limit stays open");
        drop(go);
        for mut peer in peers {
            let mut text = Vec::new();
            assert_eq!(peer.read_to_end(&mut text).unwrap(), 1 << 20);
        }
    }
}
