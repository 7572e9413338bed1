//! Receiving side of a connection: decodes frames of a byte stream, and reads payloads directly into their targets.

use std::io::{self, IoSliceMut, Read};

use smddp_net::frame::{CORRUPTED_HEADER, Frame, HEADER, Kind, check_payload};
use smddp_net::wire::{Sink, Target};

/// Size of the receive buffer, in bytes.
const BUFFER: usize = 64 << 10;
/// Bytes after which one connection yields to the others.
const MAX_READ_PER_POLL: usize = 4 << 20;

/// State of the frame that is being received.
enum Reading {
    Header,
    /// The sink has no target for the payload yet.
    AwaitingTarget(Frame),
    /// Target of the payload (`None`: it is discarded) and number of its bytes that were received.
    Payload(Frame, Option<*mut u8>, usize),
    /// A checksum differs: the reader delivers nothing more.
    Corrupted,
}

/// Frame decoder of one connection.
pub(super) struct Reader {
    buffer: Box<[u8]>,
    /// Bytes `start..end` of the buffer are received and not decoded.
    start: usize,
    end: usize,
    state: Reading,
    /// Every frame has a checksum, which is checked before the frame is delivered.
    checks: bool,
}

// SAFETY: the address in `Reading::Payload` is memory that the sink provided for this frame. Only the owner of the
// wire, one thread at a time, writes to it.
unsafe impl Send for Reader {}

/// Result of a poll.
pub(super) enum ReadOutcome {
    Moved,
    Nothing,
    /// The stream ended or failed, with the reason.
    Ended(String),
    /// A checksum differs; with a description of the data.
    Corrupted(String),
}

impl Reader {
    pub(super) fn new() -> Self {
        Self { buffer: vec![0; BUFFER].into(), start: 0, end: 0, state: Reading::Header, checks: false }
    }

    /// Implements `TcpWire::check_checksums`.
    pub(super) fn check_checksums(&mut self) {
        self.checks = true;
    }

    /// Returns true if the reader does not wait for the peer: it waits for the sink, or has found corrupted data.
    pub(super) fn blocked(&self) -> bool {
        matches!(self.state, Reading::AwaitingTarget(_) | Reading::Corrupted)
    }

    /// Discards the rest of a payload for user memory, which its owner may reuse from now on.
    pub(super) fn release_user_buffers(&mut self) {
        if let Reading::Payload(frame, address, _) = &mut self.state
            && matches!(frame.kind, Kind::Data | Kind::Fragment)
        {
            *address = None;
        }
    }

    /// Directs the rest of a collective's payload to the new address, after its memory and the received bytes in it
    /// have moved.
    pub(super) fn relocate(&mut self, moved: &dyn Fn(*mut u8) -> *mut u8) {
        if let Reading::Payload(frame, Some(address), _) = &mut self.state
            && frame.kind == Kind::Data
        {
            *address = moved(*address);
        }
    }

    /// Reads and delivers what the socket has.
    pub(super) fn poll(&mut self, socket: &mut impl Read, peer: usize, sink: &mut dyn Sink) -> ReadOutcome {
        let (mut moved, mut read) = (false, 0);
        loop {
            match self.deliver(peer, sink) {
                Ok(delivered) => moved |= delivered,
                Err(outcome) => return outcome,
            }
            if self.blocked() || read >= MAX_READ_PER_POLL {
                break;
            }
            match self.fill(socket) {
                Ok((0, _)) => return ReadOutcome::Ended("it closed the connection".to_owned()),
                Ok((n, full)) => {
                    (moved, read) = (true, read + n);
                    if !full {
                        // The socket is empty, so skip another system call.
                        return match self.deliver(peer, sink) {
                            Ok(_) => ReadOutcome::Moved,
                            Err(outcome) => outcome,
                        };
                    }
                }
                Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::NotConnected) => {
                    break;
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                // A record of an encrypted connection was changed.
                Err(e) if self.checks && e.kind() == io::ErrorKind::InvalidData => {
                    return self.corrupted(e.to_string());
                }
                Err(e) => return ReadOutcome::Ended(e.to_string()),
            }
        }
        if moved { ReadOutcome::Moved } else { ReadOutcome::Nothing }
    }

