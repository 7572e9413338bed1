//! Secret of a group's ranks, and the handshake in which both ends of a connection prove that they have it.
//!
//! ```text
//! initiator -> responder   greeting: hello (names both ends and the purpose), nonce
//! responder -> initiator   reply: magic, version, its own nonce, MAC over a label, the greeting and that nonce
//! initiator -> responder   proof: MAC over another label, the greeting and the responder's nonce
//! ```
//!
//! Each MAC is HMAC-SHA-256 under the token. A replayed handshake fails, because each end uses a new nonce. A handshake
//! is valid for one listener, direction and purpose only, because the greeting names them.

use std::io;
use std::sync::Arc;

use hmac::{Hmac, KeyInit, Mac};
use serde::{Deserialize, Serialize};
use sha2::Sha256;

/// Protocol version. Increase it with every change of the shared layout, the handshake or the bytes after the
/// handshake.
pub const PROTOCOL: u32 = 10;
/// Size of a nonce, in bytes. In the greeting the nonce follows the initiator's hello.
pub(crate) const NONCE: usize = 32;
/// Size of the responder's reply, in bytes: magic, version, nonce, MAC.
pub(crate) const REPLY: usize = 12 + NONCE + 32;
/// Size of the initiator's proof, in bytes.
pub(crate) const PROOF: usize = 32;
/// Size of a message authentication code, in bytes.
pub(crate) const TAG: usize = 32;

/// Secret that the ranks of one group share. Only the group's store carries it.
#[derive(Clone, Serialize, Deserialize)]
pub struct Token([u8; 32]);

impl std::fmt::Debug for Token {
    /// Omits the secret, which must not appear in a log.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token(..)")
    }
}

/// Returns cryptographically secure random bytes. Unlike a random id, a secret has no fallback if the generator fails.
fn random_secret() -> io::Result<[u8; 32]> {
    let mut bytes = [0; 32];
    let flags = rustix::rand::GetRandomFlags::empty();
    let got = rustix::io::retry_on_intr(|| rustix::rand::getrandom(&mut bytes, flags))?;
    match got == bytes.len() {
        true => Ok(bytes),
        false => Err(io::Error::other("the system's random number generator returned too few bytes")),
    }
}

impl Token {
    pub(crate) fn random() -> io::Result<Self> {
        random_secret().map(Self)
    }

    /// Derives a token from this one, which the store carries, and a secret that the store does not have. A process
    /// needs both.
    pub(crate) fn with(&self, secret: &[u8]) -> Self {
        Self(self.mac(&[b"smddp job token", secret]).finalize().into_bytes().into())
    }

    /// Returns the key for address records of ranks that share the job secret. It does not depend on the store's
    /// contents.
    pub(crate) fn from_secret(secret: &[u8]) -> Self {
        Self([0; 32]).with(secret)
    }

    /// Returns a public id of the token, which does not reveal it.
    pub(crate) fn id(&self) -> [u8; 16] {
        let mut id = [0; 16];
        id.copy_from_slice(&self.mac(&[b"smddp name"]).finalize().into_bytes()[..16]);
        id
    }

    /// Returns the authentication code of the parts. The first part is a label for their purpose.
    pub(crate) fn tag(&self, parts: &[&[u8]]) -> [u8; TAG] {
        self.mac(parts).finalize().into_bytes().into()
    }

    /// Verifies such a code in constant time.
    pub(crate) fn verifies(&self, parts: &[&[u8]], tag: &[u8]) -> bool {
        self.mac(parts).verify_slice(tag).is_ok()
    }

    /// Starts a MAC over all parts, each with its length, so that different lists of parts are different input bytes.
    fn mac(&self, parts: &[&[u8]]) -> Hmac<Sha256> {
        let mut block = [0; 64];
        block[..32].copy_from_slice(&self.0);
        let mut mac = Hmac::<Sha256>::new((&block).into());
        for part in parts {
            mac.update(&(part.len() as u64).to_le_bytes());
            mac.update(part);
        }
        mac
    }

    fn responder_mac(&self, greeting: &[u8], nonce: &[u8]) -> Hmac<Sha256> {
        self.mac(&[b"smddp listener", greeting, nonce])
    }

    fn initiator_mac(&self, greeting: &[u8], nonce: &[u8]) -> Hmac<Sha256> {
        self.mac(&[b"smddp caller", greeting, nonce])
    }

