//! Sends deadlock probes to processes of this node, over their status sockets.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use super::activity_query::open;
use super::credentials::check_user;
use super::deadlock_probe::{QUEUED, frame};
use super::memory_request::ProcessAddress;
use super::status::name;

/// Sends a probe to a process of this node, and waits until that process has queued it. Blocks for a few times `limit` at
/// most.
///
/// # Errors
/// The process has ended, belongs to another user, or does not reply.
pub fn send_probe(address: &ProcessAddress, content: &[u8], limit: Duration) -> io::Result<()> {
    let framed = frame(content)?;
    // A connect to a full backlog fails at once, because the socket is not blocking.
    let socket = open(&name(address))?;
    exchange(socket, &framed, limit)
}

fn exchange(mut stream: UnixStream, framed: &[u8], limit: Duration) -> io::Result<()> {
    check_user(&stream)?;
    stream.set_nonblocking(false)?;
    stream.set_write_timeout(Some(limit))?;
    stream.set_read_timeout(Some(limit))?;
    stream.write_all(framed)?;
    let mut reply = [0; QUEUED.len()];
    stream.read_exact(&mut reply)?;
    match reply == *QUEUED.as_bytes() {
        true => Ok(()),
        false => Err(io::ErrorKind::InvalidData.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probe_to_a_process_without_a_reply_ends_after_the_limit() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let outcome = exchange(ours, &frame(b"x").unwrap(), Duration::from_millis(20));
        assert!(outcome.is_err());
    }
}
