//! Connecting end of a handshake.

use std::io::{self, ErrorKind};
use std::sync::Arc;

use super::{
    ACCEPTED, CLOSED, Greeting, HEADER_BYTES, HandshakeEnd, INITIATOR, NONCE_BYTES, PROOF_BYTES, Party,
    Purpose, REJECTED, REPLY_BYTES, RESPONDER, append, check_header, surplus, unauthenticated,
};
use crate::token::{Keys, Token};

/// Handshake of the process that opened the connection.
pub struct Initiator {
    token: Arc<Token>,
    greeting: Vec<u8>,
    reply: Vec<u8>,
    /// Empty until the responder has proved that it has the token.
    proof: Vec<u8>,
    /// Bytes of the greeting, or of the proof once it exists, that were sent.
    sent: usize,
    awaits_verdict: bool,
}

impl Initiator {
    /// Starts the handshake of a connection between these ends.
    ///
    /// # Errors
    /// The kernel returns no random bytes.
    pub fn new(token: &Arc<Token>, purpose: Purpose, from: Party, to: Party) -> io::Result<Self> {
        let greeting = Greeting { purpose, from, to, token: token.id() }.encode()?;
        let (token, reply, proof) = (token.clone(), Vec::new(), Vec::new());
        Ok(Self { token, greeting, reply, proof, sent: 0, awaits_verdict: purpose.has_verdict() })
    }

    /// Returns true if bytes were sent, so that the peer's host has accepted the connection.
    pub fn has_sent(&self) -> bool {
        self.sent > 0 || !self.proof.is_empty()
    }

    /// Returns true if the next byte to send is the first one of a message.
    pub fn begins_message(&self) -> bool {
        self.sent == 0
    }

    /// Returns true if the whole proof is sent, so that the responder may use the connection at any time.
    pub fn proof_sent(&self) -> bool {
        self.sent == PROOF_BYTES && self.sent == self.proof.len()
    }

    /// Returns true if both ends are authenticated and the responder has accepted the connection.
    pub fn is_complete(&self) -> bool {
        self.proof_sent() && !self.awaits_verdict
    }

    /// Returns the connection's keys once the responder is authenticated.
    pub fn keys(&self) -> Option<Keys> {
        let nonce = self.reply.get(HEADER_BYTES..HEADER_BYTES + NONCE_BYTES)?;
        (!self.proof.is_empty()).then(|| self.token.keys(&self.greeting, nonce))
    }
}

impl HandshakeEnd for Initiator {
    fn output(&self) -> &[u8] {
        let message = if self.proof.is_empty() { &self.greeting } else { &self.proof };
        &message[self.sent..]
    }

    fn sent(&mut self, bytes: usize) {
        self.sent += bytes;
    }

    fn missing(&self) -> usize {
        if self.proof.is_empty() { REPLY_BYTES - self.reply.len() } else { self.awaits_verdict.into() }
    }

    fn input(&mut self, bytes: &[u8]) -> io::Result<()> {
        match bytes {
            _ if self.proof.is_empty() => {
                append(&mut self.reply, bytes, REPLY_BYTES)?;
                check_header(&self.reply)?;
                if self.reply.len() == REPLY_BYTES {
                    let (nonce, mac) = self.reply[HEADER_BYTES..].split_at(NONCE_BYTES);
                    if !self.token.verifies(&[RESPONDER, &self.greeting, nonce], mac) {
                        return Err(unauthenticated("the other end does not have this group's token"));
                    }
                    self.proof = self.token.tag(&[INITIATOR, &self.greeting, nonce]).to_vec();
                    self.sent = 0;
                }
                Ok(())
            }
            _ if !self.awaits_verdict => Err(surplus()),
            [ACCEPTED] => {
                self.awaits_verdict = false;
                Ok(())
            }
            [CLOSED] => {
                Err(io::Error::new(ErrorKind::ConnectionAborted, "it has closed its end of the group"))
            }
            [REJECTED] => Err(io::Error::other("it already has a connection of this rank")),
            _ => Err(ErrorKind::InvalidData.into()),
        }
    }
}

/// Returns true for the error of the verdict [`CLOSED`].
pub fn is_closed(error: &io::Error) -> bool {
    error.kind() == ErrorKind::ConnectionAborted && error.raw_os_error().is_none()
}
