//! Reductions and small copies as kernel launches: the PTX program and the launch parameters.
//!
//! `scripts/kernels.py` compiles `kernels/reduce.cu` to the PTX file in the same directory. The driver compiles the
//! PTX for its GPU in about a second and caches the result.
//!
//! Public for the tests of smddp-core, which compare the same source with the CPU kernels.

use std::ffi::CStr;

use crate::{Address, Copy, Element, Error, Fold, MAX_SOURCES, Reduction, Result, Rounding};

/// Default maximum number of blocks of a launch. Eight blocks occupy at most eight SMs and leave the others to the
/// model.
pub const USUAL_BLOCKS: u32 = 8;
/// Threads of every block; the kernels depend on it.
pub const THREADS: u32 = 512;
/// Bytes that a thread reads with one instruction, and the alignment that this needs.
const PACK: usize = 16;
/// Maximum number of copies in one launch.
pub(crate) const MAX_COPIES: usize = MAX_SOURCES / 2;
/// Maximum number of units (one thread moves one at a time) in a launch. Above it the copy engines are faster.
const MAX_UNITS: usize = 16 << 10;

/// The single parameter of every kernel: `struct Args` of `reduce.cu`.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct Args {
    pub sources: [u64; MAX_SOURCES],
    pub to: u64,
    /// In kernel elements, as is `head`: bytes for bitwise operators, real or imaginary parts in a complex sum.
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

/// One launch of the kernel `name`: a grid of `blocks`, each of `threads`, no shared memory, with `args`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Launch {
    pub name: &'static CStr,
    pub blocks: u32,
    pub threads: u32,
    pub args: Args,
}

/// Returns the program for `cuModuleLoadData`. Each call scans it for a zero byte, so call it once.
pub fn ptx() -> &'static CStr {
    text(concat!(include_str!("../kernels/reduce.ptx"), "\0"))
}

const fn text(ended: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(ended.as_bytes()) {
        Ok(text) => text,
        // The text contains no zeros, and one zero follows it.
        Err(_) => unreachable!(),
    }
}

/// Returns one launch for all copies; `None` if they are too many, differ in size, or take longer than copy engines.
pub fn copy(copies: &[Copy]) -> Option<Launch> {
    let (n, bytes) = (copies.len(), copies.first()?.bytes);
    if n > MAX_COPIES || bytes == 0 || copies.iter().any(|copy| copy.bytes != bytes) {
        return None;
    }
    let all = copies.iter().fold(0, |all, copy| all | copy.to | copy.from);
    // Copies without 4-byte alignment have no whole units.
    let unit = if all.is_multiple_of(PACK as u64) { PACK } else { 4 };
    let packs = if all.is_multiple_of(unit as u64) { bytes / unit } else { 0 };
    let units = packs + (bytes - packs * unit);
    if units > MAX_UNITS / n {
        return None;
    }
    let mut args = Args {
        sources: [0; MAX_SOURCES],
        to: 0,
        count: bytes as u64,
        head: 0,
        packs: packs as u64,
        times: 1.0,
        n: n as u32,
        finish: unit as u32,
        divide: 1,
        unused: 0,
    };
    for (places, copy) in args.sources.chunks_exact_mut(2).zip(copies) {
        places.copy_from_slice(&[copy.from, copy.to]);
    }
    // Every copy gets the same number of blocks.
    let each = units.div_ceil(THREADS as usize).min(USUAL_BLOCKS as usize / n);
    Some(Launch { name: c"smddp_copy", blocks: (each * n) as u32, threads: THREADS, args })
}

/// Returns the launch of a reduction with at most `max_blocks` blocks; `None` if it has no elements.
///
/// # Errors
/// [`Error::Invalid`] for an operator that the element type does not support, and for no sources or too many. Also for
/// a divisor or factor without a sum, and for an address that is not aligned to its element.
pub fn launch(reduction: &Reduction, max_blocks: u32) -> Result<Option<Launch>> {
    let Reduction { element, fold, ref sources, to, count, .. } = *reduction;
    let invalid = |reason: String| Err(Error::Invalid(reason));
    let Some((name, unit)) = kernel(element, fold) else {
        return invalid(format!("{fold:?} does not support {element:?} elements"));
    };
    if sources.is_empty() || sources.len() > MAX_SOURCES {
        return invalid(format!("invalid number of sources {}: expected 1 to {MAX_SOURCES}", sources.len()));
    }
    let (finish, divide, times) = finish(reduction)?;
    let pointers = || sources.iter().copied().chain([to]);
    // The largest single access except for packs.
    let aligned = unit.min(8) as u64;
    if let Some(odd) = pointers().find(|address| !address.is_multiple_of(aligned)) {
        return invalid(format!(
            "the address {odd:#x} is not aligned for {element:?} elements: expected a multiple of {aligned} bytes"
        ));
    }
    let Some(bytes) = count.checked_mul(element.size()) else {
        return invalid(format!("{count} elements of {} bytes exceed the address space", element.size()));
    };
    if count == 0 {
        return Ok(None);
    }
    // Packs are possible if all arrays reach pack alignment after the same number of bytes.
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
    let work_items = if packs > 0 { packs } else { count };
    let blocks = work_items.div_ceil(THREADS as usize).min(max_blocks as usize) as u32;
    Ok(Some(Launch { name, blocks, threads: THREADS, args }))
}

