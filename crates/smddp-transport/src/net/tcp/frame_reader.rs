//! The receiving side of a connection: frames out of a byte stream, payloads straight to where they belong.

use std::io::{self, IoSliceMut, Read};

use crate::net::frame::{Frame, HEADER, Kind};
use crate::net::wire::{Sink, Target};

const BUFFER: usize = 64 << 10;
/// One connection gives way to the others after this many bytes.
const MAX_READ_PER_POLL: usize = 4 << 20;

/// Where the frame under way stands.
enum Reading {
    Header,
    /// The sink has not said where the payload goes.
    AwaitingTarget(Frame),
    /// So many bytes of the payload are there; the address is `None` where they are dropped.
    Payload(Frame, Option<*mut u8>, usize),
}

pub(super) struct Reader {
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    state: Reading,
}

// SAFETY: the address in `Reading::Payload` is memory that the sink gave for this frame; only whoever owns the wire, one
// thread at a time, reads into it.
unsafe impl Send for Reader {}

/// What a round of reading came to.
pub(super) enum ReadOutcome {
    Moved,
    Nothing,
    /// The stream is at its end, or broken.
    Ended(String),
}

impl Reader {
    pub(super) fn new() -> Self {
        Self { buffer: vec![0; BUFFER].into(), start: 0, end: 0, state: Reading::Header }
    }

    /// Whether it waits for the sink, not for the peer.
    pub(super) fn blocked(&self) -> bool {
        matches!(self.state, Reading::AwaitingTarget(_))
    }

    /// The memory of collectives and messages is their owners' again: the rest of a payload for it is dropped.
    pub(super) fn release_user_buffers(&mut self) {
        if let Reading::Payload(frame, address, _) = &mut self.state
            && matches!(frame.kind, Kind::Data | Kind::Fragment)
        {
            *address = None;
        }
    }

    /// Memory of collectives has moved, with what has arrived in it: the rest of a payload arrives at the new address.
    pub(super) fn relocate(&mut self, moved: &dyn Fn(*mut u8) -> *mut u8) {
        if let Reading::Payload(frame, Some(address), _) = &mut self.state
            && frame.kind == Kind::Data
        {
            *address = moved(*address);
        }
    }

    /// Reads and delivers what is there.
    pub(super) fn poll(&mut self, socket: &mut impl Read, peer: usize, sink: &mut dyn Sink) -> ReadOutcome {
        let (mut moved, mut read) = (false, 0);
        loop {
            match self.deliver(peer, sink) {
                Ok(delivered) => moved |= delivered,
                Err(reason) => return ReadOutcome::Ended(reason),
            }
            if self.blocked() || read >= MAX_READ_PER_POLL {
                break;
            }
            match self.fill(socket) {
                Ok((0, _)) => return ReadOutcome::Ended("it closed the connection".to_owned()),
                Ok((n, full)) => {
                    (moved, read) = (true, read + n);
                    if !full {
                        // The stream was emptied; another look costs a system call and finds nothing.
                        return match self.deliver(peer, sink) {
                            Ok(_) => ReadOutcome::Moved,
                            Err(reason) => ReadOutcome::Ended(reason),
                        };
                    }
                }
                Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::NotConnected) => {
                    break;
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return ReadOutcome::Ended(e.to_string()),
            }
        }
        if moved { ReadOutcome::Moved } else { ReadOutcome::Nothing }
    }

