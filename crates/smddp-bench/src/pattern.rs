//! Test data and expected results: exact in every type, different on every rank.
//!
//! A pattern defines the bits of element `i` of the whole buffer. It repeats every [`PERIOD`] elements, a prime number. A
//! misplaced block therefore differs, and a check is as fast as a comparison. Collectives without reduction use arbitrary
//! bits. Reductions use small whole numbers, whose result is exact in every order of evaluation, also in 8-bit integers and
//! 16-bit floats. Collectives with a wire format (`SMDDP_WIRE_FORMAT`) use them too: 16-bit formats represent these numbers
//! exactly, and 8 bits with a scale represent them approximately.

use half::{bf16, f16};
use smddp_core::{DType, Format, RedOp};

use crate::types::MULSUM;

pub(crate) const PERIOD: usize = 16381;

/// Value of output bytes before a call. No result of a reduction consists of it.
pub(crate) const UNWRITTEN: u8 = 0xA5;

/// Largest whole number in inputs and results. All types represent it exactly.
const LARGEST: usize = 126;

/// The data of a case.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pattern {
    pub dtype: DType,
    /// `None` for collectives without reduction.
    pub redop: Option<RedOp>,
    pub ranks: usize,
    /// Wire format of elements between nodes.
    pub format: Option<Format>,
    /// A different seed gives different data, so that the result of an earlier call is detected as wrong.
    pub seed: u64,
}

impl Pattern {
    /// Returns the bits of element `i` of the input of `rank`.
    fn input(&self, rank: usize, i: usize) -> u64 {
        let i = i % PERIOD;
        let own = mix(self.seed, rank as u64 + 1, i as u64);
        let Some(redop) = self.redop else {
            return if self.format.is_some() {
                encode(self.dtype, own as usize % (LARGEST + 1))
            } else {
                own
            };
        };
        match redop {
            RedOp::Band | RedOp::Bor | RedOp::Bxor => own,
            _ => encode(self.dtype, self.value(redop, rank, i, own)),
        }
    }

    /// Returns the input value of `rank`. `own` is a pseudorandom number of the rank and element.
    fn value(&self, redop: RedOp, rank: usize, i: usize, own: u64) -> usize {
        let n = self.ranks;
        let own = (own >> 8) as usize;
        let common = (mix(self.seed, 0, i as u64) >> 8) as usize;
        match redop {
            RedOp::Min | RedOp::Max => own % (LARGEST + 1),
            // The product has at most six factors of two.
            RedOp::Prod => 1 + usize::from((rank + common) % n < (common / n) % 7),
            // One number on all ranks, plus one on a rank and minus one on its neighbor: the sum is divisible.
            RedOp::Avg => {
                let most = LARGEST / n;
                if most == 0 {
                    return 0;
                }
                let base = 1 + common % most;
                let paired = rank ^ 1 < n;
                match (paired && common / most % 2 == 1, rank % 2) {
                    (false, _) => base,
                    (true, 0) => base + 1,
                    (true, _) => base - 1,
                }
            }
            // At most `most` ranks have a nonzero value for an element.
            _ => {
                let most =
                    if matches!(redop, RedOp::PremulSum(_)) { LARGEST / MULSUM as usize } else { LARGEST };
                let stride = n.div_ceil(most);
                if (rank + i).is_multiple_of(stride) { own % ((most / n).max(1) + 1) } else { 0 }
            }
        }
    }

    /// Returns the bits of element `i` of the reduction over all ranks.
    fn reduced(&self, i: usize) -> u64 {
        let Some(redop) = self.redop else { return 0 };
        let bits = (0..self.ranks).map(|rank| self.input(rank, i));
        let i = i % PERIOD;
        let values =
            (0..self.ranks).map(|rank| self.value(redop, rank, i, mix(self.seed, rank as u64 + 1, i as u64)));
        let value = match redop {
            RedOp::Band => return bits.fold(u64::MAX, |a, b| a & b),
            RedOp::Bor => return bits.fold(0, |a, b| a | b),
            RedOp::Bxor => return bits.fold(0, |a, b| a ^ b),
            RedOp::Min => values.min().unwrap_or(0),
            RedOp::Max => values.max().unwrap_or(0),
            RedOp::Prod => values.product(),
            RedOp::Avg => values.sum::<usize>() / self.ranks,
            RedOp::PremulSum(_) => values.sum::<usize>() * MULSUM as usize,
            _ => values.sum(),
        };
        encode(self.dtype, value)
    }

