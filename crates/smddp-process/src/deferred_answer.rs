//! Answers that take long, on short-lived threads: the service thread continues to serve other connections.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use smddp_base::CloseOnFork;
use smddp_base::fork::PerProcess;
use smddp_base::threads::spawn;
use smddp_net::socket_io::send_all;

/// Maximum number of threads. Further connections are closed without an answer.
const MAX_THREADS: usize = 4;
/// Time limit of one write. A client that reads nothing must not keep a thread.
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
        let blocks = rustix::io::ioctl_fionbio(&*socket, false)
            .and_then(|()| set_socket_timeout(&*socket, Timeout::Send, Some(SEND_LIMIT)));
        if blocks.is_ok() {
            let _ = send_all(&*socket, text.as_bytes());
        }
    });
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixStream;
    use std::sync::Mutex;
    use std::sync::mpsc::{Receiver, Sender, channel};

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
