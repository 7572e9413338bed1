//! What the fake driver makes of the kernels' names and arguments, against the one oracle there is. (What the kernels
//! themselves do is tested in smddp-core, and on a GPU.)

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod common;

use common::*;
use smddp_cuda::mock::reduce;
use smddp_cuda::{Device, Element, Fold, Reduction, Stream};

/// Elements, enough for packs of all sizes and a rest.
const COUNT: usize = 203;

/// Numbers that show how things are rounded and wrapped; no NaN, whose bits are nobody's promise.
fn source(element: Element, seed: u64) -> Vec<u8> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        state >> 16
    };
    let mut number = || {
        let bits = next();
        let float = (bits % 4001) as f64 / 64.0 - 31.0;
        match element {
            Element::F32 | Element::C64 => (float as f32).to_le_bytes().to_vec(),
            Element::F64 | Element::C128 => float.to_le_bytes().to_vec(),
            Element::F16 => half::f16::from_f64(float).to_le_bytes().to_vec(),
            Element::BF16 => half::bf16::from_f64(float).to_le_bytes().to_vec(),
            Element::Bool => vec![(bits % 2) as u8],
            _ => bits.wrapping_mul(0x9E37_79B9_7F4A).to_le_bytes()[..element.size()].to_vec(),
        }
    };
    let mut all = Vec::new();
    while all.len() < COUNT * element.size() {
        all.extend(number());
    }
    all
}

fn check(
    device: &dyn Device,
    stream: Stream,
    element: Element,
    fold: Fold,
    last: (Option<u32>, Option<f64>),
) {
    let (divide, times) = last;
    let sources: Vec<Vec<u8>> = (1..=3).map(|seed| source(element, seed)).collect();
    let slices: Vec<&[u8]> = sources.iter().map(Vec::as_slice).collect();
    let Ok(expected) = reduce::reduce(element, fold, divide, times, &slices) else { return };
    let at: Vec<u64> = sources.iter().map(|source| host(device, source)).collect();
    let to = host(device, &vec![0; expected.len()]);
    let reduction = Reduction { element, fold, sources: at.clone(), to, count: COUNT, divide, times };
    // SAFETY: all live until the stream is empty.
    unsafe {
        device.reduce(stream, &reduction).unwrap();
        device.synchronize(stream).unwrap();
        assert_eq!(bytes(to, expected.len()), expected, "{element:?} {fold:?} {last:?}");
        for memory in at.into_iter().chain([to]) {
            device.free_host(memory as *mut u8);
        }
    }
}

#[test]
fn the_fake_reduces_every_type_and_fold_as_the_mock_does() {
    with("the_fake_reduces_every_type_and_fold_as_the_mock_does", &[], || {
        let device = device(0);
        let stream = device.create_stream().unwrap();
        for element in Element::ALL {
            for fold in Fold::ALL {
                for last in [(None, None), (Some(3), None), (Some(4), None), (None, Some(0.3))] {
                    check(&*device, stream, element, fold, last);
                }
            }
        }
        assert!(calls(c"cuLaunchKernel") > 100, "{}", calls(c"cuLaunchKernel"));
    });
}
