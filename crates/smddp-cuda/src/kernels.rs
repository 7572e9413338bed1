//! The reductions as the driver takes them: the program, and what is launched of it.
//!
//! The program is `kernels/reduce.cu`, compiled by `scripts/kernels.py` to the PTX that lies beside it; the driver
//! translates that for its GPU (about a second on a processor's core, once: it keeps what it made).
//!
//! Public for the tests of smddp-core, which hold the same source to the processor's kernels.

use std::ffi::CStr;

use crate::{Element, Error, Fold, MAX_SOURCES, Reduction, Result};

/// Blocks of a launch at most: eight take no more than eight multiprocessors, the others are the model's.
pub const MAX_BLOCKS: u32 = 8;
/// Threads of every block; the kernels count on it.
pub const THREADS: u32 = 512;
/// Bytes of what a thread reads at once, and the alignment that this needs.
const PACK: usize = 16;

/// The one parameter of every kernel: `struct Args` of `reduce.cu`.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct Args {
    pub sources: [u64; MAX_SOURCES],
    pub to: u64,
    /// In the kernel's own elements, as is `head`: bytes where bits are folded, parts in a sum of complex numbers.
    pub count: u64,
    /// Elements before the first pack.
    pub head: u64,
    /// Whole packs of 16 bytes.
    pub packs: u64,
    pub times: f64,
    pub n: u32,
    pub finish: u32,
    pub divide: u32,
    pub unused: u32,
}

// Values of `Args::finish`.
const KEEP: u32 = 0;
const DIVIDE: u32 = 1;
const TIMES: u32 = 2;

/// One launch: `name` of the program with a grid of `blocks`, each of `threads`, no shared memory, and `args`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Launch {
    pub name: &'static CStr,
    pub blocks: u32,
    pub threads: u32,
    pub args: Args,
}

/// The program, for `cuModuleLoadData`. It is read through for a zero: to be asked for once.
pub fn ptx() -> &'static CStr {
    match CStr::from_bytes_with_nul(concat!(include_str!("../kernels/reduce.ptx"), "\0").as_bytes()) {
        Ok(text) => text,
        Err(_) => unreachable!("a text without zeros, and one after it"),
    }
}

/// What a reduction comes to; `None` where it has no elements.
///
/// [`Error::Invalid`] for what no kernel does: a fold that the element does not know, no sources or too many, a last
/// step for anything but a sum, an address that is not aligned to its element.
pub fn launch(reduction: &Reduction) -> Result<Option<Launch>> {
    let Reduction { element, fold, ref sources, to, count, .. } = *reduction;
    let invalid = |what: String| Err(Error::Invalid(what));
    let Some((name, unit)) = kernel(element, fold) else {
        return invalid(format!("no {fold:?} of {element:?} elements"));
    };
    if sources.is_empty() || sources.len() > MAX_SOURCES {
        return invalid(format!("a reduction of {} sources: one to {MAX_SOURCES} can be", sources.len()));
    }
    let (finish, divide, times) = finish(reduction)?;
    let pointers = || sources.iter().copied().chain([to]);
    // The largest single access beside that of a pack.
    let aligned = unit.min(8) as u64;
    if let Some(odd) = pointers().find(|address| !address.is_multiple_of(aligned)) {
        return invalid(format!(
            "{odd:#x} is not the address of {element:?} elements: no multiple of {aligned}"
        ));
    }
    let Some(bytes) = count.checked_mul(element.size()) else {
        return invalid(format!("{count} elements of {} bytes are more than there can be", element.size()));
    };
    if count == 0 {
        return Ok(None);
    }
    // Packs where all arrays reach a pack's alignment after the same number of bytes.
    let to_pack = |address: u64| (address.wrapping_neg() % PACK as u64) as usize;
    let head = to_pack(to);
    let together = head.is_multiple_of(unit) && pointers().all(|address| to_pack(address) == head);
    let (head, packs) = match bytes.checked_sub(head) {
        Some(rest) if together => (head / unit, rest / PACK),
        _ => (0, 0),
    };
    let count = bytes / unit;
    let mut args = Args {
        sources: [0; MAX_SOURCES],
        to,
        count: count as u64,
        head: head as u64,
        packs: packs as u64,
        times,
        n: sources.len() as u32,
        finish,
        divide,
        unused: 0,
    };
    args.sources[..sources.len()].copy_from_slice(sources);
    let turns = if packs > 0 { packs } else { count };
    let blocks = turns.div_ceil(THREADS as usize).min(MAX_BLOCKS as usize) as u32;
    Ok(Some(Launch { name, blocks, threads: THREADS, args }))
}

