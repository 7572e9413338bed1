//! Encryption of a connection (`SMDDP_ENCRYPT`): a stream of authenticated, encrypted records.
//!
//! ```text
//! length of the plaintext (u32, little endian) | ciphertext | tag of 16 bytes over both
//! ```
//!
//! The cipher is AES-256-GCM of `ring`. Each direction of each connection has a separate key, derived from the group's
//! token and both ends' nonces ([`smddp_net::token::Keys`]). So the record number is a nonce that is never reused. A record
//! that was replayed, dropped, reordered or changed fails authentication. Both ends derive the
//! next key after [`RECORDS_PER_KEY`] records and discard the last one. That is well below the limit of data per key
//! (RFC 8446, section 5.5).

use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read};
use std::net::TcpStream;

use ring::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use smddp_net::socket_io::send;
use smddp_net::token::{Key, Keys};

use super::dial::zero_if_blocked;

/// Maximum plaintext of a record, in bytes.
const MAX_RECORD: usize = 64 << 10;
const LENGTH: usize = 4;
const TAG: usize = 16;
/// Bytes that may wait for the socket. Above this limit nothing more is encrypted.
const MAX_BUFFERED: usize = 4 * MAX_RECORD;
/// Number of records under one key.
const RECORDS_PER_KEY: u64 = 1 << 20;

/// Key of one direction, and the number of its next record.
struct Direction {
    secret: Key,
    key: LessSafeKey,
    number: u64,
}

fn cipher(secret: &Key) -> LessSafeKey {
    // The only error is a wrong key length.
    let key = UnboundKey::new(&AES_256_GCM, secret.bytes()).unwrap_or_else(|_| unreachable!("32 bytes"));
    LessSafeKey::new(key)
}

impl Direction {
    fn new(secret: Key) -> Self {
        Self { key: cipher(&secret), secret, number: 0 }
    }

    fn nonce(&mut self) -> Nonce {
        if self.number != 0 && self.number.is_multiple_of(RECORDS_PER_KEY) {
            self.secret = self.secret.next();
            self.key = cipher(&self.secret);
        }
        let mut nonce = [0; 12];
        nonce[4..].copy_from_slice(&self.number.to_le_bytes());
        self.number += 1;
        Nonce::assume_unique_for_key(nonce)
    }
}

/// Sending end of an encrypted stream.
pub(super) struct Encryptor {
    direction: Direction,
    /// Encrypted records for the socket.
    buffered: Vec<u8>,
    /// Bytes of `buffered` that the socket has accepted.
    sent: usize,
}

impl Encryptor {
    pub(super) fn new(secret: Key) -> Self {
        Self { direction: Direction::new(secret), buffered: Vec::new(), sent: 0 }
    }

    /// Returns true if nothing waits for the socket.
    pub(super) fn is_empty(&self) -> bool {
        self.buffered.is_empty()
    }

    /// Encrypts as much of the concatenated parts as the buffer has room for. Returns the number of plaintext bytes.
    pub(super) fn encrypt(&mut self, parts: [&[u8]; 2]) -> usize {
        let total = parts[0].len() + parts[1].len();
        let mut encrypted = 0;
        while encrypted < total && self.buffered.len() < MAX_BUFFERED {
            let length = (total - encrypted).min(MAX_RECORD);
            let from = self.buffered.len();
            self.buffered.extend((length as u32).to_le_bytes());
            for part in cut(parts, encrypted, length) {
                self.buffered.extend(part);
            }
            let (length_prefix, plaintext) = self.buffered[from..].split_at_mut(LENGTH);
            let nonce = self.direction.nonce();
            let tag =
                self.direction.key.seal_in_place_separate_tag(nonce, Aad::from(&*length_prefix), plaintext);
            // The only error is a plaintext of more than 64 GiB.
            let tag = tag.unwrap_or_else(|_| unreachable!("a short plaintext"));
            self.buffered.extend(tag.as_ref());
            encrypted += length;
        }
        encrypted
    }

    /// Encrypts all of `plaintext` and returns the records, for a caller that sends them itself.
    pub(super) fn encrypt_all(mut self, mut plaintext: &[u8]) -> Vec<u8> {
        let mut records = Vec::new();
        while !plaintext.is_empty() {
            plaintext = &plaintext[self.encrypt([plaintext, &[]])..];
            records.append(&mut self.buffered);
        }
        records
    }

