//! What nobody on the way can read or change, where `SMDDP_ENCRYPT` asks for it: a stream cut into sealed records.
//!
//! ```text
//! length of the text (u32, little endian) | the text, encrypted | a tag of 16 bytes over both
//! ```
//!
//! The cipher is AES-256-GCM of `ring`. Each direction of each connection has a key of its own, made of the group's token and
//! both ends' nonces ([`crate::token::Keys`]), so a record's number is a nonce that never comes twice; a record that was
//! recorded, left out, moved or changed does not open. After [`RENEWED`] records both ends make the next key of the last and
//! forget that one, far below what one key may encrypt (RFC 8446, section 5.5).

use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read};
use std::net::TcpStream;

use ring::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};

use super::dial::retried;
use crate::socket_io::send;
use crate::token::{Key, Keys};

/// The longest text of a record.
const RECORD: usize = 64 << 10;
const LENGTH: usize = 4;
const TAG: usize = 16;
/// So much waits for the socket, before more is sealed.
const ROOM: usize = 4 * RECORD;
/// Records under one key.
const RENEWED: u64 = 1 << 20;

/// One direction's key, and the number of its next record.
struct Direction {
    secret: Key,
    key: LessSafeKey,
    number: u64,
}

fn cipher(secret: &Key) -> LessSafeKey {
    // The only error is a key of another length than the algorithm's.
    let key = UnboundKey::new(&AES_256_GCM, secret.bytes()).unwrap_or_else(|_| unreachable!("32 bytes"));
    LessSafeKey::new(key)
}

impl Direction {
    fn new(secret: Key) -> Self {
        Self { key: cipher(&secret), secret, number: 0 }
    }

    fn nonce(&mut self) -> Nonce {
        if self.number != 0 && self.number.is_multiple_of(RENEWED) {
            self.secret = self.secret.next();
            self.key = cipher(&self.secret);
        }
        let mut nonce = [0; 12];
        nonce[4..].copy_from_slice(&self.number.to_le_bytes());
        self.number += 1;
        Nonce::assume_unique_for_key(nonce)
    }
}

/// The sending end.
pub(super) struct Encryptor {
    direction: Direction,
    /// Records, of which the socket has taken the first bytes.
    out: Vec<u8>,
    sent: usize,
}

impl Encryptor {
    pub(super) fn new(secret: Key) -> Self {
        Self { direction: Direction::new(secret), out: Vec::new(), sent: 0 }
    }

    /// Nothing waits for the socket.
    pub(super) fn is_empty(&self) -> bool {
        self.out.is_empty()
    }

    /// Seals what there is room for of the parts, one behind the other; how many bytes that was.
    pub(super) fn take(&mut self, parts: [&[u8]; 2]) -> usize {
        let all = parts[0].len() + parts[1].len();
        let mut taken = 0;
        while taken < all && self.out.len() < ROOM {
            let length = (all - taken).min(RECORD);
            let from = self.out.len();
            self.out.extend((length as u32).to_le_bytes());
            for part in cut(parts, taken, length) {
                self.out.extend(part);
            }
            let (words, text) = self.out[from..].split_at_mut(LENGTH);
            let nonce = self.direction.nonce();
            let sealed = self.direction.key.seal_in_place_separate_tag(nonce, Aad::from(&*words), text);
            // The only error is a text of more than 64 GiB.
            let tag = sealed.unwrap_or_else(|_| unreachable!("a short text"));
            self.out.extend(tag.as_ref());
            taken += length;
        }
        taken
    }

    /// All that was sealed, for who has no socket to push it into.
    pub(super) fn into_bytes(self) -> Vec<u8> {
        self.out
    }

    /// Writes what waits; how many bytes the socket took.
    pub(super) fn push(&mut self, socket: &TcpStream) -> io::Result<usize> {
        let before = self.sent;
        while self.sent < self.out.len() {
            let written = retried(send(socket, &[IoSlice::new(&self.out[self.sent..])]))?;
            if written == 0 {
                return Ok(self.sent - before);
            }
            self.sent += written;
        }
        let pushed = self.sent - before;
        (self.sent, self.out) = (0, std::mem::take(&mut self.out));
        self.out.clear();
        Ok(pushed)
    }

    /// Nothing more will be sent.
    pub(super) fn clear(&mut self) {
        (self.out, self.sent) = (Vec::new(), 0);
    }
}

/// Bytes `at..at + length` of two parts, one behind the other.
fn cut(parts: [&[u8]; 2], at: usize, length: usize) -> [&[u8]; 2] {
    let first = parts[0].len();
    let end = at + length;
    [&parts[0][at.min(first)..end.min(first)], &parts[1][at.saturating_sub(first)..end.saturating_sub(first)]]
}

