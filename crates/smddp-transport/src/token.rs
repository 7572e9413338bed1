//! The secret of a group's ranks, and how the two ends of a connection show each other that they have it.
//!
//! ```text
//! caller    -> listener   words: who calls, whom, what for; a nonce
//! listener  -> caller     magic, version, its own nonce, a MAC over label, words and nonce
//! caller    -> listener   a MAC over another label, the same words and the same nonce
//! ```
//!
//! Each MAC is HMAC-SHA-256 under the token. What was recorded once is refused, as the other end's nonce is new each time;
//! what was said to one listener, in one direction or for one purpose holds for no other, as the words name them.

use std::io;
use std::sync::Arc;

use hmac::{Hmac, KeyInit, Mac};
use serde::{Deserialize, Serialize};
use sha2::Sha256;

/// Changes with every change of the shared layout, of the first words of a connection or of what they lead to.
pub const PROTOCOL: u32 = 10;
/// Bytes of a nonce, which follows the initiator's hello.
pub(crate) const NONCE: usize = 32;
/// What a listener answers: magic, version, nonce, MAC.
pub(crate) const REPLY: usize = 12 + NONCE + 32;
/// What a caller answers to that.
pub(crate) const PROOF: usize = 32;
/// Bytes of a message authentication code.
pub(crate) const TAG: usize = 32;

/// Shared by the ranks of one group, and by nobody else. It travels through the group's store alone.
#[derive(Clone, Serialize, Deserialize)]
pub struct Token([u8; 32]);

impl std::fmt::Debug for Token {
    /// It stays out of every log.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token(..)")
    }
}

/// Bytes that nobody can guess; unlike a number that need only be unlike others, they are worth an error.
fn unguessable() -> io::Result<[u8; 32]> {
    let mut bytes = [0; 32];
    let flags = rustix::rand::GetRandomFlags::empty();
    let got = rustix::io::retry_on_intr(|| rustix::rand::getrandom(&mut bytes, flags))?;
    match got == bytes.len() {
        true => Ok(bytes),
        false => Err(io::Error::other("the system's generator gave too few random bytes")),
    }
}

impl Token {
    pub(crate) fn random() -> io::Result<Self> {
        unguessable().map(Self)
    }

    /// Of what the store says and a secret that it does not know: nobody who lacks either has this one.
    pub(crate) fn with(&self, secret: &[u8]) -> Self {
        Self(self.mac(&[b"smddp job token", secret]).finalize().into_bytes().into())
    }

    /// The key for address records of ranks that share that job secret. It does not depend on anything in the store.
    pub(crate) fn from_secret(secret: &[u8]) -> Self {
        Self([0; 32]).with(secret)
    }

    /// Names it without giving it away.
    pub(crate) fn id(&self) -> [u8; 16] {
        let mut id = [0; 16];
        id.copy_from_slice(&self.mac(&[b"smddp name"]).finalize().into_bytes()[..16]);
        id
    }

    /// The authentication code of these parts; the first one is a label for their purpose.
    pub(crate) fn tag(&self, parts: &[&[u8]]) -> [u8; TAG] {
        self.mac(parts).finalize().into_bytes().into()
    }

    /// Checks such a code in constant time.
    pub(crate) fn verifies(&self, parts: &[&[u8]], tag: &[u8]) -> bool {
        self.mac(parts).verify_slice(tag).is_ok()
    }

    /// Over all parts, each with its length: no two lists of parts are the same bytes.
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

/// The secret of one direction of a connection: it encrypts tcp frames, or authenticates messages of the bootstrap.
#[derive(Clone)]
pub(crate) struct Key(Token);

impl Key {
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0.0
    }

    /// The authentication code of message `number` in this direction.
    pub(crate) fn tag(&self, number: u64, message: &[u8]) -> [u8; TAG] {
        self.0.tag(&[b"smddp message", &number.to_le_bytes(), message])
    }

    pub(crate) fn verifies(&self, number: u64, message: &[u8], tag: &[u8]) -> bool {
        self.0.verifies(&[b"smddp message", &number.to_le_bytes(), message], tag)
    }

    /// Another one, of which this one cannot be found out.
    pub(crate) fn next(&self) -> Self {
        Self(Token(self.0.tag(&[b"smddp next key"])))
    }
}

/// Of one connection alone, as both ends' nonces are in them.
#[derive(Clone)]
pub(crate) struct Keys {
    pub(crate) initiator: Key,
    pub(crate) responder: Key,
}

/// A caller's end of a handshake.
pub(crate) struct Initiator {
    token: Arc<Token>,
    greeting: Vec<u8>,
}

impl Initiator {
    /// `hello` begins with eight bytes of magic.
    pub(crate) fn new(token: &Arc<Token>, hello: &[u8]) -> io::Result<Self> {
        Ok(Self { token: token.clone(), greeting: [hello, &unguessable()?].concat() })
    }

    /// What the caller says first.
    pub(crate) fn greeting(&self) -> &[u8] {
        &self.greeting
    }

    /// Why this is the beginning of no answer, if so: whoever speaks something else may not say all of one.
    pub(crate) fn check_reply_prefix(&self, reply: &[u8]) -> io::Result<()> {
        let Some(head) = reply.first_chunk::<12>() else { return Ok(()) };
        if head[..8] != self.greeting[..8] {
            return Err(refused("the other end does not speak smddp"));
        }
        let version = u32::from_le_bytes([head[8], head[9], head[10], head[11]]);
        match version == PROTOCOL {
            true => Ok(()),
            false => Err(refused(&format!("protocol version {PROTOCOL} here, {version} there"))),
        }
    }