    /// Writes buffered records. Returns the number of bytes that the socket accepted.
    pub(super) fn write_to(&mut self, socket: &TcpStream) -> io::Result<usize> {
        let before = self.sent;
        while self.sent < self.buffered.len() {
            let written = zero_if_blocked(send(socket, &[IoSlice::new(&self.buffered[self.sent..])]))?;
            if written == 0 {
                return Ok(self.sent - before);
            }
            self.sent += written;
        }
        let pushed = self.sent - before;
        (self.sent, self.buffered) = (0, std::mem::take(&mut self.buffered));
        self.buffered.clear();
        Ok(pushed)
    }

    /// Drops buffered records after a failed write.
    pub(super) fn discard(&mut self) {
        (self.buffered, self.sent) = (Vec::new(), 0);
    }
}

/// Returns bytes `at..at + length` of the two concatenated parts.
fn cut(parts: [&[u8]; 2], at: usize, length: usize) -> [&[u8]; 2] {
    let first = parts[0].len();
    let end = at + length;
    [&parts[0][at.min(first)..end.min(first)], &parts[1][at.saturating_sub(first)..end.saturating_sub(first)]]
}

/// Receiving end of an encrypted stream.
pub(super) struct Decryptor {
    direction: Direction,
    buffer: Box<[u8]>,
    /// Part of the buffer with plaintext that was not read yet.
    plaintext: std::ops::Range<usize>,
    /// Part of the buffer after it, with received records that are not decrypted.
    ciphertext: std::ops::Range<usize>,
}

impl Decryptor {
    pub(super) fn new(secret: Key) -> Self {
        let buffer = vec![0; 2 * (LENGTH + MAX_RECORD + TAG)].into();
        Self { direction: Direction::new(secret), buffer, plaintext: 0..0, ciphertext: 0..0 }
    }

    /// Returns a reader of the socket's decrypted stream.
    pub(super) fn reader<'a>(&'a mut self, socket: &'a TcpStream) -> Decrypted<'a> {
        Decrypted { decryptor: self, socket }
    }

    /// Returns true if plaintext, or a complete record, is available without the socket.
    pub(super) fn has_plaintext(&self) -> bool {
        !self.plaintext.is_empty() || self.next_length().is_ok_and(|length| length.is_some())
    }

    /// Returns the plaintext length of the next record, if the whole record is in the buffer.
    fn next_length(&self) -> io::Result<Option<usize>> {
        let here = &self.buffer[self.ciphertext.clone()];
        let Some(length) = here.first_chunk::<LENGTH>() else { return Ok(None) };
        let length = u32::from_le_bytes(*length) as usize;
        if length == 0 || length > MAX_RECORD {
            return Err(authentication_error());
        }
        Ok((here.len() >= LENGTH + length + TAG).then_some(length))
    }

    /// Decrypts the next record, and reads from the socket if needed. Returns false at the end of the stream.
    fn decrypt_next(&mut self, socket: &mut impl Read) -> io::Result<bool> {
        let length = loop {
            if let Some(length) = self.next_length()? {
                break length;
            }
            // At most one record is incomplete, so the buffer has room for another.
            self.buffer.copy_within(self.ciphertext.clone(), 0);
            self.ciphertext = 0..self.ciphertext.len();
            match socket.read(&mut self.buffer[self.ciphertext.end..])? {
                0 if self.ciphertext.is_empty() => return Ok(false),
                0 => return Err(ErrorKind::UnexpectedEof.into()),
                bytes => self.ciphertext.end += bytes,
            }
        };
        let nonce = self.direction.nonce();
        let from = self.ciphertext.start + LENGTH;
        let (length_prefix, rest) = self.buffer[self.ciphertext.start..].split_at_mut(LENGTH);
        let decrypted =
            self.direction.key.open_in_place(nonce, Aad::from(&*length_prefix), &mut rest[..length + TAG]);
        decrypted.map_err(|_| authentication_error())?;
        self.plaintext = from..from + length;
        self.ciphertext.start = from + length + TAG;
        Ok(true)
    }

