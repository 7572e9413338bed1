//! Decoder of arbitrary bytes into actions and values.

use crate::frame::{Frame, Kind};

/// Bytes of a fuzz input that are not decoded yet.
pub struct Script<'a>(&'a [u8]);

/// Values at which arithmetic errors are likely.
const EDGES: [u64; 16] = [
    63,
    64,
    255,
    4096,
    8192,
    8193,
    64 << 10,
    (64 << 10) + 1,
    128 << 10,
    1 << 20,
    u32::MAX as u64,
    1 << 40,
    1 << 63,
    u64::MAX - 63,
    u64::MAX - 1,
    u64::MAX,
];

impl<'a> Script<'a> {
    /// Decodes these bytes.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// Returns the next byte; `None` at the end of the script.
    pub fn step(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    /// Returns the next byte, or 0 at the end.
    pub fn byte(&mut self) -> u8 {
        self.step().unwrap_or(0)
    }

    /// Returns a value in `0..n`.
    pub fn below(&mut self, n: usize) -> usize {
        usize::from(self.byte()) % n.max(1)
    }

    /// Returns true or false.
    pub fn yes(&mut self) -> bool {
        self.byte() & 1 == 1
    }

    /// Returns mostly small values, sometimes an edge value, sometimes any.
    pub fn number(&mut self) -> u64 {
        match self.byte() {
            small @ 0..0xe0 => u64::from(small),
            edge @ 0xe0..0xf8 => EDGES[usize::from(edge) % EDGES.len()],
            _ => {
                let mut bytes = [0; 8];
                bytes.fill_with(|| self.byte());
                u64::from_le_bytes(bytes)
            }
        }
    }

    /// Returns up to `n` bytes of the script.
    pub fn take(&mut self, n: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(n.min(self.0.len()));
        self.0 = rest;
        taken
    }

    /// Returns an arbitrary frame. `seq`: current operation of the receiver.
    pub fn frame(&mut self, seq: u64) -> Frame {
        let kind = Kind::ALL[self.below(Kind::ALL.len())];
        // Mostly close to the expected number; other frames are rejected early.
        let seq = match self.below(8) {
            0 => self.number(),
            1 => seq.wrapping_add(1),
            2 => seq.wrapping_sub(1),
            3 => 1,
            _ => seq,
        };
        Frame {
            kind,
            channel: self.number() as u32,
            seq,
            index: self.number(),
            bytes: self.number(),
            what: self.number() & 3,
            count: self.number() & 3,
            total: self.number(),
            checksum: None,
        }
    }
}
