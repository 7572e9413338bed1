//! The fake driver's reductions are bit-identical to this crate's kernels. (The device kernels have separate tests,
//! next to their source and on a GPU.)

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[expect(dead_code, reason = "each test file uses a part of it")]
mod common;

use common::shm_ranks;
use half::{bf16, f16};
use smddp_core::{Blocks, Call, Collective, Communicator, DType, Options, RedOp};
use smddp_cuda::driver::Cuda;
use smddp_cuda::{Address, Device, Element, Fold, Reduction};

const COUNT: usize = 300;

fn scramble(mut x: u64) -> u64 {
    x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x ^ (x >> 27)
}

/// Values of all magnitudes. Floats include infinities, zeros of both signs, and NaNs at a different index on each
/// rank.
fn data(rank: usize, element: Element) -> Vec<u8> {
    let float = |i: usize, part: u64| {
        let x = scramble((rank * 1_000_003 + i) as u64 * 2 + part);
        match i % 16 {
            3 if i / 16 % 4 == rank => f64::NAN,
            5 => [0.0, -0.0][(x % 2) as usize],
            7 if x.is_multiple_of(4) => f64::INFINITY,
            9 => (x % 7) as f64 - 3.0,
            _ => ((x >> 40) as f64 - 8_388_608.0) * 2f64.powi((x % 23) as i32 - 30),
        }
    };
    let of = |i: usize| -> Vec<u8> {
        match element {
            Element::F32 => (float(i, 0) as f32).to_le_bytes().to_vec(),
            Element::F64 => float(i, 0).to_le_bytes().to_vec(),
            Element::F16 => f16::from_f64(float(i, 0)).to_le_bytes().to_vec(),
            Element::BF16 => bf16::from_f64(float(i, 0)).to_le_bytes().to_vec(),
            Element::C64 => [(float(i, 0) as f32).to_le_bytes(), (float(i, 1) as f32).to_le_bytes()].concat(),
            Element::C128 => [float(i, 0).to_le_bytes(), float(i, 1).to_le_bytes()].concat(),
            Element::Bool => vec![(scramble((rank * COUNT + i) as u64) % 3) as u8],
            _ => {
                let x = scramble((rank * 1_000_003 + i) as u64);
                // Includes small integers, for which quotients differ.
                let x = if i.is_multiple_of(2) { x } else { (x as i64 >> 58) as u64 };
                x.to_le_bytes()[..element.size()].to_vec()
            }
        }
    };
    (0..COUNT).flat_map(of).collect()
}

/// Returns the bits, with NaNs replaced by one value: their payload and sign are unspecified.
fn comparable(element: Element, bytes: &[u8]) -> Vec<u64> {
    let part = match element {
        Element::C64 => Element::F32,
        Element::C128 => Element::F64,
        _ => element,
    };
    let bits = |bytes: &[u8]| {
        let mut word = [0; 8];
        word[..bytes.len()].copy_from_slice(bytes);
        u64::from_le_bytes(word)
    };
    let plain = |word: u64| {
        let nan = match part {
            Element::F32 => f32::from_bits(word as u32).is_nan(),
            Element::F64 => f64::from_bits(word).is_nan(),
            Element::F16 => f16::from_bits(word as u16).is_nan(),
            Element::BF16 => bf16::from_bits(word as u16).is_nan(),
            _ => false,
        };
        if nan { u64::MAX - 1 } else { word }
    };
    bytes.chunks(part.size()).map(|bytes| plain(bits(bytes))).collect()
}

fn all_reduce(comm: &Communicator, element: Element, redop: RedOp) -> Option<Vec<u8>> {
    let dtype = DType::from_u8(element as u8).unwrap();
    let mut input = data(comm.rank(), element);
    let mut output = vec![0xa5; input.len()];
    let flat = |data: &mut Vec<u8>| Blocks::Flat { ptr: data.as_mut_ptr(), count: COUNT };
    let call = Call {
        collective: Collective::AllReduce,
        dtype,
        redop,
        root: 0,
        input: flat(&mut input),
        output: flat(&mut output),
    };
    // SAFETY: the buffers outlive the synchronous call.
    unsafe { comm.run(&call, Options::default()) }.ok().map(|_| output)
}

