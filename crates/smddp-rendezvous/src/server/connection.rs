//! One connection of the rendezvous store: its requests and replies.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::epoll::EventFlags;

use super::values::{Shared, Value};
use crate::protocol::{DELETE, GET, GREETING, HEAD, MAX_KEY, MAX_VALUE, SET};

/// Bytes of the largest single read, and the number of reads of one connection before other connections are served.
pub(super) const CHUNK: usize = 64 << 10;
pub(super) const CHUNKS_PER_PASS: usize = 32;

/// One client.
pub(super) struct Connection {
    pub(super) stream: TcpStream,
    pub(super) since: Instant,
    greeted: bool,
    /// The first request is complete.
    pub(super) member: bool,
    /// Received bytes that are not processed yet.
    pub(super) input: Vec<u8>,
    /// Bytes to send: the greeting, or the header of a reply. `value` follows them.
    pub(super) output: Vec<u8>,
    pub(super) value: Option<Arc<Value>>,
    sent: usize,
    /// Key and deadline of the pending get.
    pub(super) pending: Option<(Vec<u8>, Instant)>,
}

impl Connection {
    pub(super) fn new(stream: TcpStream) -> Self {
        Self {
            stream,
            since: Instant::now(),
            greeted: false,
            member: false,
            input: Vec::new(),
            output: Vec::new(),
            value: None,
            sent: 0,
            pending: None,
        }
    }

    pub(super) fn events(&self) -> EventFlags {
        let wanted = match (&self.pending, self.is_sending()) {
            (_, true) => EventFlags::OUT,
            (Some(_), _) => EventFlags::empty(),
            (None, _) => EventFlags::IN,
        };
        wanted | EventFlags::RDHUP
    }

    fn is_sending(&self) -> bool {
        !self.output.is_empty()
    }

    pub(super) fn reply(&mut self, value: Option<Arc<Value>>) {
        let bytes = value.as_ref().map_or(0, |value| value.bytes.len());
        self.output.push(u8::from(value.is_some()));
        self.output.extend_from_slice(&(bytes as u32).to_le_bytes());
        self.value = value;
    }

    pub(super) fn send(&mut self) -> io::Result<()> {
        while self.is_sending() {
            let value = self.value.as_ref().map_or(&[][..], |value| &value.bytes);
            let rest = match self.sent.checked_sub(self.output.len()) {
                None => &self.output[self.sent..],
                Some(at) => &value[at..],
            };
            if rest.is_empty() {
                (self.output, self.value, self.sent) = (Vec::new(), None, 0);
                return Ok(());
            }
            match self.stream.write(rest) {
                Ok(bytes) => self.sent += bytes,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Receives one chunk. Returns false if no bytes are available.
    fn receive(&mut self, shared: &Shared, chunk: &mut [u8]) -> io::Result<bool> {
        match self.stream.read(chunk) {
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(bytes) => {
                shared.reserve(bytes)?;
                self.input.extend_from_slice(&chunk[..bytes]);
                Ok(true)
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(true),
            Err(error) => Err(error),
        }
    }

    /// Processes the next complete request or greeting. Returns `Ok(None)` if it is incomplete, and the key of a set request.
    pub(super) fn process(&mut self, shared: &Shared) -> io::Result<Option<Option<Vec<u8>>>> {
        let system_call_error = || io::Error::from(io::ErrorKind::InvalidData);
        if !self.greeted {
            let both = self.input.len().min(GREETING.len());
            if self.input[..both] != GREETING[..both] {
                return Err(system_call_error());
            }
            if both < GREETING.len() {
                return Ok(None);
            }
            self.greeted = true;
            self.input.drain(..GREETING.len());
            shared.release(GREETING.len());
            self.output.extend_from_slice(GREETING);
            return Ok(Some(None));
        }
        let Some(head) = self.input.first_chunk::<HEAD>() else { return Ok(None) };
        let (operation, key) = (head[0], usize::from(u16::from_le_bytes([head[1], head[2]])));
        let number = u32::from_le_bytes([head[3], head[4], head[5], head[6]]);
        let value = if operation == SET { number as usize } else { 0 };
        // The first request is a get: silent connections hold no large values.
        let allowed = self.member || operation == GET;
        if key > MAX_KEY || value > MAX_VALUE || !allowed {
            return Err(system_call_error());
        }
        let end = HEAD + key + value;
        if self.input.len() < end {
            return Ok(None);
        }
        if !self.member {
            shared.join()?;
            self.member = true;
        }
        let rest = self.input.split_off(end);
        let mut request = std::mem::replace(&mut self.input, rest);
        shared.release(end);
        let key = request[HEAD..HEAD + key].to_vec();
        let mut stored = None;
        match operation {
            SET => {
                request.drain(..HEAD + key.len());
                request.shrink_to_fit();
                shared.set(&key, request)?;
                stored = Some(key);
            }
            GET => match shared.values().get(&key).cloned() {
                None if number > 0 => {
                    let until = Instant::now() + Duration::from_millis(number.into());
                    self.pending = Some((key, until));
                }
                found => self.reply(found),
            },
            DELETE => drop(shared.values().remove(&key)),
            _ => return Err(system_call_error()),
        }
        Ok(Some(stored))
    }
}

/// Receives and processes requests and sends replies. Appends the keys that were set to `stored`.
pub(super) fn advance(
    connection: &mut Connection,
    shared: &Shared,
    chunk: &mut [u8],
    stored: &mut Vec<Vec<u8>>,
) -> io::Result<()> {
    let mut chunks = 0..CHUNKS_PER_PASS;
    loop {
        connection.send()?;
        if connection.is_sending() {
            return Ok(());
        }
        if connection.pending.is_some() {
            // The client sends nothing before it has the reply, so a byte or the end of the stream is an error.
            return if connection.receive(shared, &mut chunk[..1])? {
                Err(io::ErrorKind::InvalidData.into())
            } else {
                Ok(())
            };
        }
        match connection.process(shared)? {
            Some(key) => stored.extend(key),
            // The socket stays readable, so the next pass continues.
            None if chunks.next().is_some() && connection.receive(shared, chunk)? => {}
            None => return Ok(()),
        }
    }
}
