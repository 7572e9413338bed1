//! What the ranks put in and must find: exact in every type, different on every rank.
//!
//! A pattern gives the bits of element `i` of the whole buffer; it repeats every [`PERIOD`] elements, a prime,
//! so a block that lands in a wrong place does not look right, and a check runs at the speed of a comparison.
//! Collectives that only move data get arbitrary bits. Reductions get small whole numbers whose result every
//! order of evaluation reaches exactly, in 8-bit integers and 16-bit floats too. So do collectives whose elements travel in another
//! format than their own (`SMDDP_WIRE_FORMAT`): 16 bits hold such numbers, 8 bits with a scale hold them nearly.

use half::{bf16, f16};
use smddp_core::{DType, Format, RedOp};

use crate::types::MULSUM;

pub(crate) const PERIOD: usize = 16381;

/// What a byte is set to before a call writes it: no result of a reduction consists of it.
pub(crate) const POISON: u8 = 0xA5;

/// Largest whole number that all types hold and that no reduction exceeds.
const LARGEST: usize = 126;

/// Which data a case moves.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pattern {
    pub dtype: DType,
    /// `None`: data is only moved.
    pub redop: Option<RedOp>,
    pub ranks: usize,
    /// How elements may travel between nodes.
    pub format: Option<Format>,
    /// Another seed, other data: what an earlier call left is not taken for right.
    pub seed: u64,
}

impl Pattern {
    /// Bits of element `i` of the input of `rank`.
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

    /// The whole number that `rank` puts in; `own` is random, the same for the same rank and element.
    fn value(&self, redop: RedOp, rank: usize, i: usize, own: u64) -> usize {
        let n = self.ranks;
        let own = (own >> 8) as usize;
        let common = (mix(self.seed, 0, i as u64) >> 8) as usize;
        match redop {
            RedOp::Min | RedOp::Max => own % (LARGEST + 1),
            // A product of at most six twos.
            RedOp::Prod => 1 + usize::from((rank + common) % n < (common / n) % 7),
            // The same number everywhere, one more on a rank and one less on its neighbour: divides evenly.
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
            // At most `most` ranks put in something for an element.
            _ => {
                let most =
                    if matches!(redop, RedOp::PremulSum(_)) { LARGEST / MULSUM as usize } else { LARGEST };
                let stride = n.div_ceil(most);
                if (rank + i).is_multiple_of(stride) { own % ((most / n).max(1) + 1) } else { 0 }
            }
        }
    }

    /// Bits of element `i` of the reduction over all ranks.
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

    /// The input of `rank`, from element `start`.
    pub(crate) fn of_input(&self, rank: usize, start: usize, elements: usize) -> Run {
        Run::new(self.dtype, elements, PERIOD, |i| self.input(rank, start + i))
    }

    /// The same after it came from `rank`.
    pub(crate) fn of_moved(&self, rank: usize, start: usize, elements: usize) -> Run {
        Run { off: self.off(1), ..self.of_input(rank, start, elements) }
    }

    /// How far an element may be off that was rounded so often: half a step of the scale each time, which is at most one. Of
    /// many roundings most cancel out, and a check that lets everything pass is none.
    fn off(&self, times: usize) -> f32 {
        let most = LARGEST as f32 / 4.0;
        if self.format == Some(Format::Int8) { (0.51 * times as f32).min(most) } else { 0.0 }
    }

    /// The reduction over all ranks, from element `start`.
    pub(crate) fn of_reduced(&self, start: usize, elements: usize) -> Run {
        let exact = Run::new(self.dtype, elements, PERIOD, |i| self.reduced(start + i));
        Run { off: self.off(self.ranks + 1), ..exact }
    }
}

/// Consecutive elements, as bytes that repeat.
pub(crate) struct Run {
    /// One period, or all of it where that is shorter.
    bytes: Vec<u8>,
    element: usize,
    /// Length of the whole run in bytes.
    len: usize,
    /// How far elements may be off, which are f32 then.
    off: f32,
}

impl Run {
    /// `elements` elements whose bits `bits` gives; they repeat every `period`.
    pub(crate) fn new(dtype: DType, elements: usize, period: usize, bits: impl Fn(usize) -> u64) -> Run {
        let element = dtype.size();
        let mut bytes = Vec::with_capacity(elements.min(period) * element);
        for i in 0..elements.min(period) {
            bytes.extend_from_slice(&bits(i).to_le_bytes()[..element]);
        }
        Run { bytes, element, len: elements * element, off: 0.0 }
    }

    /// Bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Writes the run over `to`, which has its length.
    pub(crate) fn fill(&self, to: &mut [u8]) {
        debug_assert_eq!(to.len(), self.len);
        for chunk in to.chunks_mut(self.bytes.len().max(1)) {
            chunk.copy_from_slice(&self.bytes[..chunk.len()]);
        }
    }

    /// Elements of `found`, which has the run's length, that differ.
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
        found == want || self.off > 0.0 && (float(found) - float(want)).abs() <= self.off
    }
}

/// The bits of a small whole number.
pub(crate) fn encode(dtype: DType, value: usize) -> u64 {
    match dtype {
        DType::F32 => u64::from((value as f32).to_bits()),
        DType::F64 => (value as f64).to_bits(),
        DType::F16 => u64::from(f16::from_f32(value as f32).to_bits()),
        DType::BF16 => u64::from(bf16::from_f32(value as f32).to_bits()),
        _ => value as u64,
    }
}

/// SplitMix64 over three numbers.
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
    fn a_run_finds_every_changed_element() {
        for (_, dtype) in DTYPES {
            let p = Pattern { dtype, redop: None, ranks: 2, format: None, seed: 9 };
            let elements = 2 * PERIOD + 77;
            let run = p.of_input(1, 1234, elements);
            let mut data = vec![0; run.len()];
            run.fill(&mut data);
            assert_eq!(run.wrong(&data), 0);
            // The run is the same wherever one begins to read it.
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
