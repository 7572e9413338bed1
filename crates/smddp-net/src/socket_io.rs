//! Bytes of handshakes, and socket writes with `MSG_NOSIGNAL`. In a process with the default action for SIGPIPE, a
//! write to a socket that the peer has closed would end the process. In the standard library only `TcpStream::write`
//! sets the flag, and no vectored write does.

use std::io::{self, ErrorKind, IoSlice};
use std::os::fd::AsFd;

use rustix::io::retry_on_intr;
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};

use crate::handshake::{GREETING_BYTES, HandshakeEnd};

/// Sends the concatenated slices with one system call. Returns the number of bytes that it accepted.
///
/// # Errors
/// Those of `sendmsg`. A closed peer is [`ErrorKind::BrokenPipe`], without a signal.
pub fn send(socket: impl AsFd, slices: &[IoSlice<'_>]) -> io::Result<usize> {
    let mut control = SendAncillaryBuffer::default();
    Ok(retry_on_intr(|| sendmsg(&socket, slices, &mut control, SendFlags::NOSIGNAL))?)
}

/// Sends all bytes to a blocking socket.
///
/// # Errors
/// Those of [`send`]; [`ErrorKind::WriteZero`] if the socket accepts no more bytes.
pub fn send_all(socket: impl AsFd, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match send(&socket, &[IoSlice::new(bytes)]) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(sent) => bytes = &bytes[sent..],
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Returns true if a call on a non-blocking socket has to be repeated later.
pub fn would_block(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

/// Sends or receives bytes of a handshake once. Returns false if the socket would block.
///
/// # Errors
/// Those of the socket and of the handshake; [`ErrorKind::UnexpectedEof`] if the peer closed the connection.
pub fn advance(socket: impl AsFd, end: &mut impl HandshakeEnd) -> io::Result<bool> {
    let moved = if end.output().is_empty() {
        let bytes = &mut [0; GREETING_BYTES][..end.missing()];
        match retry_on_intr(|| rustix::io::read(&socket, &mut *bytes)) {
            Ok(0) => Err(ErrorKind::UnexpectedEof.into()),
            Ok(received) => end.input(&bytes[..received]),
            Err(error) => Err(error.into()),
        }
    } else {
        send(&socket, &[IoSlice::new(end.output())]).map(|bytes| end.sent(bytes))
    };
    match moved {
        Err(error) if would_block(&error) => Ok(false),
        moved => moved.map(|()| true),
    }
}

/// Moves the bytes of a handshake. Returns true if it needs no more bytes for now, and false if the socket would
/// block.
///
/// # Errors
/// Those of [`advance`].
pub fn exchange(socket: impl AsFd, end: &mut impl HandshakeEnd) -> io::Result<bool> {
    while !end.output().is_empty() || end.missing() > 0 {
        if !advance(&socket, end)? {
            return Ok(false);
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::fuzzing::raises_sigpipe;

    #[test]
    fn write_to_a_closed_peer_returns_an_error_without_a_signal() {
        let raised = raises_sigpipe(|| {
            let (ours, theirs) = UnixStream::pair().unwrap();
            drop(theirs);
            assert_eq!(send_all(&ours, b"k").unwrap_err().kind(), ErrorKind::BrokenPipe);
        });
        assert!(!raised);
    }
}