/// The last step: what is done, and its two operands.
fn finish(reduction: &Reduction) -> Result<(u32, u32, f64)> {
    let Reduction { element, fold, divide, times, .. } = *reduction;
    let invalid = |what: String| Err(Error::Invalid(what));
    if (divide.is_some() || times.is_some()) && fold != Fold::Sum {
        return invalid(format!("a {fold:?} is neither divided nor multiplied: only a sum is"));
    }
    match (divide, times) {
        (Some(_), Some(_)) => invalid("a sum is divided or multiplied, not both".to_owned()),
        (None, Some(_)) if element == Element::Bool => invalid("no product of Bool and a factor".to_owned()),
        (None, Some(factor)) => Ok((TIMES, 1, factor)),
        // A division by nobody cannot be meant, one by one changes nothing, and the average of truths is a truth.
        (None | Some(0 | 1), None) => Ok((KEEP, 1, 1.0)),
        (Some(_), None) if element == Element::Bool => Ok((KEEP, 1, 1.0)),
        // A power of two has an exact reciprocal: the same bits without a division.
        (Some(n), None) if is_float(element) && n.is_power_of_two() => Ok((TIMES, 1, 1.0 / f64::from(n))),
        (Some(n), None) => Ok((DIVIDE, n, 1.0)),
    }
}

fn is_float(element: Element) -> bool {
    use Element::{BF16, C64, C128, F16, F32, F64};
    matches!(element, F32 | F64 | F16 | BF16 | C64 | C128)
}

/// The kernel of an element and a fold, and the bytes of its own elements; `None` for bits of floats, and bits or
/// order of complex numbers.
fn kernel(element: Element, fold: Fold) -> Option<(&'static CStr, usize)> {
    use Element::{BF16, Bool, C64, C128, F16, F32, F64, I8, I16, I32, I64, U8, U16, U32, U64};
    use Fold::{Band, Bor, Bxor, Max, Min, Prod, Sum};
    let name = match (fold, element) {
        (Sum | Max | Bor, Bool) => c"smddp_bool_bor",
        (Prod | Min | Band, Bool) => c"smddp_bool_band",
        (Bxor, Bool) => c"smddp_bool_bxor",

        (Sum, F32) => c"smddp_sum_f32",
        (Sum, F64) => c"smddp_sum_f64",
        (Sum, F16) => c"smddp_sum_f16",
        (Sum, BF16) => c"smddp_sum_bf16",
        (Sum, I8) => c"smddp_sum_i8",
        (Sum, I16) => c"smddp_sum_i16",
        (Sum, I32) => c"smddp_sum_i32",
        (Sum, I64) => c"smddp_sum_i64",
        (Sum, U8) => c"smddp_sum_u8",
        (Sum, U16) => c"smddp_sum_u16",
        (Sum, U32) => c"smddp_sum_u32",
        (Sum, U64) => c"smddp_sum_u64",
        // The parts of a complex number do not meet in a sum.
        (Sum, C64) => return Some((c"smddp_sum_f32", F32.size())),
        (Sum, C128) => return Some((c"smddp_sum_f64", F64.size())),

        (Prod, F32) => c"smddp_prod_f32",
        (Prod, F64) => c"smddp_prod_f64",
        (Prod, F16) => c"smddp_prod_f16",
        (Prod, BF16) => c"smddp_prod_bf16",
        // The lower half of a product has the same bits with and without signs.
        (Prod, I8 | U8) => c"smddp_prod_u8",
        (Prod, I16 | U16) => c"smddp_prod_u16",
        (Prod, I32 | U32) => c"smddp_prod_u32",
        (Prod, I64 | U64) => c"smddp_prod_u64",
        (Prod, C64) => c"smddp_prod_c64",
        (Prod, C128) => c"smddp_prod_c128",

        (Min, F32) => c"smddp_min_f32",
        (Min, F64) => c"smddp_min_f64",
        (Min, F16) => c"smddp_min_f16",
        (Min, BF16) => c"smddp_min_bf16",
        (Min, I8) => c"smddp_min_i8",
        (Min, I16) => c"smddp_min_i16",
        (Min, I32) => c"smddp_min_i32",
        (Min, I64) => c"smddp_min_i64",
        (Min, U8) => c"smddp_min_u8",
        (Min, U16) => c"smddp_min_u16",
        (Min, U32) => c"smddp_min_u32",
        (Min, U64) => c"smddp_min_u64",

        (Max, F32) => c"smddp_max_f32",
        (Max, F64) => c"smddp_max_f64",
        (Max, F16) => c"smddp_max_f16",
        (Max, BF16) => c"smddp_max_bf16",
        (Max, I8) => c"smddp_max_i8",
        (Max, I16) => c"smddp_max_i16",
        (Max, I32) => c"smddp_max_i32",
        (Max, I64) => c"smddp_max_i64",
        (Max, U8) => c"smddp_max_u8",
        (Max, U16) => c"smddp_max_u16",
        (Max, U32) => c"smddp_max_u32",
        (Max, U64) => c"smddp_max_u64",

        (Band | Bor | Bxor, I8 | I16 | I32 | I64 | U8 | U16 | U32 | U64) => {
            let name = match fold {
                Band => c"smddp_band",
                Bor => c"smddp_bor",
                _ => c"smddp_bxor",
            };
            return Some((name, 1));
        }
        (Band | Bor | Bxor, F32 | F64 | F16 | BF16) | (Min | Max | Band | Bor | Bxor, C64 | C128) => {
            return None;
        }
    };
    Some((name, element.size()))
}

#[cfg(test)]
mod tests;
