//! Tests of the wire formats of f32 between nodes.

use smddp_plan::Format;

use super::super::compression::{decode_at, encode_at, round};
use super::{Guarded, Level, Random, oracle};
use crate::call::types::DType;

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_ne_bytes([b[0], b[1], b[2], b[3]])).collect()
}

fn bytes(floats: &[f32]) -> Vec<u8> {
    floats.iter().flat_map(|x| x.to_ne_bytes()).collect()
}

/// Encodes and decodes at a level.
fn round_trip(level: Level, format: Format, input: &[f32], offset: usize) -> (Vec<u8>, Vec<f32>) {
    let source = Guarded::holding(&bytes(input), offset);
    let (mut encoded, mut out) =
        (Guarded::new(format.bytes(input.len()), offset), Guarded::new(4 * input.len(), offset));
    // SAFETY: all three have room for the elements, and the level is this machine's.
    unsafe {
        encode_at(level, format, encoded.mut_ptr(), source.ptr(), input.len());
        decode_at(level, format, out.mut_ptr(), encoded.ptr(), input.len());
    }
    (encoded.content().to_vec(), floats(out.content()))
}

/// Finite numbers of very different magnitudes.
fn ordinary_values(n: usize, seed: u64) -> Vec<f32> {
    let mut random = Random(seed);
    let raw = floats(&oracle::elements(DType::F32, n, &mut random));
    raw.into_iter().map(|x| if x.is_finite() { x.clamp(-1e4, 1e4) } else { 1.0 }).collect()
}

#[test]
fn levels_agree_and_rounding_is_idempotent() {
    for format in Format::ALL {
        for n in [1, 2, 15, 16, 17, 255, 256, 257, 1_000, 1_024, 3_333] {
            for offset in [0, 1, 3] {
                let mut random = Random(n as u64);
                let any = floats(&oracle::elements(DType::F32, n, &mut random));
                for input in [ordinary_values(n, n as u64), any] {
                    let (encoded, out) = round_trip(Level::Scalar, format, &input, offset);
                    for &level in Level::available() {
                        let found = round_trip(level, format, &input, offset);
                        assert!(
                            found.0 == encoded && bytes(&found.1) == bytes(&out),
                            "{format:?} {level:?} {n}"
                        );
                    }
                    let mut rounded = Guarded::holding(&bytes(&input), offset);
                    for _ in 0..2 {
                        let place = rounded.mut_ptr();
                        // SAFETY: it holds the elements.
                        unsafe { round(format, place, place, n) };
                        let same =
                            |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
                        assert!(floats(rounded.content()).iter().zip(&out).all(same), "{format:?} {n}");
                    }
                }
            }
        }
    }
}

#[test]
fn rounding_error_is_within_the_format_precision() {
    let input = ordinary_values(5_000, 1);
    for (format, relative) in [(Format::Bf16, 1.0 / 256.0), (Format::F16, 1.0 / 2048.0)] {
        let (_, out) = round_trip(Level::best(), format, &input, 0);
        for (x, y) in input.iter().zip(out) {
            // Below 2^-14, binary16 has steps of 2^-24.
            assert!(
                (x - y).abs() <= relative * x.abs() + f32::from_bits((127 - 25) << 23),
                "{format:?} {x} {y}"
            );
        }
    }
    let (_, out) = round_trip(Level::best(), Format::Int8, &input, 0);
    for (x, y) in input.chunks(256).zip(out.chunks(256)) {
        let most = x.iter().fold(0f32, |most, x| most.max(x.abs()));
        assert!(x.iter().zip(y).all(|(x, y)| (x - y).abs() <= most / 127.0 * 0.501), "{most}");
    }
}

#[test]
fn non_finite_values_are_preserved() {
    for special in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut input = ordinary_values(700, 2);
        input[300] = special;
        for format in [Format::Bf16, Format::F16] {
            let (_, out) = round_trip(Level::best(), format, &input, 0);
            assert!(out[300].is_nan() && special.is_nan() || out[300] == special, "{format:?} {special}");
            assert!(out.iter().filter(|x| !x.is_finite()).count() == 1);
        }
        // The scale, and thus the NaN, applies to the whole group.
        let (_, out) = round_trip(Level::best(), Format::Int8, &input, 0);
        assert!(out.iter().enumerate().all(|(i, x)| x.is_nan() == (256..512).contains(&i)));
    }
    let (_, out) = round_trip(Level::best(), Format::Int8, &[1e-38, -1e-40, 0.0], 0);
    assert_eq!(out, [0.0; 3]);
    let (_, out) = round_trip(Level::best(), Format::Int8, &[f32::MAX, 0.0, f32::MIN], 0);
    assert!(out[0] >= f32::MAX * 0.99 && out[0].is_finite() && out[1] == 0.0 && out[2] == -out[0], "{out:?}");
}