    /// Reads once from the socket: the rest of the current payload into its target, and the bytes after it into the
    /// buffer. Returns the number of bytes, and true if the socket may have more.
    fn fill(&mut self, socket: &mut impl Read) -> io::Result<(usize, bool)> {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.end > BUFFER - HEADER {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        if let Reading::Payload(frame, Some(address), read_bytes) = &mut self.state {
            let rest = frame.bytes as usize - *read_bytes;
            // SAFETY: the sink provided `frame.bytes` bytes at this address, which belong to the reader until the frame
            // is delivered. The buffer is empty while a payload is received, so nothing is overwritten.
            let target = unsafe { std::slice::from_raw_parts_mut(address.wrapping_add(*read_bytes), rest) };
            let (wanted, n) = (
                rest + BUFFER,
                socket.read_vectored(&mut [IoSliceMut::new(target), IoSliceMut::new(&mut self.buffer)])?,
            );
            *read_bytes += n.min(rest);
            (self.start, self.end) = (0, n.saturating_sub(rest));
            return Ok((n, n == wanted));
        }
        let n = socket.read(&mut self.buffer[self.end..])?;
        self.end += n;
        Ok((n, self.end == BUFFER))
    }

    /// Checks a complete payload. A discarded one is not checked.
    #[inline(never)]
    fn check(&mut self, frame: &Frame, address: Option<*mut u8>) -> Result<(), ReadOutcome> {
        let payload = match address {
            // SAFETY: as in `fill`; all bytes of the payload are written.
            Some(address) if frame.bytes > 0 => unsafe {
                std::slice::from_raw_parts(address.cast_const(), frame.bytes as usize)
            },
            _ if frame.bytes > 0 => return Ok(()),
            _ => &[],
        };
        check_payload(frame, payload).map_err(|detail| self.corrupted(detail))
    }

    /// Stops the reader at corrupted data.
    fn corrupted(&mut self, detail: String) -> ReadOutcome {
        self.state = Reading::Corrupted;
        ReadOutcome::Corrupted(detail)
    }

    /// Decodes frames from the buffer. Returns true if there was progress.
    fn deliver(&mut self, peer: usize, sink: &mut dyn Sink) -> Result<bool, ReadOutcome> {
        let mut moved = false;
        loop {
            match self.state {
                Reading::Header => {
                    let Some(header) = self.buffer[self.start..self.end].first_chunk::<HEADER>() else {
                        return Ok(moved);
                    };
                    let frame = match Frame::decode(header) {
                        Some(frame) if !self.checks || frame.checksum.is_some() => frame,
                        _ if self.checks => return Err(self.corrupted(CORRUPTED_HEADER.to_owned())),
                        _ => return Err(ReadOutcome::Ended("it sent an invalid frame header".to_owned())),
                    };
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
                        // SAFETY: as in `fill`; the source is the reader's buffer.
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
                    if self.checks {
                        self.check(&frame, address)?;
                    }
                    self.state = Reading::Header;
                    sink.received(peer, &frame);
                    moved = true;
                }
                Reading::Corrupted => return Ok(moved),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use smddp_net::frame::payload_checksum;
    use smddp_net::wire::Ticket;

    use super::*;

    /// Sink with one target for all payloads, and the number of received frames.
    struct OneTarget(*mut u8, u32);

    // SAFETY: the memory has room for each payload, and the test accesses it after the last poll only.
    unsafe impl Sink for OneTarget {
        fn target(&mut self, _: usize, _: &Frame) -> Target {
            Target::At(self.0)
        }
        fn received(&mut self, _: usize, _: &Frame) {
            self.1 += 1;
        }
        fn sent(&mut self, _: Ticket) {}
    }

    /// Socket that has these bytes and no more.
    struct Bytes<'a>(&'a [u8]);

    impl Read for Bytes<'_> {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            if self.0.is_empty() { Err(io::ErrorKind::WouldBlock.into()) } else { self.0.read(into) }
        }
    }

    #[test]
    fn released_memory_is_not_written() {
        const BYTES: usize = 100_000;
        for kind in [Kind::Data, Kind::Fragment] {
            let frame = Frame { bytes: BYTES as u64, ..Frame::new(kind, 0) };
            let stream = [&frame.encode()[..], &[7; BYTES]].concat();
            let (first, rest) = stream.split_at(HEADER + BYTES / 2);
            let mut memory = vec![0u8; BYTES];
            let (mut reader, mut sink) = (Reader::new(), OneTarget(memory.as_mut_ptr(), 0));
            reader.poll(&mut Bytes(first), 0, &mut sink);
            reader.release_user_buffers();
            reader.poll(&mut Bytes(rest), 0, &mut sink);
            assert_eq!(sink.1, 1, "the frame itself is delivered");
            assert_eq!(memory.iter().filter(|&&byte| byte == 7).count(), BYTES / 2, "{kind:?}");
        }
    }

    /// Two frames with payloads, and a bit to flip.
    fn flip_cases() -> impl Iterator<Item = (Vec<u8>, usize)> {
        let mut state = 1u64;
        let mut random = move || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize
        };
        (0..10_000).map(move |round| {
            let bytes = 1 + random() % 3000;
            let payload: Vec<u8> = (0..bytes).map(|_| random() as u8).collect();
            let frame = Frame {
                bytes: bytes as u64,
                checksum: Some(payload_checksum(&payload)),
                ..Frame::new(Kind::Data, round)
            };
            let stream = [&frame.encode()[..], &payload].concat();
            // Header, checksum of the payload, checksum of the header, payload, last byte.
            let byte = match round % 5 {
                0 => random() % HEADER,
                1 => 12 + random() % 4,
                2 => random() % 4,
                3 => HEADER + random() % bytes,
                _ => stream.len() - 1,
            };
            (stream, 8 * byte + random() % 8)
        })
    }

