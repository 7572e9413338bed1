//! Accepting end of a handshake.

use std::io;
use std::sync::Arc;

use super::{
    GREETING_BYTES, Greeting, HandshakeEnd, INITIATOR, Listener, PROOF_BYTES, RESPONDER, append,
    check_header, header, unauthenticated,
};
use crate::token::{Keys, Token, random_secret};

/// Handshake of the process that accepted the connection.
pub struct Responder {
    listener: Listener,
    greeting: Vec<u8>,
    reply: Vec<u8>,
    /// Bytes of the reply that were sent.
    sent: usize,
    /// Token that the initiator has to prove, and the nonce for its proof, once the greeting was answered.
    challenge: Option<(Arc<Token>, [u8; 32])>,
    proof: Vec<u8>,
    authenticated: bool,
}

impl Responder {
    /// Waits for a greeting with a purpose of that listener.
    pub fn new(listener: Listener) -> Self {
        let (greeting, reply, proof) = (Vec::new(), Vec::new(), Vec::new());
        Self { listener, greeting, reply, sent: 0, challenge: None, proof, authenticated: false }
    }

    /// Returns the greeting once it is complete. It is not authenticated before [`Responder::is_authenticated`].
    pub fn greeting(&self) -> Option<Greeting> {
        Greeting::decode(&self.greeting)
    }

    /// Answers a complete greeting. `token`: token that the initiator has to prove.
    ///
    /// # Errors
    /// The kernel returns no random bytes.
    pub fn answer(&mut self, token: Arc<Token>) -> io::Result<()> {
        let nonce = random_secret()?;
        let mac = token.tag(&[RESPONDER, &self.greeting, &nonce]);
        self.reply = [&header()[..], &nonce, &mac].concat();
        self.challenge = Some((token, nonce));
        Ok(())
    }

    /// Returns true if the initiator has proved that it has the token.
    pub fn is_authenticated(&self) -> bool {
        self.authenticated
    }

    /// Returns the connection's keys once the initiator is authenticated.
    pub fn keys(&self) -> Option<Keys> {
        let (token, nonce) = self.challenge.as_ref().filter(|_| self.authenticated)?;
        Some(token.keys(&self.greeting, nonce))
    }
}

impl HandshakeEnd for Responder {
    fn output(&self) -> &[u8] {
        &self.reply[self.sent..]
    }

    fn sent(&mut self, bytes: usize) {
        self.sent += bytes;
    }

    fn missing(&self) -> usize {
        let proof = if self.challenge.is_some() { PROOF_BYTES - self.proof.len() } else { 0 };
        GREETING_BYTES - self.greeting.len() + proof
    }

    fn input(&mut self, bytes: &[u8]) -> io::Result<()> {
        let Some((token, nonce)) = &self.challenge else {
            append(&mut self.greeting, bytes, GREETING_BYTES)?;
            check_header(&self.greeting)?;
            let serves = self.greeting().is_some_and(|greeting| greeting.purpose.listener() == self.listener);
            return match self.greeting.len() < GREETING_BYTES || serves {
                true => Ok(()),
                false => Err(unauthenticated("this socket does not serve the purpose of the connection")),
            };
        };
        append(&mut self.proof, bytes, PROOF_BYTES)?;
        if self.proof.len() == PROOF_BYTES {
            if !token.verifies(&[INITIATOR, &self.greeting, nonce], &self.proof) {
                return Err(unauthenticated("it does not have this group's token"));
            }
            self.authenticated = true;
        }
        Ok(())
    }
}
