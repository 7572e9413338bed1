//! Deadlock probes between nodes: one short authenticated connection for each probe.

use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{self, PollFd, PollFlags, Timespec};
use smddp_net::handshake::Purpose;
use smddp_net::token::Keys;
use smddp_process::deadlock_probe::{MAX_FRAME_BYTES, QUEUED, frame, take};
use smddp_process::incoming::MessageReceiver;

use super::address::{Credential, TcpAddress};
use super::dial::Dial;
use super::seal::{Decryptor, Encryptor};

/// Sends probes to the ranks of other nodes of one group.
#[derive(Clone)]
pub struct ProbeSender {
    credential: Credential,
    addresses: Arc<[Option<TcpAddress>]>,
}

impl ProbeSender {
    pub(super) fn new(credential: Credential, addresses: Arc<[Option<TcpAddress>]>) -> Self {
        Self { credential, addresses }
    }

    /// Sends a probe to `rank`, and waits until its process has queued it. Blocks for `limit` at most.
    ///
    /// # Errors
    /// The rank has no address, is unreachable, or its group is closed.
    pub fn send(&self, rank: usize, content: &[u8], limit: Duration) -> io::Result<()> {
        let address = self.addresses.get(rank).and_then(Option::as_ref);
        let address = address.ok_or(ErrorKind::AddrNotAvailable)?;
        let framed = frame(content)?;
        let until = Instant::now() + limit;
        let mut dial = Dial::new(&self.credential, (rank, address), Purpose::Probe, limit)?;
        while !dial.advance()? {
            wait(&dial.socket, dial.events(), until)?;
        }
        let bytes = match dial.keys() {
            Some(keys) => Encryptor::new(keys.initiator).encrypt_all(&framed),
            None => framed,
        };
        write(&dial.socket, &bytes, until)?;
        let mut reply = [0; QUEUED.len()];
        loop {
            match (&*dial.socket).read(&mut reply) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(_) if reply == *QUEUED.as_bytes() => return Ok(()),
                Ok(_) => return Err(ErrorKind::InvalidData.into()),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    wait(&dial.socket, libc::POLLIN, until)?;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}

fn write(mut socket: &TcpStream, mut bytes: &[u8], until: Instant) -> io::Result<()> {
    while !bytes.is_empty() {
        match socket.write(bytes) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(sent) => bytes = &bytes[sent..],
            Err(error) if error.kind() == ErrorKind::WouldBlock => wait(socket, libc::POLLOUT, until)?,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Waits until the socket is ready.
fn wait(socket: &TcpStream, events: i16, until: Instant) -> io::Result<()> {
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(ErrorKind::TimedOut.into());
    }
    let mut fds = [PollFd::new(socket, PollFlags::from_bits_truncate(events.cast_unsigned()))];
    match event::poll(&mut fds, Timespec::try_from(left).ok().as_ref()) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Returns the receiver of one probe on an accepted connection.
pub(super) fn receiver(keys: Option<Keys>) -> MessageReceiver {
    let mut decryptor = keys.map(|keys| Decryptor::new(keys.initiator));
    let mut received = Vec::new();
    Box::new(move |bytes| {
        match &mut decryptor {
            Some(decryptor) => decryptor.decrypt(bytes, &mut received)?,
            None => received.extend_from_slice(bytes),
        }
        if received.len() > MAX_FRAME_BYTES {
            return Err(ErrorKind::InvalidData.into());
        }
        Ok(take(&received)?.then(|| QUEUED.as_bytes().to_vec()))
    })
}

#[cfg(test)]
mod tests {
    use smddp_net::token::Token;

    use super::*;

    #[test]
    fn encrypted_probe_is_received_in_any_parts() {
        let token = Token::random().unwrap();
        let keys = || token.keys(b"greeting", b"nonce");
        let framed = frame(&[7; 30_000]).unwrap();
        for part in [1, 1000, 50_000] {
            let (bytes, mut receive) =
                (Encryptor::new(keys().initiator).encrypt_all(&framed), receiver(Some(keys())));
            let replies: Vec<_> = bytes.chunks(part).map(|part| receive(part).unwrap()).collect();
            let (last, before) = replies.split_last().unwrap();
            assert_eq!(last.as_deref(), Some(QUEUED.as_bytes()), "{part}");
            assert!(before.iter().all(Option::is_none), "{part}");
        }
        let mut forged = Encryptor::new(keys().initiator).encrypt_all(&framed);
        forged[9] ^= 1;
        assert!(receiver(Some(keys()))(&forged).is_err());
    }
}