    #[test]
    fn each_of_10_000_flipped_bits_is_found_and_the_frame_is_not_delivered() {
        let mut memory = vec![0u8; 4000];
        for (mut stream, bit) in flip_cases() {
            let (mut reader, mut sink) = (Reader::new(), OneTarget(memory.as_mut_ptr(), 0));
            reader.check_checksums();
            let outcome = reader.poll(&mut Bytes(&stream), 0, &mut sink);
            assert!(matches!(outcome, ReadOutcome::Moved) && sink.1 == 1, "the unchanged frame");
            stream[bit / 8] ^= 1 << (bit % 8);
            // In two parts, as a socket may return it.
            let (first, rest) = stream.split_at(stream.len() / 3);
            let mut reader = Reader::new();
            reader.check_checksums();
            let outcomes = [first, rest].map(|part| reader.poll(&mut Bytes(part), 0, &mut sink));
            let found = outcomes.iter().any(|outcome| matches!(outcome, ReadOutcome::Corrupted(_)));
            assert!(found && sink.1 == 1 && reader.blocked(), "bit {bit} of {} bytes", stream.len());
        }
    }

    #[test]
    fn frame_without_a_checksum_is_corrupted_where_frames_have_one() {
        let stream = Frame::new(Kind::Credit, 0).encode();
        for checks in [false, true] {
            let (mut reader, mut sink) = (Reader::new(), OneTarget(std::ptr::null_mut(), 0));
            reader.checks = checks;
            let outcome = reader.poll(&mut Bytes(&stream), 0, &mut sink);
            assert_eq!(matches!(outcome, ReadOutcome::Corrupted(_)), checks);
            assert_eq!(sink.1, u32::from(!checks));
        }
    }
}
