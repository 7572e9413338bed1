//! Comparison of every kernel, at every level of this machine, with a reference that processes one element at a time.
//!
//! Results must equal the reference bit for bit, so the levels also equal each other. `device` compares the GPU
//! kernels with these.

mod compression;
mod copies;
mod device;
mod hashes;
mod kernels;
mod oracle;
mod trees;

use super::level::Level;

/// Guard bytes around a destination, which must not change.
const GUARD: usize = 96;
const UNTOUCHED: u8 = 0xa5;

/// A buffer that starts `offset` bytes after a 64-byte boundary and has guards on both sides.
struct Guarded {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl Guarded {
    fn new(len: usize, offset: usize) -> Self {
        let bytes = vec![UNTOUCHED; len + 2 * GUARD + 64 + offset];
        let to_boundary = (64 - (bytes.as_ptr() as usize + GUARD) % 64) % 64;
        Guarded { start: GUARD + to_boundary + offset, bytes, len }
    }

    fn holding(content: &[u8], offset: usize) -> Self {
        let mut buffer = Self::new(content.len(), offset);
        let start = buffer.start;
        buffer.bytes[start..start + content.len()].copy_from_slice(content);
        buffer
    }

    fn ptr(&self) -> *const u8 {
        self.bytes[self.start..].as_ptr()
    }

    fn mut_ptr(&mut self) -> *mut u8 {
        self.bytes[self.start..].as_mut_ptr()
    }

    /// Returns the content after checking the guards.
    fn content(&self) -> &[u8] {
        let (before, rest) = self.bytes.split_at(self.start);
        let (content, after) = rest.split_at(self.len);
        assert!(before.iter().chain(after).all(|byte| *byte == UNTOUCHED), "written outside the buffer");
        content
    }
}

/// A small deterministic generator (xorshift64*).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| (self.next() >> 56) as u8).collect()
    }
}

#[test]
fn the_level_reported_is_the_best_available() {
    assert_eq!(super::simd_level(), Level::best().name());
    assert!(Level::available().contains(&Level::best()));
    assert_eq!(Level::available()[0], Level::Scalar);
}