/// Reduces the sources on the device; `None` if it rejects the reduction.
fn reduce(
    device: &Device,
    (element, fold): (Element, Fold),
    (divide, times): (Option<u32>, Option<f64>),
    sources: &[Vec<u8>],
) -> Option<Vec<u8>> {
    let stream = device.create_stream().unwrap();
    let host = |data: &[u8]| {
        let memory = device.allocate_host(data.len()).unwrap();
        // SAFETY: new memory of that size.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), memory, data.len()) };
        memory as Address
    };
    let (sources, to) = (sources.iter().map(|source| host(source)).collect::<Vec<_>>(), host(&sources[0]));
    let reduction = Reduction { element, fold, sources: sources.clone(), to, count: COUNT, divide, times };
    // SAFETY: all memory remains allocated until the stream is empty.
    unsafe {
        let done = device.reduce(stream, &reduction);
        device.synchronize(stream).unwrap();
        let found = std::slice::from_raw_parts(to as *const u8, COUNT * element.size()).to_vec();
        sources.into_iter().chain([to]).for_each(|memory| device.free_host(memory as *mut u8));
        device.destroy_stream(stream);
        done.ok().map(|()| found)
    }
}

/// Computes a collective's result from the inputs of all ranks on the device.
fn device_result(device: &Device, element: Element, redop: RedOp, inputs: &[Vec<u8>]) -> Option<Vec<u8>> {
    let (fold, divide) = match redop {
        RedOp::Sum | RedOp::PremulSum(_) => (Fold::Sum, None),
        RedOp::Avg => (Fold::Sum, Some(inputs.len() as u32)),
        RedOp::Prod => (Fold::Prod, None),
        RedOp::Min => (Fold::Min, None),
        RedOp::Max => (Fold::Max, None),
        RedOp::Band => (Fold::Band, None),
        RedOp::Bor => (Fold::Bor, None),
        RedOp::Bxor => (Fold::Bxor, None),
    };
    let RedOp::PremulSum(factor) = redop else {
        return reduce(device, (element, fold), (divide, None), inputs);
    };
    let scale =
        |input: &Vec<u8>| reduce(device, (element, fold), (None, Some(factor)), std::slice::from_ref(input));
    reduce(device, (element, fold), (None, None), &inputs.iter().map(scale).collect::<Option<Vec<_>>>()?)
}

#[test]
fn device_reductions_are_bit_identical_to_host_kernels() {
    let device = Cuda::open(Some(fake_libcuda::PATH.as_ref())).unwrap().device(0).unwrap();
    let sums = [RedOp::Sum, RedOp::Avg, RedOp::PremulSum(0.7), RedOp::PremulSum(-1.0e10)];
    let others = [RedOp::Prod, RedOp::Min, RedOp::Max, RedOp::Band, RedOp::Bor, RedOp::Bxor];
    let redops: Vec<RedOp> = sums.into_iter().chain(others).collect();
    // The average of four ranks needs no division.
    for n in [3, 4] {
        let found = shm_ranks(n, |comm| {
            let each = |element: Element| redops.iter().map(move |redop| all_reduce(comm, element, *redop));
            Element::ALL.into_iter().flat_map(each).collect::<Vec<_>>()
        });
        let mut found = found.into_iter().next().unwrap().into_iter();
        let mut compared = 0;
        for element in Element::ALL {
            let inputs: Vec<Vec<u8>> = (0..n).map(|rank| data(rank, element)).collect();
            for redop in &redops {
                let case = format!("{element:?} by {redop:?} of {n}");
                let (found, expected) =
                    (found.next().unwrap(), device_result(&device, element, *redop, &inputs));
                assert_eq!(found.is_some(), expected.is_some(), "{case}");
                if let (Some(found), Some(expected)) = (found, expected) {
                    assert_eq!(comparable(element, &found), comparable(element, &expected), "{case}");
                    compared += 1;
                }
            }
        }
        // Four floats with seven reductions, eight integers with ten, bool with eight (no factors), two complex with
        // five.
        assert_eq!(compared, 4 * 7 + 8 * 10 + 8 + 2 * 5);
    }
}