    /// What the caller says to the listener's answer, if that is one of somebody who has the token.
    pub(crate) fn prove(&self, reply: &[u8; REPLY]) -> io::Result<[u8; PROOF]> {
        self.check_reply_prefix(reply)?;
        let (nonce, mac) = reply[12..].split_at(NONCE);
        if self.token.responder_mac(&self.greeting, nonce).verify_slice(mac).is_err() {
            return Err(refused("the other end does not know this group's token"));
        }
        Ok(self.token.initiator_mac(&self.greeting, nonce).finalize().into_bytes().into())
    }

    /// After that answer, which was proved.
    pub(crate) fn keys(&self, reply: &[u8; REPLY]) -> Keys {
        self.token.keys(&self.greeting, &reply[12..12 + NONCE])
    }
}

/// A listener's end of it.
pub(crate) struct Responder {
    token: Arc<Token>,
    greeting: Vec<u8>,
    nonce: [u8; NONCE],
}

impl Responder {
    /// For a caller that said these words; with the answer to them.
    pub(crate) fn new(token: Arc<Token>, greeting: Vec<u8>) -> io::Result<(Self, [u8; REPLY])> {
        let challenge = Self { token, greeting, nonce: unguessable()? };
        let mut reply = [0; REPLY];
        reply[..8].copy_from_slice(&challenge.greeting[..8]);
        reply[8..12].copy_from_slice(&PROTOCOL.to_le_bytes());
        reply[12..12 + NONCE].copy_from_slice(&challenge.nonce);
        let mac = challenge.token.responder_mac(&challenge.greeting, &challenge.nonce);
        reply[12 + NONCE..].copy_from_slice(&mac.finalize().into_bytes());
        Ok((challenge, reply))
    }

    pub(crate) fn greeting(&self) -> &[u8] {
        &self.greeting
    }

    pub(crate) fn keys(&self) -> Keys {
        self.token.keys(&self.greeting, &self.nonce)
    }

    /// Whether that is what a caller with the token says.
    pub(crate) fn verifies_proof(&self, proof: &[u8]) -> bool {
        self.token.initiator_mac(&self.greeting, &self.nonce).verify_slice(proof).is_ok()
    }
}

/// No reason to try again.
fn refused(reason: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, reason)
}

/// Whether a handshake failed because of who is at the other end.
pub(crate) fn is_unauthenticated(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::InvalidData
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token() -> Arc<Token> {
        Arc::new(Token::random().unwrap())
    }

    /// Both ends, up to the caller's proof.
    fn meet(caller: &Arc<Token>, listener: &Arc<Token>) -> io::Result<bool> {
        let claim = Initiator::new(caller, b"smddp-tthe words")?;
        let (challenge, reply) = Responder::new(listener.clone(), claim.greeting().to_vec())?;
        Ok(challenge.verifies_proof(&claim.prove(&reply)?))
    }

    #[test]
    fn ends_with_one_token_meet_and_others_do_not() {
        let (ours, theirs) = (token(), token());
        assert!(meet(&ours, &ours).unwrap());
        assert!(is_unauthenticated(&meet(&ours, &theirs).unwrap_err()));
        assert_ne!(ours.id(), theirs.id());
        // Both halves count.
        let mixed = Arc::new(ours.with(b"a secret of the job's"));
        assert!(is_unauthenticated(&meet(&ours, &mixed).unwrap_err()));
        assert!(is_unauthenticated(&meet(&Arc::new(ours.with(b"another")), &mixed).unwrap_err()));
    }

    #[test]
    fn what_was_recorded_opens_nothing() {
        let token = token();
        let claim = Initiator::new(&token, b"smddp-tthe words").unwrap();
        let (first, reply) = Responder::new(token.clone(), claim.greeting().to_vec()).unwrap();
        let proof = claim.prove(&reply).unwrap();
        assert!(first.verifies_proof(&proof));
        // The same words again: another nonce, so the proof of then is none now, nor is the listener's own answer.
        let (again, other) = Responder::new(token.clone(), claim.greeting().to_vec()).unwrap();
        assert!(!again.verifies_proof(&proof) && !again.verifies_proof(&reply[REPLY - 32..]));
        assert!(!again.verifies_proof(&other[REPLY - 32..]));
        // And a caller takes no answer that was given to other words.
        let next = Initiator::new(&token, b"smddp-tthe words").unwrap();
        assert!(is_unauthenticated(&next.prove(&reply).unwrap_err()));
    }

    #[test]
    fn every_byte_of_words_answer_and_proof_counts() {
        let token = token();
        let claim = Initiator::new(&token, b"smddp-tthe words").unwrap();
        for at in 0..claim.greeting().len() {
            let mut words = claim.greeting().to_vec();
            words[at] ^= 1;
            let (_, reply) = Responder::new(token.clone(), words).unwrap();
            assert!(claim.prove(&reply).is_err(), "byte {at} of the words");
        }
        let (challenge, reply) = Responder::new(token.clone(), claim.greeting().to_vec()).unwrap();
        for at in 0..REPLY {
            let mut reply = reply;
            reply[at] ^= 1;
            assert!(claim.prove(&reply).is_err(), "byte {at} of the answer");
        }
        let proof = claim.prove(&reply).unwrap();
        for at in 0..PROOF {
            let mut proof = proof;
            proof[at] ^= 1;
            assert!(!challenge.verifies_proof(&proof), "byte {at} of the proof");
        }
        assert!(!challenge.verifies_proof(&proof[..31]) && !challenge.verifies_proof(&[]));
        assert_eq!(format!("{token:?}"), "Token(..)");
    }
}