    /// Decrypts received bytes, and appends the plaintext of the complete records.
    pub(super) fn decrypt(&mut self, mut received: &[u8], plaintext: &mut Vec<u8>) -> io::Result<()> {
        let mut part = [0; 4096];
        loop {
            match self.read(&mut Part(&mut received), &mut part) {
                Ok(0) => return Ok(()),
                Ok(bytes) => plaintext.extend_from_slice(&part[..bytes]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            }
        }
    }

    fn read(&mut self, socket: &mut impl Read, into: &mut [u8]) -> io::Result<usize> {
        let mut read_bytes = 0;
        while read_bytes < into.len() {
            if self.plaintext.is_empty() {
                match self.decrypt_next(socket) {
                    Ok(true) => {}
                    // Deliver the plaintext read until now; the next read finds the end again.
                    Ok(false) => break,
                    Err(error) if read_bytes > 0 && error.kind() == ErrorKind::WouldBlock => break,
                    Err(error) => return Err(error),
                }
            }
            let chunk = self.plaintext.len().min(into.len() - read_bytes);
            into[read_bytes..read_bytes + chunk]
                .copy_from_slice(&self.buffer[self.plaintext.start..][..chunk]);
            self.plaintext.start += chunk;
            read_bytes += chunk;
        }
        Ok(read_bytes)
    }
}

/// Received bytes of a stream that continues after them.
struct Part<'a, 'b>(&'a mut &'b [u8]);

impl Read for Part<'_, '_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self.0.is_empty() {
            true => Err(ErrorKind::WouldBlock.into()),
            false => self.0.read(into),
        }
    }
}

/// Encryption state of one connection, for both directions.
pub struct Seal {
    pub(super) encryptor: Encryptor,
    pub(super) decryptor: Decryptor,
}

impl Seal {
    pub(super) fn for_initiator(keys: Keys) -> Box<Self> {
        Box::new(Self {
            encryptor: Encryptor::new(keys.initiator),
            decryptor: Decryptor::new(keys.responder),
        })
    }

    pub(super) fn for_responder(keys: Keys) -> Box<Self> {
        Box::new(Self {
            encryptor: Encryptor::new(keys.responder),
            decryptor: Decryptor::new(keys.initiator),
        })
    }
}

/// Reader of a socket's decrypted stream. It reads as much as is available: a short count means that the socket is
/// empty.
pub(super) struct Decrypted<'a> {
    decryptor: &'a mut Decryptor,
    socket: &'a TcpStream,
}

