//! Hashes of the bits of all reductions, to compare machines of any architecture.

use std::ptr::null_mut;

use ::half::{bf16, f16};

use super::super::{Kernel, premultiply};
use super::{Guarded, Level, Random};
use crate::call::types::{DType, RedOp};

const SUMS: &[RedOp] = &[RedOp::Sum, RedOp::Avg];
const PRODUCTS: &[RedOp] = &[RedOp::Prod];
const ORDER: &[RedOp] = &[RedOp::Min, RedOp::Max];
const BITS: &[RedOp] = &[RedOp::Band, RedOp::Bor, RedOp::Bxor];

/// Hashes of sums with averages, premultiplied elements, products, min and max, bitwise operations; 0 if unsupported.
#[rustfmt::skip]
const EXPECTED: [(DType, [u64; 5]); 15] = [
    (DType::F32, [0x7c6f6826ce4f36ba, 0xa429a8b705fbe3af, 0x4ec78674b274dfea, 0xfa93fddcc4ecc70d, 0]),
    (DType::F64, [0x4c87db148a718684, 0xcc2b35bbf4283b3e, 0x4936a5e4c971b1ac, 0x834a40dc1e5b722c, 0]),
    (DType::F16, [0xbce4043d353674bd, 0x7b97b35a5b310c3e, 0x71d39f2dccfba5d5, 0x4266ff6b888daee1, 0]),
    (DType::BF16, [0x6b26b98bc6bf7a2f, 0xb5d9d1382054f9f4, 0xe7ce7706f1bdfa17, 0x317a44c2ed66cdca, 0]),
    (DType::I8, [0xbd4a0eb91a9855df, 0x0ed62e510f80bc8c, 0xc340a7cd4f1a3308, 0x28823714ab08584c, 0x6d03b11f08d1ee47]),
    (DType::I16, [0xb162dad5e33f1699, 0xdfe9808f615c0524, 0xcd67fdfa889c9349, 0x4035834d36766c49, 0xb779a945106da5be]),
    (DType::I32, [0xabe5901dedce2820, 0x154ae5fa74f60eff, 0xe068067d5261e7b3, 0x797832319cf90bc3, 0xc7f326d572fa9d77]),
    (DType::I64, [0xb11f11708c469db1, 0x952e4dd03d256013, 0x5fb7b6c660382a4c, 0xf9a5872e30306938, 0x058b538b58910895]),
    (DType::U8, [0x4a974bb6b8f4a997, 0x5ca9d80564d5003c, 0xc340a7cd4f1a3308, 0xdb1543f9cf503d9f, 0x6d03b11f08d1ee47]),
    (DType::U16, [0x1d74a5c38e68d6c4, 0xe471d26aba837de2, 0xcd67fdfa889c9349, 0x60938ac2cc22bafd, 0xb779a945106da5be]),
    (DType::U32, [0x04d6e004bea1680d, 0xaa0f1e7f41ee5951, 0xe068067d5261e7b3, 0xb061240fc1de6184, 0xc7f326d572fa9d77]),
    (DType::U64, [0x6a5d09db7f609513, 0xadaed12d76090266, 0x5fb7b6c660382a4c, 0x649094c323aae261, 0x058b538b58910895]),
    (DType::Bool, [0xdfb0ce1d3743d70d, 0, 0x962c8778e2f19489, 0xe1fce86c1f718beb, 0x98c2b61fc5f08114]),
    (DType::C64, [0x91284c04a675a12c, 0x2e9476d11e609138, 0x1ecb982b3602497d, 0, 0]),
    (DType::C128, [0x5de5e0577755209a, 0xcd7aee06e911a8e5, 0x5471f833e7ea1acb, 0, 0]),
];

/// FNV-1a.
struct Hash(u64);

impl Hash {
    fn new() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }

    fn add(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
}

/// Of each sign: zero, infinity, subnormals, NaNs, the largest and the smallest normal number.
macro_rules! special_values {
    ($float:ty, $bits:ty, $quiet:expr) => {{
        let one_up = |value: $float| value.to_bits() + 1;
        let positive: [$bits; 9] = [
            0,
            1,
            <$float>::MIN_POSITIVE.to_bits() - 1,
            <$float>::MIN_POSITIVE.to_bits(),
            <$float>::MAX.to_bits(),
            <$float>::INFINITY.to_bits(),
            one_up(<$float>::INFINITY),
            <$float>::INFINITY.to_bits() | $quiet | 5,
            <$bits>::MAX >> 1,
        ];
        let sign: $bits = 1 << (<$bits>::BITS - 1);
        positive
            .into_iter()
            .flat_map(|bits| [bits, bits | sign])
            .map(|bits| bits.to_ne_bytes().to_vec())
            .collect()
    }};
}

/// Special values of a float dtype, or of a part of a complex number; none for integers.
fn special_values(dtype: DType) -> Vec<Vec<u8>> {
    match dtype {
        DType::F32 | DType::C64 => special_values!(f32, u32, 1 << 22),
        DType::F64 | DType::C128 => special_values!(f64, u64, 1 << 51),
        DType::F16 => special_values!(f16, u16, 1 << 9),
        DType::BF16 => special_values!(bf16, u16, 1 << 6),
        _ => Vec::new(),
    }
}

/// `n` elements of random bits. Every third float, or part of a complex number, is a special value.
fn elements(dtype: DType, n: usize, random: &mut Random) -> Vec<u8> {
    let mut bytes = random.bytes(n * dtype.size());
    let specials = special_values(dtype);
    if let Some(size) = specials.first().map(Vec::len) {
        for element in bytes.chunks_exact_mut(size) {
            let choice = random.next() as usize >> 16;
            if choice.is_multiple_of(3) {
                element.copy_from_slice(&specials[choice / 3 % specials.len()]);
            }
        }
    }
    bytes
}

