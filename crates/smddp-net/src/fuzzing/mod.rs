//! Fuzz targets, and the peer of a handshake, for tests.

use std::io::Write;
use std::mem::MaybeUninit;
use std::net::TcpStream;
use std::sync::{Arc, OnceLock};

use crate::Token;
use crate::frame::{Frame, HEADER};
use crate::handshake::{ACCEPTED, HandshakeEnd, Listener, Responder};
use crate::socket_io::exchange;

mod script;

pub use crate::handshake::fuzzing::both_ends;
pub use script::Script;

/// Decodes a frame header.
pub fn frame(bytes: &[u8]) {
    let Some(header) = bytes.first_chunk::<HEADER>() else { return };
    if let Some(frame) = Frame::decode(header) {
        assert_eq!(Frame::decode(&frame.encode()), Some(frame));
        let _ = (frame.class(), frame.announces());
    }
}

/// Returns the token of test groups that have only addresses.
pub fn known_token() -> Arc<Token> {
    static TOKEN: OnceLock<Arc<Token>> = OnceLock::new();
    TOKEN.get_or_init(|| Arc::new(Token::random().unwrap_or_else(|error| panic!("{error}")))).clone()
}

/// Returns the reply of a listener with that token to a greeting; `None` if the greeting is malformed.
pub fn responder_reply(listener: Listener, greeting: &[u8], token: &Arc<Token>) -> Option<Vec<u8>> {
    let mut responder = Responder::new(listener);
    responder.input(greeting).ok()?;
    responder.greeting()?;
    responder.answer(token.clone()).unwrap_or_else(|error| panic!("{error}"));
    Some(responder.output().to_vec())
}

/// Accepts a connection as a listener and authenticates the peer.
pub fn accept_peer(stream: TcpStream) -> TcpStream {
    let mut stream = accept_proof(stream);
    stream.write_all(&[ACCEPTED]).unwrap_or_else(|error| panic!("{error}"));
    stream
}

/// Receives a peer's greeting and proof, without confirming them.
pub fn accept_proof(stream: TcpStream) -> TcpStream {
    let mut responder = Responder::new(Listener::Groups);
    let received = exchange(&stream, &mut responder)
        .and_then(|_| responder.answer(known_token()))
        .and_then(|()| exchange(&stream, &mut responder));
    received.unwrap_or_else(|error| panic!("{error}"));
    stream
}

/// Returns true if `writes` raises SIGPIPE. Runs it in a separate thread that blocks the signal.
pub fn raises_sigpipe(writes: impl FnOnce() + Send) -> bool {
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
    std::thread::scope(|scope| scope.spawn(work).join().unwrap_or_else(|_| panic!("the thread panicked")))
}
