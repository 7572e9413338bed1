use super::super::copy::copy_at;
use super::{Guarded, Level, Random};

const SIZES: [usize; 22] = [
    0, 1, 3, 31, 255, 256, 257, 287, 319, 320, 511, 512, 513, 575, 576, 640, 1000, 1023, 1024, 1025, 4099,
    70_001,
];
const OFFSETS: [(usize, usize); 6] = [(0, 0), (1, 0), (0, 3), (16, 33), (63, 1), (32, 32)];

#[test]
fn copy_moves_exactly_the_bytes_asked_for() {
    let content = Random(1).bytes(70_001);
    for &level in Level::available() {
        for n in SIZES {
            for (to, from) in OFFSETS {
                for stream in [false, true] {
                    let src = Guarded::holding(&content[..n], from);
                    let mut dst = Guarded::new(n, to);
                    // SAFETY: both buffers are owned here and hold n bytes; the level is available.
                    unsafe { copy_at::<false>(level, dst.mut_ptr(), dst.mut_ptr(), src.ptr(), n, stream) };
                    assert!(dst.content() == &content[..n], "{level:?} {n} {to} {from} {stream}");
                }
            }
        }
    }
}

#[test]
fn tee_writes_the_same_bytes_to_both_destinations() {
    let content = Random(2).bytes(70_001);
    for &level in Level::available() {
        for n in SIZES {
            for (to, from) in OFFSETS {
                for stream in [false, true] {
                    let src = Guarded::holding(&content[..n], from);
                    let mut slot = Guarded::new(n, from);
                    let mut kept = Guarded::new(n, to);
                    // SAFETY: the buffers are owned here and hold n bytes; the level is available.
                    unsafe { copy_at::<true>(level, kept.mut_ptr(), slot.mut_ptr(), src.ptr(), n, stream) };
                    assert!(slot.content() == &content[..n], "slot: {level:?} {n} {to} {from} {stream}");
                    assert!(kept.content() == &content[..n], "kept: {level:?} {n} {to} {from} {stream}");
                }
            }
        }
    }
}

#[test]
fn public_copies_select_a_level() {
    let content = Random(3).bytes(5_000);
    let src = Guarded::holding(&content, 0);
    let (mut one, mut two, mut three) =
        (Guarded::new(5_000, 1), Guarded::new(5_000, 2), Guarded::new(5_000, 3));
    // SAFETY: all buffers are owned here and hold 5,000 bytes.
    unsafe {
        super::super::copy(one.mut_ptr(), src.ptr(), 5_000, true);
        super::super::copy_tee(two.mut_ptr(), three.mut_ptr(), src.ptr(), 5_000, true);
    }
    assert!([&one, &two, &three].iter().all(|copy| copy.content() == content));
}