/// The receiving end.
pub(super) struct Decryptor {
    direction: Direction,
    buffer: Box<[u8]>,
    /// Of the buffer: text that nobody has taken yet, and behind it what has come and is not opened.
    text: std::ops::Range<usize>,
    sealed: std::ops::Range<usize>,
}

impl Decryptor {
    pub(super) fn new(secret: Key) -> Self {
        let buffer = vec![0; 2 * (LENGTH + RECORD + TAG)].into();
        Self { direction: Direction::new(secret), buffer, text: 0..0, sealed: 0..0 }
    }

    /// What can be read of that socket, as text.
    pub(super) fn over<'a>(&'a mut self, socket: &'a TcpStream) -> Decrypted<'a> {
        Decrypted { opener: self, socket }
    }

    /// Whether there is something to be read, whatever the socket has.
    pub(super) fn has_text(&self) -> bool {
        !self.text.is_empty() || self.next_length().is_ok_and(|length| length.is_some())
    }

    /// The length of the next record's text, if all of it is here.
    fn next_length(&self) -> io::Result<Option<usize>> {
        let here = &self.buffer[self.sealed.clone()];
        let Some(length) = here.first_chunk::<LENGTH>() else { return Ok(None) };
        let length = u32::from_le_bytes(*length) as usize;
        if length == 0 || length > RECORD {
            return Err(forged());
        }
        Ok((here.len() >= LENGTH + length + TAG).then_some(length))
    }

    /// Opens the next record, reading for it what the socket has. `false`: the stream is at its end.
    fn open(&mut self, socket: &TcpStream) -> io::Result<bool> {
        let length = loop {
            if let Some(length) = self.next_length()? {
                break length;
            }
            // Of one record at most: the rest of the buffer has room for another.
            self.buffer.copy_within(self.sealed.clone(), 0);
            self.sealed = 0..self.sealed.len();
            match (&*socket).read(&mut self.buffer[self.sealed.end..])? {
                0 if self.sealed.is_empty() => return Ok(false),
                0 => return Err(ErrorKind::UnexpectedEof.into()),
                bytes => self.sealed.end += bytes,
            }
        };
        let nonce = self.direction.nonce();
        let from = self.sealed.start + LENGTH;
        let (words, rest) = self.buffer[self.sealed.start..].split_at_mut(LENGTH);
        let opened = self.direction.key.open_in_place(nonce, Aad::from(&*words), &mut rest[..length + TAG]);
        opened.map_err(|_| forged())?;
        self.text = from..from + length;
        self.sealed.start = from + length + TAG;
        Ok(true)
    }

    fn read(&mut self, socket: &TcpStream, into: &mut [u8]) -> io::Result<usize> {
        let mut got = 0;
        while got < into.len() {
            if self.text.is_empty() {
                match self.open(socket) {
                    Ok(true) => {}
                    // What is here comes first; the next look finds the rest out once more.
                    Ok(false) => break,
                    Err(error) if got > 0 && error.kind() == ErrorKind::WouldBlock => break,
                    Err(error) => return Err(error),
                }
            }
            let piece = self.text.len().min(into.len() - got);
            into[got..got + piece].copy_from_slice(&self.buffer[self.text.start..][..piece]);
            self.text.start += piece;
            got += piece;
        }
        Ok(got)
    }
}

/// Both ends of a connection here.
pub(super) struct Seal {
    pub(super) sealer: Encryptor,
    pub(super) opener: Decryptor,
}

impl Seal {
    pub(super) fn of_caller(keys: Keys) -> Box<Self> {
        Box::new(Self { sealer: Encryptor::new(keys.caller), opener: Decryptor::new(keys.listener) })
    }

    pub(super) fn of_listener(keys: Keys) -> Box<Self> {
        Box::new(Self { sealer: Encryptor::new(keys.listener), opener: Decryptor::new(keys.caller) })
    }
}

/// A socket that is read as text. As much is read as there is: a short count says that the socket is empty.
pub(super) struct Decrypted<'a> {
    opener: &'a mut Decryptor,
    socket: &'a TcpStream,
}