/// Replaces all NaNs by one. Which NaN an operation returns without a NaN operand, or with several, depends on the
/// processor.
fn canonicalise_nans(dtype: DType, bytes: &mut [u8]) {
    macro_rules! canonical {
        ($float:ty) => {
            for element in bytes.chunks_exact_mut(size_of::<$float>()) {
                if <$float>::from_ne_bytes((&*element).try_into().unwrap()).is_nan() {
                    element.copy_from_slice(&<$float>::NAN.to_ne_bytes());
                }
            }
        };
    }
    match dtype {
        DType::F32 | DType::C64 => canonical!(f32),
        DType::F64 | DType::C128 => canonical!(f64),
        DType::F16 => canonical!(f16),
        DType::BF16 => canonical!(bf16),
        _ => {}
    }
}

/// Hashes reductions with several lengths, alignments, numbers of inputs and divisors.
fn hash_reductions(level: Level, dtype: DType, redops: &[RedOp]) -> u64 {
    let (mut hash, mut random, mut supported) = (Hash::new(), Random(0x5eed), false);
    for &redop in redops {
        let Some(kernel) = Kernel::at(level, dtype, redop) else { continue };
        supported = true;
        for (n, inputs, to, from) in
            [(1, 2, 0, 0), (7, 1, 0, 1), (63, 3, 8, 3), (1000, 2, 0, 0), (4099, 9, 1, 5)]
        {
            let bytes = n * dtype.size();
            let srcs: Vec<_> =
                (0..inputs).map(|k| Guarded::holding(&elements(dtype, n, &mut random), from * k)).collect();
            let pointers: Vec<_> = srcs.iter().map(Guarded::ptr).collect();
            let scales: &[_] = if redop == RedOp::Avg { &[Some(3), Some(8), Some(70_001)] } else { &[None] };
            for &scale in scales {
                let mut out = Guarded::new(bytes, to);
                // SAFETY: all buffers are owned here and hold n elements; the level is available.
                unsafe { kernel.run(out.mut_ptr(), null_mut(), &pointers, n, scale, true) };
                let mut content = out.content().to_vec();
                if !matches!(redop, RedOp::Min | RedOp::Max) {
                    canonicalise_nans(dtype, &mut content);
                }
                hash.add(&content);
            }
        }
    }
    if supported { hash.0 } else { 0 }
}

/// Hashes `premultiply`, which runs at the best level only.
fn hash_premultiplied(dtype: DType) -> u64 {
    let (mut hash, mut random, mut supported) = (Hash::new(), Random(0x5eed), false);
    for factor in [0.3, -1.5, 1e30, f64::INFINITY] {
        let src = Guarded::holding(&elements(dtype, 1001, &mut random), 3);
        let mut out = Guarded::new(1001 * dtype.size(), 1);
        // SAFETY: both buffers are owned here and hold 1,001 elements.
        supported |= unsafe { premultiply(dtype, out.mut_ptr(), src.ptr(), 1001, factor) };
        let mut content = out.content().to_vec();
        canonicalise_nans(dtype, &mut content);
        hash.add(&content);
    }
    if supported { hash.0 } else { 0 }
}

#[test]
fn every_architecture_gives_the_same_bits() {
    for &level in Level::available() {
        let found: Vec<_> = DType::ALL
            .into_iter()
            .map(|dtype| {
                let of = |redops| hash_reductions(level, dtype, redops);
                (dtype, [of(SUMS), hash_premultiplied(dtype), of(PRODUCTS), of(ORDER), of(BITS)])
            })
            .filter(|(_, hashes)| hashes.iter().any(|hash| *hash != 0))
            .collect();
        let rows: Vec<_> = found.iter().map(|row| format!("{row:x?}")).collect();
        assert!(found == EXPECTED, "{level:?}:\n{}", rows.join("\n"));
    }
}

#[test]
fn single_nan_keeps_sign_and_payload_and_becomes_quiet() {
    // For each element type: one, a signalling NaN with a payload, and the same NaN quiet.
    let cases: [(DType, [Vec<u8>; 3]); 4] = [
        (DType::F32, [0x3f80_0000_u32, 0xff85_4321, 0xffc5_4321].map(|bits| bits.to_ne_bytes().to_vec())),
        (
            DType::F64,
            [0x3ff0_0000_0000_0000_u64, 0xfff43210fedcba98, 0xfffc3210fedcba98]
                .map(|bits| bits.to_ne_bytes().to_vec()),
        ),
        (DType::F16, [0x3c00_u16, 0xfd55, 0xff55].map(|bits| bits.to_ne_bytes().to_vec())),
        (DType::BF16, [0x3f80_u16, 0xff95, 0xffd5].map(|bits| bits.to_ne_bytes().to_vec())),
    ];
    for (dtype, [one, signalling, quiet]) in cases {
        for &level in Level::available() {
            for redop in [RedOp::Sum, RedOp::Prod] {
                for holder in 0..3 {
                    let inputs: Vec<_> = (0..3)
                        .map(|k| if k == holder { signalling.repeat(77) } else { one.repeat(77) })
                        .map(|content| Guarded::holding(&content, 0))
                        .collect();
                    let pointers: Vec<_> = inputs.iter().map(Guarded::ptr).collect();
                    let mut out = Guarded::new(77 * dtype.size(), 0);
                    let kernel = Kernel::at(level, dtype, redop).unwrap();
                    // SAFETY: all buffers are owned here and hold 77 elements; the level is available.
                    unsafe { kernel.run(out.mut_ptr(), null_mut(), &pointers, 77, None, false) };
                    assert!(out.content() == quiet.repeat(77), "{level:?} {dtype:?} {redop:?} {holder}");
                }
            }
        }
    }
}
