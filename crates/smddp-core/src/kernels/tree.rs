//! Tree reductions: chunks that fit in the first-level cache are combined pairwise.
//!
//! Every combination rounds to the element type. Therefore a result does not depend on how its combinations are
//! distributed over ranks.

use std::mem::MaybeUninit;

use super::Kernel;
use crate::kernels::float_mode::DefaultFloatMode;

/// Bytes of a chunk: whole cache lines, and whole elements.
const CHUNK_BYTES: usize = 4 << 10;
/// Stack depth for trees over 65,536 inputs, more than the ranks of any group.
const MAX_DEPTH: usize = 17;

impl Kernel {
    /// As [`Kernel::run`], but combines the sources in a tree. Sources are pushed on a stack one by one. After source
    /// `i`, the two upper values are combined `joins[i]` times, until one value is left. 16-bit floats round at every
    /// combination; the last one applies the divisor of an average.
    ///
    /// # Safety
    /// As [`Kernel::run`]. `joins` has a number for each source and leaves one value. `size` is an element's.
    pub(crate) unsafe fn run_tree(
        &self,
        (dst, also): (*mut u8, *mut u8),
        (srcs, joins): (&[*const u8], &[usize]),
        (n, size): (usize, usize),
        scale: Option<u32>,
        stream: bool,
    ) {
        debug_assert_eq!(srcs.len(), joins.len());
        let _mode = DefaultFloatMode::enter();
        if srcs.len() <= 2 {
            // SAFETY: the caller's contract; of two there is one combination.
            return unsafe { self.run_in_mode(dst, also, srcs, n, scale, stream) };
        }
        // Memory for intermediate results: one chunk for each position of the stack.
        let mut scratch = [const { MaybeUninit::<u8>::uninit() }; CHUNK_BYTES * MAX_DEPTH];
        let mut stack = [std::ptr::null::<u8>(); MAX_DEPTH];
        let chunk = CHUNK_BYTES / size;
        for first in (0..n).step_by(chunk) {
            let (count, byte) = (chunk.min(n - first), first * size);
            let also = if also.is_null() { also } else { also.wrapping_add(byte) };
            let mut depth = 0;
            for (i, (src, joins)) in srcs.iter().zip(joins).enumerate() {
                stack[depth] = src.wrapping_add(byte);
                depth += 1;
                for _ in 0..*joins {
                    depth -= 1;
                    let two = [stack[depth - 1], stack[depth]];
                    let last = depth == 1 && i + 1 == srcs.len();
                    // SAFETY: sources and destinations hold these elements by the caller's contract. If the
                    // destination is one of the sources, nothing reads this chunk of that source after this
                    // combination. A slot of `scratch` holds a chunk; of the two operands, at most the left one is in
                    // the slot that is written, at the same address.
                    unsafe {
                        if last {
                            self.run_in_mode(dst.wrapping_add(byte), also, &two, count, scale, stream);
                        } else {
                            let slot = scratch.as_mut_ptr().add(CHUNK_BYTES * (depth - 1)).cast::<u8>();
                            self.run_in_mode(slot, std::ptr::null_mut(), &two, count, None, false);
                            stack[depth - 1] = slot;
                        }
                    }
                }
            }
        }
    }
}
