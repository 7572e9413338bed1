//! Asking ranks that do not drive how far they are: their processes' accepting threads answer.

use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::call::connect;
use super::endpoint::TcpAddress;
use super::hello::{HELLO, Purpose, hello};
use super::own::Own;
use super::watch::silent;

/// All answers together are waited for this long.
const PATIENCE: Duration = Duration::from_millis(500);
/// More ranks than this are not asked: every one of them may be asking, too.
const MOST: usize = 256;

/// One rank that is asked.
struct Call {
    peer: usize,
    stream: Own<TcpStream>,
    hello: [u8; HELLO],
    asked: bool,
    answer: [u8; 8],
    heard: usize,
}

impl Call {
    /// Without waiting for the connection.
    fn new(me: usize, peer: usize, address: &TcpAddress) -> io::Result<Self> {
        let stream = connect(address.socket)?;
        let hello = hello(&address.token, me, Purpose::Ask);
        Ok(Self { peer, stream, hello, asked: false, answer: [0; 8], heard: 0 })
    }

    /// What there is to do now that the socket is ready; the answer when all of it is here.
    fn go_on(&mut self) -> io::Result<Option<u64>> {
        if !self.asked {
            if let Some(error) = self.stream.take_error()? {
                return Err(error);
            }
            // A new connection has room for so little.
            (&*self.stream).write_all(&self.hello)?;
            self.asked = true;
            return Ok(None);
        }
        match (&*self.stream).read(&mut self.answer[self.heard..]) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(bytes) => self.heard += bytes,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Err(error) => return Err(error),
        }
        Ok((self.heard == self.answer.len()).then(|| u64::from_le_bytes(self.answer)))
    }
}

/// (rank, operations begun) of the ranks that answer, (rank, `None`) of those from which nothing comes; whoever refuses
/// or hangs up is left out.
pub(super) fn ask(me: usize, peers: Vec<(usize, TcpAddress)>) -> Vec<(usize, Option<u64>)> {
    ask_for(me, peers, PATIENCE)
}

fn ask_for(me: usize, peers: Vec<(usize, TcpAddress)>, patience: Duration) -> Vec<(usize, Option<u64>)> {
    let until = Instant::now() + patience;
    let mut found = Vec::new();
    let mut settle = |peer: usize, outcome: io::Result<u64>| match outcome {
        Ok(begun) => found.push((peer, Some(begun))),
        Err(error) if silent(&error) => found.push((peer, None)),
        Err(_) => {}
    };
    // All at once, so that nobody waits for those that do not answer.
    let mut calls = Vec::new();
    for (peer, address) in peers.into_iter().take(MOST) {
        match Call::new(me, peer, &address) {
            Ok(call) => calls.push(call),
            Err(error) => settle(peer, Err(error)),
        }
    }
    while !calls.is_empty() {
        let left = until.saturating_duration_since(Instant::now());
        let ready = if left.is_zero() { Vec::new() } else { ready(&calls, left) };
        if left.is_zero() {
            calls.drain(..).for_each(|call| settle(call.peer, Err(ErrorKind::TimedOut.into())));
        }
        let mut next = ready.into_iter();
        calls.retain_mut(|call| {
            if next.next() != Some(true) {
                return true;
            }
            match call.go_on() {
                Ok(None) => true,
                Ok(Some(begun)) => {
                    settle(call.peer, Ok(begun));
                    false
                }
                Err(error) => {
                    settle(call.peer, Err(error));
                    false
                }
            }
        });
    }
    found
}

/// Which calls can go on, after at most this time.
fn ready(calls: &[Call], at_most: Duration) -> Vec<bool> {
    let events = |call: &Call| if call.asked { PollFlags::IN } else { PollFlags::OUT };
    let mut fds: Vec<PollFd<'_>> = calls.iter().map(|c| PollFd::new(&*c.stream, events(c))).collect();
    let at_most = Timespec::try_from(at_most).ok();
    // Interrupted or refused: whatever is ready is so the next time, too.
    let _ = poll(&mut fds, at_most.as_ref());
    fds.iter().map(|fd| !fd.revents().is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    fn address(listener: &TcpListener) -> TcpAddress {
        TcpAddress { socket: listener.local_addr().unwrap(), token: Default::default() }
    }

    #[test]
    fn who_does_not_answer_keeps_nobody_from_being_heard() {
        let [silent, here, gone] = [(); 3].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
        let peers = vec![(3, address(&silent)), (5, address(&here)), (7, address(&gone))];
        drop(gone);
        let answering = std::thread::spawn(move || {
            let (mut caller, _) = here.accept().unwrap();
            caller.read_exact(&mut [0; HELLO]).unwrap();
            // In two parts.
            caller.write_all(&[9, 0, 0]).unwrap();
            caller.flush().unwrap();
            caller.write_all(&[0; 5]).unwrap();
        });
        // Longer than usual: the thread that answers may have to wait for its turn.
        let patience = 4 * PATIENCE;
        let begun = Instant::now();
        let found = ask_for(0, peers, patience);
        let took = begun.elapsed();
        answering.join().unwrap();
        assert_eq!(found, [(5, Some(9)), (3, None)]);
        assert!(took >= patience && took < 4 * patience, "{took:?}");
    }
}
