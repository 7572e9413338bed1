//! Secret of a group's ranks, and the codes and keys that are derived from it.

use std::io;

use hmac::{Hmac, KeyInit, Mac};
use serde::{Deserialize, Serialize};
use sha2::Sha256;

/// Size of a message authentication code, in bytes.
pub const TAG: usize = 32;

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
///
/// # Errors
/// `getrandom` fails, or returns too few bytes.
pub fn random_secret() -> io::Result<[u8; 32]> {
    let mut bytes = [0; 32];
    let flags = rustix::rand::GetRandomFlags::empty();
    let got = rustix::io::retry_on_intr(|| rustix::rand::getrandom(&mut bytes, flags))?;
    match got == bytes.len() {
        true => Ok(bytes),
        false => Err(io::Error::other("the system's random number generator returned too few bytes")),
    }
}

impl Token {
    /// Returns a new token.
    ///
    /// # Errors
    /// See [`random_secret`].
    pub fn random() -> io::Result<Self> {
        random_secret().map(Self)
    }

    /// Derives a token from this one, which the store carries, and a secret that the store does not have. A process
    /// needs both.
    pub fn with(&self, secret: &[u8]) -> Self {
        Self(self.mac(&[b"smddp job token", secret]).finalize().into_bytes().into())
    }

    /// Returns the key for address records of ranks that share the job secret. It does not depend on the store's
    /// contents.
    pub fn from_secret(secret: &[u8]) -> Self {
        Self([0; 32]).with(secret)
    }

    /// Returns a public id of the token, which does not reveal it.
    pub fn id(&self) -> [u8; 16] {
        let mut id = [0; 16];
        id.copy_from_slice(&self.mac(&[b"smddp name"]).finalize().into_bytes()[..16]);
        id
    }

    /// Returns the authentication code of the parts. The first part is a label for their purpose.
    pub fn tag(&self, parts: &[&[u8]]) -> [u8; TAG] {
        self.mac(parts).finalize().into_bytes().into()
    }

    /// Verifies such a code in constant time.
    pub fn verifies(&self, parts: &[&[u8]], tag: &[u8]) -> bool {
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

    /// Returns the keys of the connection with that greeting, which contains the initiator's nonce.
    pub fn keys(&self, greeting: &[u8], nonce: &[u8]) -> Keys {
        let key = |label: &[u8]| Key(Self(self.tag(&[label, greeting, nonce])));
        Keys { initiator: key(b"smddp caller's key"), responder: key(b"smddp listener's key") }
    }
}

/// Key of one direction of a connection. It encrypts TCP frames, or authenticates bootstrap messages.
#[derive(Clone)]
pub struct Key(Token);

impl Key {
    /// Returns the key material.
    pub fn bytes(&self) -> &[u8] {
        &self.0.0
    }

    /// Returns the authentication code of message `number` in this direction.
    pub fn tag(&self, number: u64, message: &[u8]) -> [u8; TAG] {
        self.0.tag(&[b"smddp message", &number.to_le_bytes(), message])
    }

    /// Verifies such a code in constant time.
    pub fn verifies(&self, number: u64, message: &[u8], tag: &[u8]) -> bool {
        self.0.verifies(&[b"smddp message", &number.to_le_bytes(), message], tag)
    }

    /// Derives the next key, from which this key cannot be computed.
    pub fn next(&self) -> Self {
        Self(Token(self.0.tag(&[b"smddp next key"])))
    }
}

/// Keys of one connection, one per direction. Both ends' nonces are part of the derivation.
#[derive(Clone)]
pub struct Keys {
    /// Key for data from the initiator.
    pub initiator: Key,
    /// Key for data from the responder.
    pub responder: Key,
}