    /// Returns the input of `rank`, from element `start`.
    pub(crate) fn of_input(&self, rank: usize, start: usize, elements: usize) -> Run {
        Run::new(self.dtype, elements, PERIOD, |i| self.input(rank, start + i))
    }

    /// Returns the input of `rank` as another rank receives it, with the tolerance of the wire format.
    pub(crate) fn of_moved(&self, rank: usize, start: usize, elements: usize) -> Run {
        Run { tolerance: self.tolerance(1), ..self.of_input(rank, start, elements) }
    }

    /// Returns the tolerance of an element after `times` roundings. Each rounding adds half a step of the scale, which is at
    /// most one. The tolerance is bounded: most of many rounding errors cancel out, and a larger tolerance would accept any value.
    fn tolerance(&self, times: usize) -> f32 {
        let most = LARGEST as f32 / 4.0;
        if self.format == Some(Format::Int8) { (0.51 * times as f32).min(most) } else { 0.0 }
    }

    /// Returns the reduction over all ranks, from element `start`.
    pub(crate) fn of_reduced(&self, start: usize, elements: usize) -> Run {
        let exact = Run::new(self.dtype, elements, PERIOD, |i| self.reduced(start + i));
        Run { tolerance: self.tolerance(self.ranks + 1), ..exact }
    }
}

/// Consecutive elements with a periodic pattern.
pub(crate) struct Run {
    /// One period, or the whole run if it is shorter.
    bytes: Vec<u8>,
    element: usize,
    /// Length of the whole run in bytes.
    len: usize,
    /// Tolerance of f32 elements; 0 for an exact comparison.
    tolerance: f32,
}

impl Run {
    /// Returns `elements` elements with the bits `bits(i)`, which repeat every `period` elements.
    pub(crate) fn new(dtype: DType, elements: usize, period: usize, bits: impl Fn(usize) -> u64) -> Run {
        let element = dtype.size();
        let mut bytes = Vec::with_capacity(elements.min(period) * element);
        for i in 0..elements.min(period) {
            bytes.extend_from_slice(&bits(i).to_le_bytes()[..element]);
        }
        Run { bytes, element, len: elements * element, tolerance: 0.0 }
    }

    /// Returns the length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Writes the run to `to`, which has the run's length.
    pub(crate) fn fill(&self, to: &mut [u8]) {
        debug_assert_eq!(to.len(), self.len);
        for chunk in to.chunks_mut(self.bytes.len().max(1)) {
            chunk.copy_from_slice(&self.bytes[..chunk.len()]);
        }
    }

    /// Returns the number of elements of `found` that differ. `found` has the run's length.
    pub(crate) fn wrong(&self, found: &[u8]) -> u64 {
        debug_assert_eq!(found.len(), self.len);
        found.chunks(self.bytes.len().max(1)).map(|chunk| self.wrong_in(chunk)).sum()
    }

    fn wrong_in(&self, chunk: &[u8]) -> u64 {
        let want = &self.bytes[..chunk.len()];
        if chunk == want {
            return 0;
        }
        let pairs = chunk.chunks(self.element).zip(want.chunks(self.element));
        pairs.filter(|(found, want)| !self.fits(found, want)).count() as u64
    }

    fn fits(&self, found: &[u8], want: &[u8]) -> bool {
        let float = |bytes: &[u8]| bytes.try_into().map_or(f32::NAN, f32::from_le_bytes);
        found == want || self.tolerance > 0.0 && (float(found) - float(want)).abs() <= self.tolerance
    }
}