/// Returns the launch that converts `count` 32-bit floats at `from` to a format and back, and writes them to `to`.
///
/// `to` may equal `from`. Returns `None` for no elements.
///
/// # Errors
/// [`Error::Invalid`] for an address that is not a multiple of 4 bytes.
pub fn round(
    rounding: Rounding,
    (to, from): (Address, Address),
    count: usize,
    max_blocks: u32,
) -> Result<Option<Launch>> {
    let sum = Reduction {
        element: Element::F32,
        fold: Fold::Sum,
        sources: vec![from],
        to,
        count,
        divide: None,
        times: None,
    };
    let name = match rounding {
        Rounding::Bf16 => c"smddp_bf16_f32",
        Rounding::F16 => c"smddp_f16_f32",
        Rounding::Int8 => c"smddp_int8_f32",
    };
    Ok(launch(&sum, max_blocks)?.map(|launch| Launch { name, ..launch }))
}

/// Returns the final step (a value of `Args::finish`) and its two operands.
fn finish(reduction: &Reduction) -> Result<(u32, u32, f64)> {
    let Reduction { element, fold, divide, times, .. } = *reduction;
    let invalid = |reason: String| Err(Error::Invalid(reason));
    if (divide.is_some() || times.is_some()) && fold != Fold::Sum {
        return invalid(format!("{fold:?} does not support a divisor or factor: only Sum does"));
    }
    match (divide, times) {
        (Some(_), Some(_)) => invalid("a reduction takes a divisor or a factor, not both".to_owned()),
        (None, Some(_)) if element == Element::Bool => {
            invalid("Bool elements do not support a factor".to_owned())
        }
        (None, Some(factor)) => Ok((TIMES, 1, factor)),
        // Division by zero is meaningless and division by one changes nothing. The average of bools is a bool.
        (None | Some(0 | 1), None) => Ok((KEEP, 1, 1.0)),
        (Some(_), None) if element == Element::Bool => Ok((KEEP, 1, 1.0)),
        // A power of two has an exact reciprocal: multiplication gives the same bits.
        (Some(n), None) if is_float(element) && n.is_power_of_two() => Ok((TIMES, 1, 1.0 / f64::from(n))),
        (Some(n), None) => Ok((DIVIDE, n, 1.0)),
    }
}

fn is_float(element: Element) -> bool {
    use Element::{BF16, C64, C128, F16, F32, F64};
    matches!(element, F32 | F64 | F16 | BF16 | C64 | C128)
}

/// Returns the kernel of an element type and an operator, and the size in bytes of the kernel's elements.
///
/// `None` for bitwise operators on floats, and for bitwise operators and ordering on complex numbers.
fn kernel(element: Element, fold: Fold) -> Option<(&'static CStr, usize)> {
    use Element::{BF16, Bool, C64, C128, F16, F32, F64, I8, I16, I32, I64, U8, U16, U32, U64};
    use Fold::{Band, Bor, Bxor, Max, Min, Prod, Sum};
    macro_rules! numbers {
        ($fold:literal, $element:expr) => {
            numbers!($fold, $element, F32 "f32", F64 "f64", F16 "f16", BF16 "bf16", I8 "i8", I16 "i16", I32 "i32",
                I64 "i64", U8 "u8", U16 "u16", U32 "u32", U64 "u64")
        };
        ($fold:literal, $element:expr, $($kind:ident $bits:literal),*) => {
            match $element {
                $($kind => const { text(concat!("smddp_", $fold, "_", $bits, "\0")) },)*
                Bool | C64 | C128 => return None,
            }
        };
    }
    let name = match (fold, element) {
        (Sum | Max | Bor, Bool) => c"smddp_bool_bor",
        (Prod | Min | Band, Bool) => c"smddp_bool_band",
        (Bxor, Bool) => c"smddp_bool_bxor",
        // A complex sum adds real and imaginary parts separately.
        (Sum, C64) => return kernel(F32, Sum),
        (Sum, C128) => return kernel(F64, Sum),
        (Prod, C64) => c"smddp_prod_c64",
        (Prod, C128) => c"smddp_prod_c128",
        (Sum, _) => numbers!("sum", element),
        // The lower half of a product has the same bits for signed and unsigned integers.
        (Prod, I8) => return kernel(U8, Prod),
        (Prod, I16) => return kernel(U16, Prod),
        (Prod, I32) => return kernel(U32, Prod),
        (Prod, I64) => return kernel(U64, Prod),
        (Prod, _) => numbers!("prod", element),
        (Min, _) => numbers!("min", element),
        (Max, _) => numbers!("max", element),
        (Band | Bor | Bxor, F32 | F64 | F16 | BF16 | C64 | C128) => return None,
        (Band, _) => return Some((c"smddp_band", 1)),
        (Bor, _) => return Some((c"smddp_bor", 1)),
        (Bxor, _) => return Some((c"smddp_bxor", 1)),
    };
    Some((name, element.size()))
}

#[cfg(test)]
mod tests;