    /// One read from the socket: (bytes, whether there may be more). The payload under way goes to its place, whatever
    /// comes behind it into the buffer.
    fn fill(&mut self, socket: &mut impl Read) -> io::Result<(usize, bool)> {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.end > BUFFER - HEADER {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        if let Reading::Payload(frame, Some(address), read_bytes) = &mut self.state {
            let rest = frame.bytes as usize - *read_bytes;
            // SAFETY: the sink gave `frame.bytes` bytes at this address, ours until the frame has arrived; the buffer
            // is empty while a payload is under way, so nothing is overwritten.
            let place = unsafe { std::slice::from_raw_parts_mut(address.wrapping_add(*read_bytes), rest) };
            let (wanted, n) = (
                rest + BUFFER,
                socket.read_vectored(&mut [IoSliceMut::new(place), IoSliceMut::new(&mut self.buffer)])?,
            );
            *read_bytes += n.min(rest);
            (self.start, self.end) = (0, n.saturating_sub(rest));
            return Ok((n, n == wanted));
        }
        let n = socket.read(&mut self.buffer[self.end..])?;
        self.end += n;
        Ok((n, self.end == BUFFER))
    }

    /// Takes frames out of the buffer; whether any arrived or went on.
    fn deliver(&mut self, peer: usize, sink: &mut dyn Sink) -> Result<bool, String> {
        let mut moved = false;
        loop {
            match self.state {
                Reading::Header => {
                    let Some(header) = self.buffer[self.start..self.end].first_chunk::<HEADER>() else {
                        return Ok(moved);
                    };
                    let frame = Frame::decode(header).ok_or("it sent something that is no frame")?;
                    self.start += HEADER;
                    self.state = Reading::AwaitingTarget(frame);
                }
                Reading::AwaitingTarget(frame) => match sink.target(peer, &frame) {
                    Target::Later => return Ok(moved),
                    Target::At(address) => self.state = Reading::Payload(frame, Some(address), 0),
                    Target::Discard => self.state = Reading::Payload(frame, None, 0),
                },
                Reading::Payload(frame, address, read_bytes) => {
                    let chunk = (frame.bytes as usize - read_bytes).min(self.end - self.start);
                    if let Some(address) = address
                        && chunk > 0
                    {
                        // SAFETY: as in `fill`; the source is our buffer.
                        unsafe {
                            std::ptr::copy_nonoverlapping(
                                self.buffer[self.start..].as_ptr(),
                                address.wrapping_add(read_bytes),
                                chunk,
                            );
                        }
                    }
                    self.start += chunk;
                    self.state = Reading::Payload(frame, address, read_bytes + chunk);
                    if read_bytes + chunk < frame.bytes as usize {
                        return Ok(moved | (chunk > 0));
                    }
                    self.state = Reading::Header;
                    sink.received(peer, &frame);
                    moved = true;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::wire::Ticket;

    /// Everything goes to one place.
    struct Place(*mut u8, u32);

    impl Sink for Place {
        fn target(&mut self, _: usize, _: &Frame) -> Target {
            Target::At(self.0)
        }
        fn received(&mut self, _: usize, _: &Frame) {
            self.1 += 1;
        }
        fn sent(&mut self, _: Ticket) {}
    }

    /// A socket that has no more than this.
    struct Some<'a>(&'a [u8]);

    impl Read for Some<'_> {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            if self.0.is_empty() { Err(io::ErrorKind::WouldBlock.into()) } else { self.0.read(into) }
        }
    }

    #[test]
    fn memory_that_is_let_go_is_not_written_any_more() {
        const BYTES: usize = 100_000;
        for kind in [Kind::Data, Kind::Fragment] {
            let frame = Frame { bytes: BYTES as u64, ..Frame::new(kind, 0) };
            let stream = [&frame.encode()[..], &[7; BYTES]].concat();
            let (first, rest) = stream.split_at(HEADER + BYTES / 2);
            let mut memory = vec![0u8; BYTES];
            let (mut reader, mut place) = (Reader::new(), Place(memory.as_mut_ptr(), 0));
            reader.poll(&mut Some(first), 0, &mut place);
            reader.release_user_buffers();
            reader.poll(&mut Some(rest), 0, &mut place);
            assert_eq!(place.1, 1, "the frame itself is delivered");
            assert_eq!(memory.iter().filter(|&&byte| byte == 7).count(), BYTES / 2, "{kind:?}");
        }
    }
}
