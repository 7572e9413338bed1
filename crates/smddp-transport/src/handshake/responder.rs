//! Accepting end of a handshake.

use std::io;
use std::sync::Arc;

use super::{
    GREETING_BYTES, Greeting, HEADER_BYTES, HandshakeEnd, INITIATOR, Listener, MAGIC, NONCE_BYTES,
    PROOF_BYTES, PROTOCOL, REPLY_BYTES, RESPONDER, append, check_header, purpose_of, unauthenticated,
};
use crate::token::{Keys, Token, random_secret};

pub(crate) struct Responder {
    listener: Listener,
    greeting: [u8; GREETING_BYTES],
    /// Bytes of the greeting, or of the proof once there is a reply, that were received.
    received: usize,
    reply: Option<Reply>,
    authenticated: bool,
}

struct Reply {
    token: Arc<Token>,
    nonce: [u8; NONCE_BYTES],
    bytes: [u8; REPLY_BYTES],
    /// Bytes of the reply that were sent.
    sent: usize,
    proof: [u8; PROOF_BYTES],
}

impl Responder {
    /// Waits for a greeting with a purpose of that listener.
    pub(crate) fn new(listener: Listener) -> Self {
        Self { listener, greeting: [0; GREETING_BYTES], received: 0, reply: None, authenticated: false }
    }

    /// Returns the greeting once it is complete. It is not authenticated before [`Responder::is_authenticated`].
    pub(crate) fn greeting(&self) -> Option<Greeting> {
        let complete = self.reply.is_some() || self.received == GREETING_BYTES;
        complete.then(|| Greeting::decode(&self.greeting)).flatten()
    }

    /// Answers a complete greeting. `token`: token that the initiator has to prove.
    pub(crate) fn answer(&mut self, token: Arc<Token>) -> io::Result<()> {
        let nonce = random_secret()?;
        let mac = token.tag(&[RESPONDER, &self.greeting, &nonce]);
        let mut bytes = [0; REPLY_BYTES];
        bytes[..MAGIC.len()].copy_from_slice(MAGIC);
        bytes[MAGIC.len()..HEADER_BYTES].copy_from_slice(&PROTOCOL.to_le_bytes());
        bytes[HEADER_BYTES..HEADER_BYTES + NONCE_BYTES].copy_from_slice(&nonce);
        bytes[HEADER_BYTES + NONCE_BYTES..].copy_from_slice(&mac);
        self.reply = Some(Reply { token, nonce, bytes, sent: 0, proof: [0; PROOF_BYTES] });
        self.received = 0;
        Ok(())
    }

    /// Returns true if the initiator has proved that it has the token.
    pub(crate) fn is_authenticated(&self) -> bool {
        self.authenticated
    }

    /// Returns the connection's keys once the initiator is authenticated.
    pub(crate) fn keys(&self) -> Option<Keys> {
        let reply = self.reply.as_ref().filter(|_| self.authenticated)?;
        Some(reply.token.keys(&self.greeting, &reply.nonce))
    }
}

impl HandshakeEnd for Responder {
    fn output(&self) -> &[u8] {
        self.reply.as_ref().map_or(&[], |reply| &reply.bytes[reply.sent..])
    }

    fn sent(&mut self, bytes: usize) {
        if let Some(reply) = &mut self.reply {
            reply.sent += bytes;
        }
    }

    fn missing(&self) -> usize {
        match self.reply {
            None => GREETING_BYTES - self.received,
            Some(_) => PROOF_BYTES - self.received,
        }
    }

    fn input(&mut self, bytes: &[u8]) -> io::Result<()> {
        let Some(reply) = &mut self.reply else {
            append(&mut self.greeting, &mut self.received, bytes)?;
            let greeting = &self.greeting[..self.received];
            check_header(greeting)?;
            let begins = greeting.len() >= HEADER_BYTES + 12;
            return match begins
                && purpose_of(greeting).is_none_or(|purpose| purpose.listener() != self.listener)
            {
                true => Err(unauthenticated("this socket does not serve the purpose of the connection")),
                false => Ok(()),
            };
        };
        append(&mut reply.proof, &mut self.received, bytes)?;
        if self.received == PROOF_BYTES {
            if !reply.token.verifies(&[INITIATOR, &self.greeting, &reply.nonce], &reply.proof) {
                return Err(unauthenticated("it does not have this group's token"));
            }
            self.authenticated = true;
        }
        Ok(())
    }
}