    fn keys(&self, greeting: &[u8], nonce: &[u8]) -> Keys {
        let key = |label: &[u8]| Key(Self(self.tag(&[label, greeting, nonce])));
        Keys { initiator: key(b"smddp caller's key"), responder: key(b"smddp listener's key") }
    }
}

/// Key of one direction of a connection. It encrypts TCP frames, or authenticates bootstrap messages.
#[derive(Clone)]
pub(crate) struct Key(Token);

impl Key {
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0.0
    }

    /// Returns the authentication code of message `number` in this direction.
    pub(crate) fn tag(&self, number: u64, message: &[u8]) -> [u8; TAG] {
        self.0.tag(&[b"smddp message", &number.to_le_bytes(), message])
    }

    pub(crate) fn verifies(&self, number: u64, message: &[u8], tag: &[u8]) -> bool {
        self.0.verifies(&[b"smddp message", &number.to_le_bytes(), message], tag)
    }

    /// Derives the next key, from which this key cannot be computed.
    pub(crate) fn next(&self) -> Self {
        Self(Token(self.0.tag(&[b"smddp next key"])))
    }
}

/// Keys of one connection, one per direction. Both ends' nonces are part of the derivation.
#[derive(Clone)]
pub(crate) struct Keys {
    pub(crate) initiator: Key,
    pub(crate) responder: Key,
}

/// Initiator's end of a handshake.
pub(crate) struct Initiator {
    token: Arc<Token>,
    greeting: Vec<u8>,
}

impl Initiator {
    /// Starts a handshake. `hello` begins with eight bytes of magic.
    pub(crate) fn new(token: &Arc<Token>, hello: &[u8]) -> io::Result<Self> {
        Ok(Self { token: token.clone(), greeting: [hello, &random_secret()?].concat() })
    }

    /// Returns the first bytes that the initiator sends.
    pub(crate) fn greeting(&self) -> &[u8] {
        &self.greeting
    }

    /// Returns an error if these bytes cannot be the beginning of a reply. A peer with another protocol may send less
    /// than one.
    pub(crate) fn check_reply_prefix(&self, reply: &[u8]) -> io::Result<()> {
        let Some(head) = reply.first_chunk::<12>() else { return Ok(()) };
        if head[..8] != self.greeting[..8] {
            return Err(handshake_error("the other end does not speak smddp"));
        }
        let version = u32::from_le_bytes([head[8], head[9], head[10], head[11]]);
        match version == PROTOCOL {
            true => Ok(()),
            false => Err(handshake_error(&format!("protocol version {PROTOCOL} here, {version} there"))),
        }
    }

    /// Returns the proof that answers the reply, or an error if the responder does not have the token.
    pub(crate) fn prove(&self, reply: &[u8; REPLY]) -> io::Result<[u8; PROOF]> {
        self.check_reply_prefix(reply)?;
        let (nonce, mac) = reply[12..].split_at(NONCE);
        if self.token.responder_mac(&self.greeting, nonce).verify_slice(mac).is_err() {
            return Err(handshake_error("the other end does not have this group's token"));
        }
        Ok(self.token.initiator_mac(&self.greeting, nonce).finalize().into_bytes().into())
    }

    /// Returns the connection's keys after a reply for which `prove` succeeded.
    pub(crate) fn keys(&self, reply: &[u8; REPLY]) -> Keys {
        self.token.keys(&self.greeting, &reply[12..12 + NONCE])
    }
}

/// Responder's end of a handshake.
pub(crate) struct Responder {
    token: Arc<Token>,
    greeting: Vec<u8>,
    nonce: [u8; NONCE],
}

impl Responder {
    /// Answers a greeting. Returns the handshake and the reply.
    pub(crate) fn new(token: Arc<Token>, greeting: Vec<u8>) -> io::Result<(Self, [u8; REPLY])> {
        let responder = Self { token, greeting, nonce: random_secret()? };
        let mut reply = [0; REPLY];
        reply[..8].copy_from_slice(&responder.greeting[..8]);
        reply[8..12].copy_from_slice(&PROTOCOL.to_le_bytes());
        reply[12..12 + NONCE].copy_from_slice(&responder.nonce);
        let mac = responder.token.responder_mac(&responder.greeting, &responder.nonce);
        reply[12 + NONCE..].copy_from_slice(&mac.finalize().into_bytes());
        Ok((responder, reply))
    }

