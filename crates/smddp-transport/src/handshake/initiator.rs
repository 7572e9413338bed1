//! Connecting end of a handshake.

use std::io::{self, ErrorKind};
use std::sync::Arc;

use super::{
    GREETING_BYTES, Greeting, HEADER_BYTES, HandshakeEnd, INITIATOR, NONCE_BYTES, PROOF_BYTES, Party,
    Purpose, REPLY_BYTES, RESPONDER, Verdict, append, check_header, unauthenticated,
};
use crate::token::{Keys, Token, random_secret};

pub(crate) struct Initiator {
    token: Arc<Token>,
    greeting: [u8; GREETING_BYTES],
    reply: [u8; REPLY_BYTES],
    /// Bytes of the reply that were received.
    received: usize,
    /// Present once the responder has proved that it has the token.
    proof: Option<[u8; PROOF_BYTES]>,
    /// Bytes of the greeting, or of the proof once it is present, that were sent.
    sent: usize,
    /// A verdict must follow the proof.
    awaits_verdict: bool,
}

impl Initiator {
    /// Starts the handshake of a connection between these ends.
    pub(crate) fn new(token: &Arc<Token>, purpose: Purpose, from: Party, to: Party) -> io::Result<Self> {
        let greeting = Greeting { purpose, from, to, token: token.id() };
        Ok(Self {
            token: token.clone(),
            greeting: greeting.encode(&random_secret()?),
            reply: [0; REPLY_BYTES],
            received: 0,
            proof: None,
            sent: 0,
            awaits_verdict: purpose.has_verdict(),
        })
    }

    /// Returns true if bytes were sent, so that the peer's host has accepted the connection.
    pub(crate) fn has_sent(&self) -> bool {
        self.sent > 0 || self.proof.is_some()
    }

    /// Returns true if the next byte to send is the first one of a message.
    pub(crate) fn begins_message(&self) -> bool {
        self.sent == 0
    }

    /// Returns true if the whole proof is sent, so that the responder may use the connection at any time.
    pub(crate) fn proof_sent(&self) -> bool {
        self.proof.is_some() && self.sent == PROOF_BYTES
    }

    /// Returns true if both ends are authenticated and the responder has accepted the connection.
    pub(crate) fn is_complete(&self) -> bool {
        self.proof_sent() && !self.awaits_verdict
    }

    /// Returns the connection's keys once the responder is authenticated.
    pub(crate) fn keys(&self) -> Option<Keys> {
        let nonce = &self.reply[HEADER_BYTES..HEADER_BYTES + NONCE_BYTES];
        self.proof.is_some().then(|| self.token.keys(&self.greeting, nonce))
    }

    fn take_verdict(&mut self, verdict: u8) -> io::Result<()> {
        let is = |expected: Verdict| verdict == expected as u8;
        if is(Verdict::Closed) {
            return Err(io::Error::new(ErrorKind::ConnectionAborted, "it has closed its end of the group"));
        }
        if is(Verdict::Rejected) {
            return Err(io::Error::other("it already has a connection of this rank"));
        }
        if !is(Verdict::Accepted) {
            return Err(ErrorKind::InvalidData.into());
        }
        self.awaits_verdict = false;
        Ok(())
    }
}

impl HandshakeEnd for Initiator {
    fn output(&self) -> &[u8] {
        let message: &[u8] = self.proof.as_ref().map_or(&self.greeting, |proof| proof);
        &message[self.sent..]
    }

    fn sent(&mut self, bytes: usize) {
        self.sent += bytes;
    }

    fn missing(&self) -> usize {
        match self.proof {
            None => REPLY_BYTES - self.received,
            Some(_) => usize::from(self.awaits_verdict),
        }
    }

    fn input(&mut self, bytes: &[u8]) -> io::Result<()> {
        if self.proof.is_some() {
            return match (bytes, self.awaits_verdict) {
                ([verdict], true) => self.take_verdict(*verdict),
                _ => Err(unauthenticated("it sent more bytes than the handshake has")),
            };
        }
        append(&mut self.reply, &mut self.received, bytes)?;
        check_header(&self.reply[..self.received])?;
        if self.received == REPLY_BYTES {
            let (nonce, mac) = self.reply[HEADER_BYTES..].split_at(NONCE_BYTES);
            if !self.token.verifies(&[RESPONDER, &self.greeting, nonce], mac) {
                return Err(unauthenticated("the other end does not have this group's token"));
            }
            self.proof = Some(self.token.tag(&[INITIATOR, &self.greeting, nonce]));
            self.sent = 0;
        }
        Ok(())
    }
}

/// Returns true for the error of [`Verdict::Closed`].
pub(crate) fn is_closed(error: &io::Error) -> bool {
    error.kind() == ErrorKind::ConnectionAborted && error.raw_os_error().is_none()
}