impl Read for Decrypted<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.decryptor.read(&mut &*self.socket, into)
    }

    fn read_vectored(&mut self, slices: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let mut read_bytes = 0;
        for slice in slices {
            match self.decryptor.read(&mut &*self.socket, slice) {
                Ok(bytes) => {
                    read_bytes += bytes;
                    if bytes < slice.len() {
                        break;
                    }
                }
                Err(error) if read_bytes > 0 && error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
        Ok(read_bytes)
    }
}

fn authentication_error() -> io::Error {
    io::Error::new(
        ErrorKind::InvalidData,
        "authentication of received data failed: it was not encrypted by that rank, or was changed in transit",
    )
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::TcpListener;
    use std::sync::Arc;

    use smddp_net::handshake::{HandshakeEnd, Initiator, Listener, Party, Purpose, Responder};
    use smddp_net::token::Token;

    use super::*;

    fn keys() -> [Keys; 2] {
        let token = Arc::new(Token::random().unwrap());
        let (from, to) = (Party::default(), Party::default());
        let mut initiator = Initiator::new(&token, Purpose::Frames(0), from, to).unwrap();
        let mut responder = Responder::new(Listener::Groups);
        responder.input(initiator.output()).unwrap();
        responder.answer(token).unwrap();
        initiator.input(responder.output()).unwrap();
        responder.input(initiator.output()).unwrap();
        [initiator.keys(), responder.keys()].map(Option::unwrap)
    }

    fn ends() -> [Box<Seal>; 2] {
        let [initiator, responder] = keys();
        [Seal::for_initiator(initiator), Seal::for_responder(responder)]
    }

    fn pair() -> [TcpStream; 2] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let theirs = listener.accept().unwrap().0;
        theirs.set_nonblocking(true).unwrap();
        [ours, theirs]
    }

    fn bytes(count: usize) -> Vec<u8> {
        (0..count).map(|i| (i * 7 + i / 251) as u8).collect()
    }

    /// Reads the stream. Returns its plaintext, and the error that ended it, if any.
    fn read(decryptor: &mut Decryptor, socket: &TcpStream, limit: usize) -> (Vec<u8>, Option<io::Error>) {
        let (mut found, mut chunk) = (Vec::new(), vec![0; 1000]);
        while found.len() < limit {
            match decryptor.reader(socket).read(&mut chunk) {
                Ok(0) => return (found, None),
                Ok(count) => found.extend(&chunk[..count]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => std::thread::yield_now(),
                Err(error) => return (found, Some(error)),
            }
        }
        (found, None)
    }

    #[test]
    fn stream_is_decrypted_unchanged_and_its_ciphertext_hides_the_plaintext() {
        for count in [0, 1, MAX_RECORD - 1, MAX_RECORD, MAX_RECORD + 1, 3 * MAX_RECORD + 5, 6 * MAX_RECORD] {
            let [mut ours, mut theirs] = ends();
            let [writer, into] = pair();
            let plaintext = bytes(count);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let mut encrypted = 0;
                    while encrypted < count {
                        let middle = encrypted + (count - encrypted) / 3;
                        encrypted +=
                            ours.encryptor.encrypt([&plaintext[encrypted..middle], &plaintext[middle..]]);
                        ours.encryptor.write_to(&writer).unwrap();
                    }
                    assert!(ours.encryptor.is_empty());
                    writer.shutdown(std::net::Shutdown::Write).unwrap();
                });
                let (found, error) = read(&mut theirs.decryptor, &into, usize::MAX);
                assert!(found == plaintext && error.is_none(), "{count}: {} bytes, {error:?}", found.len());
            });
        }
        let [mut ours, _] = ends();
        ours.encryptor.encrypt([&[7; 500], &[]]);
        assert!(!ours.encryptor.buffered.windows(8).any(|window| window == [7; 8]));
    }

    /// Returns three records of 100 bytes each.
    fn records(ours: &mut Seal) -> Vec<u8> {
        for part in bytes(300).chunks(100) {
            assert_eq!(ours.encryptor.encrypt([part, &[]]), 100);
        }
        std::mem::take(&mut ours.encryptor.buffered)
    }

    fn decrypted(decryptor: &mut Decryptor, stream: &[u8]) -> (Vec<u8>, Option<io::Error>) {
        let [mut writer, into] = pair();
        writer.write_all(stream).unwrap();
        drop(writer);
        read(decryptor, &into, usize::MAX)
    }

    #[test]
    fn changed_reordered_dropped_and_replayed_records_are_errors() {
        let one = LENGTH + 100 + TAG;
        let [initiator, responder] = keys();
        let stream = records(&mut Seal::for_initiator(initiator.clone()));
        let fresh = || Seal::for_responder(responder.clone()).decryptor;
        let (found, error) = decrypted(&mut fresh(), &stream);
        assert!(found == bytes(300) && error.is_none(), "{error:?}");
        for at in 0..stream.len() {
            let mut changed = stream.clone();
            changed[at] ^= 1 << (at % 8);
            let (found, error) = decrypted(&mut fresh(), &changed);
            let whole = at / one * 100;
            assert!(found.len() <= whole && found == bytes(300)[..found.len()], "bit {at}");
            assert!(error.is_some(), "bit {at}");
        }
        let record = |i: usize| &stream[i * one..(i + 1) * one];
        for order in [vec![1, 0, 2], vec![0, 2], vec![0, 0, 1, 2], vec![0, 1, 1]] {
            let moved: Vec<u8> = order.iter().flat_map(|&i| record(i).to_vec()).collect();
            let error = decrypted(&mut fresh(), &moved).1.unwrap();
            assert!(error.to_string().contains("not encrypted by that rank"), "{order:?}: {error}");
        }
        // Records of this end itself, records of another connection, and a stream that ends within a record.
        assert!(decrypted(&mut Seal::for_initiator(initiator).decryptor, &stream).1.is_some());
        assert!(decrypted(&mut ends()[1].decryptor, &stream).1.is_some());
        assert!(decrypted(&mut fresh(), &stream[..stream.len() - 1]).1.is_some());
    }

    #[test]
    fn keys_are_renewed_on_both_ends_at_the_same_record() {
        let [initiator, responder] = keys();
        let (mut ours, mut theirs) = (Seal::for_initiator(initiator), Seal::for_responder(responder));
        ours.encryptor.direction.number = RECORDS_PER_KEY - 1;
        theirs.decryptor.direction.number = RECORDS_PER_KEY - 1;
        let before = ours.encryptor.direction.secret.bytes().to_vec();
        let stream = records(&mut ours);
        let (found, error) = decrypted(&mut theirs.decryptor, &stream);
        assert!(found == bytes(300) && error.is_none(), "{error:?}");
        assert_ne!(before, ours.encryptor.direction.secret.bytes());
    }
}