/// Returns the bits of a small whole number.
pub(crate) fn encode(dtype: DType, value: usize) -> u64 {
    match dtype {
        DType::F32 => u64::from((value as f32).to_bits()),
        DType::F64 => (value as f64).to_bits(),
        DType::F16 => u64::from(f16::from_f32(value as f32).to_bits()),
        DType::BF16 => u64::from(bf16::from_f32(value as f32).to_bits()),
        _ => value as u64,
    }
}

/// Hashes three numbers with SplitMix64.
fn mix(seed: u64, rank: u64, i: u64) -> u64 {
    let mut z = seed
        .wrapping_mul(0x9E37_79B9_7F4A_7C15)
        .wrapping_add(rank.wrapping_mul(0xD1B5_4A32_D192_ED03))
        .wrapping_add(i.wrapping_mul(0x8CB9_2BA7_2F3D_8DD7));
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{DTYPES, REDOPS, is_bitwise};

    #[test]
    fn results_are_exact_in_eight_bits() {
        for ranks in [1, 2, 3, 4, 7, 8, 16, 63, 64, 126, 127, 300] {
            for (_, redop) in REDOPS.into_iter().filter(|(_, op)| !is_bitwise(*op)) {
                let p = Pattern { dtype: DType::I64, redop: Some(redop), ranks, format: None, seed: 5 };
                for i in 0..500 {
                    assert!(p.reduced(i) as usize <= LARGEST, "{redop:?} of {ranks}");
                    let each: Vec<u64> = (0..ranks).map(|r| p.input(r, i)).collect();
                    assert!(each.iter().all(|v| *v <= 127), "{redop:?} of {ranks}");
                    if redop == RedOp::Avg {
                        assert_eq!(each.iter().sum::<u64>() % ranks as u64, 0);
                    }
                }
            }
        }
    }

    #[test]
    fn ranks_and_elements_differ() {
        for (_, redop) in REDOPS {
            let p = Pattern { dtype: DType::I32, redop: Some(redop), ranks: 4, format: None, seed: 1 };
            let of = |rank, start| p.of_input(rank, start, 300).bytes;
            assert_ne!(of(0, 0), of(1, 0), "{redop:?}");
            assert_ne!(of(0, 0), of(0, 1), "{redop:?}");
            assert_ne!(p.of_reduced(0, 300).bytes, p.of_reduced(1, 300).bytes, "{redop:?}");
        }
    }

    #[test]
    fn every_changed_element_is_found() {
        for (_, dtype) in DTYPES {
            let p = Pattern { dtype, redop: None, ranks: 2, format: None, seed: 9 };
            let elements = 2 * PERIOD + 77;
            let run = p.of_input(1, 1234, elements);
            let mut data = vec![0; run.len()];
            run.fill(&mut data);
            assert_eq!(run.wrong(&data), 0);
            // A run that begins later has the same elements.
            let tail = p.of_input(1, 1234 + PERIOD + 5, elements - PERIOD - 5);
            assert_eq!(tail.wrong(&data[(PERIOD + 5) * dtype.size()..]), 0);
            for at in [0, 5, PERIOD, elements - 1] {
                data[at * dtype.size()] ^= 1;
            }
            assert_eq!(run.wrong(&data), 4);
        }
        let empty = Run::new(DType::F32, 0, PERIOD, |_| 0);
        empty.fill(&mut []);
        assert_eq!(empty.wrong(&[]), 0);
    }

    #[test]
    fn whole_numbers_are_exact_in_every_float() {
        assert_eq!(f32::from_bits(encode(DType::F32, 126) as u32), 126.0);
        assert_eq!(bf16::from_bits(encode(DType::BF16, 126) as u16).to_f32(), 126.0);
        assert_eq!(f16::from_bits(encode(DType::F16, 126) as u16).to_f32(), 126.0);
        assert_eq!(encode(DType::U8, 126), 126);
    }
}
