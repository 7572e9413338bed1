//! Random bytes.

/// Returns random bytes of the operating system. Zeros if it has none: on Linux only before its generator is seeded.
pub fn bytes<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    bytes
}