impl Read for Decrypted<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.opener.read(self.socket, into)
    }

    fn read_vectored(&mut self, slices: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let mut got = 0;
        for slice in slices {
            match self.opener.read(self.socket, slice) {
                Ok(bytes) => {
                    got += bytes;
                    if bytes < slice.len() {
                        break;
                    }
                }
                Err(error) if got > 0 && error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
        Ok(got)
    }
}

fn forged() -> io::Error {
    io::Error::new(ErrorKind::InvalidData, "what came was not sealed by that rank, or was changed on its way")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::token::{Challenge, Claim, Token};
    use std::io::Write;
    use std::net::TcpListener;
    use std::sync::Arc;

    fn keys() -> [Keys; 2] {
        let token = Arc::new(Token::random().unwrap());
        let claim = Claim::new(&token, b"smddp-tthe words").unwrap();
        let (challenge, reply) = Challenge::new(token, claim.words().to_vec()).unwrap();
        [claim.keys(&reply), challenge.keys()]
    }

    fn ends() -> [Box<Seal>; 2] {
        let [caller, listener] = keys();
        [Seal::of_caller(caller), Seal::of_listener(listener)]
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

    /// What comes of that stream, and its error if one ends it.
    fn read(opener: &mut Decryptor, socket: &TcpStream, most: usize) -> (Vec<u8>, Option<io::Error>) {
        let (mut found, mut piece) = (Vec::new(), vec![0; 1000]);
        while found.len() < most {
            match opener.over(socket).read(&mut piece) {
                Ok(0) => return (found, None),
                Ok(count) => found.extend(&piece[..count]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => std::thread::yield_now(),
                Err(error) => return (found, Some(error)),
            }
        }
        (found, None)
    }

    #[test]
    fn any_bytes_arrive_as_they_were_and_look_like_nothing_on_their_way() {
        for count in [0, 1, RECORD - 1, RECORD, RECORD + 1, 3 * RECORD + 5, 6 * RECORD] {
            let [mut ours, mut theirs] = ends();
            let [out, into] = pair();
            let text = bytes(count);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let mut taken = 0;
                    while taken < count {
                        let middle = taken + (count - taken) / 3;
                        taken += ours.sealer.take([&text[taken..middle], &text[middle..]]);
                        ours.sealer.push(&out).unwrap();
                    }
                    assert!(ours.sealer.is_empty());
                    out.shutdown(std::net::Shutdown::Write).unwrap();
                });
                let (found, error) = read(&mut theirs.opener, &into, usize::MAX);
                assert!(found == text && error.is_none(), "{count}: {} bytes, {error:?}", found.len());
            });
        }
        let [mut ours, _] = ends();
        ours.sealer.take([&[7; 500], &[]]);
        assert!(!ours.sealer.into_bytes().windows(8).any(|window| window == [7; 8]));
    }

    /// Three records of 100 bytes each.
    fn records(ours: &mut Seal) -> Vec<u8> {
        for part in bytes(300).chunks(100) {
            assert_eq!(ours.sealer.take([part, &[]]), 100);
        }
        std::mem::take(&mut ours.sealer.out)
    }

    fn opened(opener: &mut Decryptor, stream: &[u8]) -> (Vec<u8>, Option<io::Error>) {
        let [mut out, into] = pair();
        out.write_all(stream).unwrap();
        drop(out);
        read(opener, &into, usize::MAX)
    }

    #[test]
    fn every_changed_bit_every_record_that_is_moved_left_out_or_comes_twice_is_an_error() {
        let one = LENGTH + 100 + TAG;
        let [caller, listener] = keys();
        let stream = records(&mut Seal::of_caller(caller.clone()));
        let fresh = || Seal::of_listener(listener.clone()).opener;
        let (found, error) = opened(&mut fresh(), &stream);
        assert!(found == bytes(300) && error.is_none(), "{error:?}");
        for at in 0..stream.len() {
            let mut changed = stream.clone();
            changed[at] ^= 1 << (at % 8);
            let (found, error) = opened(&mut fresh(), &changed);
            let whole = at / one * 100;
            assert!(found.len() <= whole && found == bytes(300)[..found.len()], "bit {at}");
            assert!(error.is_some(), "bit {at}");
        }
        let record = |i: usize| &stream[i * one..(i + 1) * one];
        for order in [vec![1, 0, 2], vec![0, 2], vec![0, 0, 1, 2], vec![0, 1, 1]] {
            let moved: Vec<u8> = order.iter().flat_map(|&i| record(i).to_vec()).collect();
            let error = opened(&mut fresh(), &moved).1.unwrap();
            assert!(error.to_string().contains("not sealed by that rank"), "{order:?}: {error}");
        }
        // What this end has sealed itself, another connection's, and a stream that ends within a record.
        assert!(opened(&mut Seal::of_caller(caller).opener, &stream).1.is_some());
        assert!(opened(&mut ends()[1].opener, &stream).1.is_some());
        assert!(opened(&mut fresh(), &stream[..stream.len() - 1]).1.is_some());
    }

    #[test]
    fn keys_are_renewed_on_both_ends_at_the_same_record() {
        let [caller, listener] = keys();
        let (mut ours, mut theirs) = (Seal::of_caller(caller), Seal::of_listener(listener));
        ours.sealer.direction.number = RENEWED - 1;
        theirs.opener.direction.number = RENEWED - 1;
        let before = ours.sealer.direction.secret.bytes().to_vec();
        let stream = records(&mut ours);
        let (found, error) = opened(&mut theirs.opener, &stream);
        assert!(found == bytes(300) && error.is_none(), "{error:?}");
        assert_ne!(before, ours.sealer.direction.secret.bytes());
    }
}