    pub(crate) fn greeting(&self) -> &[u8] {
        &self.greeting
    }

    pub(crate) fn keys(&self) -> Keys {
        self.token.keys(&self.greeting, &self.nonce)
    }

    /// Returns true if the proof shows that the initiator has the token.
    pub(crate) fn verifies_proof(&self, proof: &[u8]) -> bool {
        self.token.initiator_mac(&self.greeting, &self.nonce).verify_slice(proof).is_ok()
    }
}

/// Returns an error after which a retry is pointless.
fn handshake_error(reason: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, reason)
}

/// Returns true if a handshake failed because of the process at the other end.
pub(crate) fn is_unauthenticated(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::InvalidData
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token() -> Arc<Token> {
        Arc::new(Token::random().unwrap())
    }

    /// Runs both ends of a handshake, up to the check of the proof.
    fn shake_hands(initiator_token: &Arc<Token>, responder_token: &Arc<Token>) -> io::Result<bool> {
        let initiator = Initiator::new(initiator_token, b"smddp-tthe words")?;
        let (responder, reply) = Responder::new(responder_token.clone(), initiator.greeting().to_vec())?;
        Ok(responder.verifies_proof(&initiator.prove(&reply)?))
    }

    #[test]
    fn handshake_succeeds_only_between_equal_tokens() {
        let (ours, theirs) = (token(), token());
        assert!(shake_hands(&ours, &ours).unwrap());
        assert!(is_unauthenticated(&shake_hands(&ours, &theirs).unwrap_err()));
        assert_ne!(ours.id(), theirs.id());
        // Both the store's token and the job secret matter.
        let mixed = Arc::new(ours.with(b"a secret of the job's"));
        assert!(is_unauthenticated(&shake_hands(&ours, &mixed).unwrap_err()));
        assert!(is_unauthenticated(&shake_hands(&Arc::new(ours.with(b"another")), &mixed).unwrap_err()));
    }

    #[test]
    fn replayed_handshakes_are_rejected() {
        let token = token();
        let initiator = Initiator::new(&token, b"smddp-tthe words").unwrap();
        let (first, reply) = Responder::new(token.clone(), initiator.greeting().to_vec()).unwrap();
        let proof = initiator.prove(&reply).unwrap();
        assert!(first.verifies_proof(&proof));
        // The same greeting again: the new nonce invalidates the earlier proof and the responder's own MAC.
        let (again, other) = Responder::new(token.clone(), initiator.greeting().to_vec()).unwrap();
        assert!(!again.verifies_proof(&proof) && !again.verifies_proof(&reply[REPLY - 32..]));
        assert!(!again.verifies_proof(&other[REPLY - 32..]));
        // An initiator rejects a reply to another greeting.
        let next = Initiator::new(&token, b"smddp-tthe words").unwrap();
        assert!(is_unauthenticated(&next.prove(&reply).unwrap_err()));
    }

    #[test]
    fn changing_any_byte_of_greeting_reply_or_proof_fails_the_handshake() {
        let token = token();
        let initiator = Initiator::new(&token, b"smddp-tthe words").unwrap();
        for at in 0..initiator.greeting().len() {
            let mut greeting = initiator.greeting().to_vec();
            greeting[at] ^= 1;
            let (_, reply) = Responder::new(token.clone(), greeting).unwrap();
            assert!(initiator.prove(&reply).is_err(), "byte {at} of the greeting");
        }
        let (responder, reply) = Responder::new(token.clone(), initiator.greeting().to_vec()).unwrap();
        for at in 0..REPLY {
            let mut reply = reply;
            reply[at] ^= 1;
            assert!(initiator.prove(&reply).is_err(), "byte {at} of the reply");
        }
        let proof = initiator.prove(&reply).unwrap();
        for at in 0..PROOF {
            let mut proof = proof;
            proof[at] ^= 1;
            assert!(!responder.verifies_proof(&proof), "byte {at} of the proof");
        }
        assert!(!responder.verifies_proof(&proof[..31]) && !responder.verifies_proof(&[]));
        assert_eq!(format!("{token:?}"), "Token(..)");
    }
}
