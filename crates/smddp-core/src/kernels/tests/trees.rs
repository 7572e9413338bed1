//! Tree reductions equal their combinations made one by one.

use std::ptr::null_mut;

use super::super::Kernel;
use super::{Level, Random, oracle};
use crate::call::types::{DType, RedOp};

/// Combines two values at a time and rounds each result; divides in the last combination.
fn combine_one_by_one(
    kernel: Kernel,
    inputs: &[Vec<u8>],
    joins: &[usize],
    n: usize,
    scale: Option<u32>,
) -> Vec<u8> {
    let mut stack: Vec<Vec<u8>> = Vec::new();
    for (i, (input, joins)) in inputs.iter().zip(joins).enumerate() {
        stack.push(input.clone());
        for _ in 0..*joins {
            let (right, left) = (stack.pop().unwrap(), stack.pop().unwrap());
            let last = i + 1 == inputs.len() && stack.is_empty();
            let mut out = vec![0u8; left.len()];
            let (srcs, scale) = ([left.as_ptr(), right.as_ptr()], if last { scale } else { None });
            // SAFETY: all three have `n` elements, and `out` is none of the others.
            unsafe { kernel.run(out.as_mut_ptr(), null_mut(), &srcs, n, scale, false) };
            stack.push(out);
        }
    }
    stack.pop().unwrap()
}

#[test]
fn tree_reduction_rounds_at_each_combination() {
    let joins: [&[usize]; 4] = [&[0, 1, 1], &[0, 1, 0, 2], &[0, 1, 0, 2, 0, 1, 2], &[0; 0]];
    let full: Vec<usize> = (0..32u32).map(|i| (i + 1).trailing_zeros() as usize).collect();
    for joins in joins.into_iter().chain([&full[..]]).filter(|joins| !joins.is_empty()) {
        for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16, DType::I16, DType::C128] {
            for redop in [RedOp::Sum, RedOp::Avg, RedOp::Prod] {
                for n in [1, 7, 129, 1_025, 3_000] {
                    let kernel = Kernel::at(Level::best(), dtype, redop).unwrap();
                    let (size, scale) = (dtype.size(), (redop == RedOp::Avg).then_some(joins.len() as u32));
                    let mut random = Random(n as u64);
                    let mut inputs: Vec<Vec<u8>> =
                        joins.iter().map(|_| oracle::elements(dtype, n, &mut random)).collect();
                    let want = combine_one_by_one(kernel, &inputs, joins, n, scale);
                    // Into separate memory and a slot, and over its second input.
                    let (mut out, mut slot) = (vec![0u8; n * size], vec![0u8; n * size]);
                    let srcs: Vec<*const u8> = inputs.iter().map(|input| input.as_ptr()).collect();
                    let to = (out.as_mut_ptr(), slot.as_mut_ptr());
                    // SAFETY: all sources and both destinations have `n` elements, and none overlaps.
                    unsafe { kernel.run_tree(to, (&srcs, joins), (n, size), scale, true) };
                    let case = format!("{dtype:?} {redop:?} of {n}, {joins:?}");
                    assert!(out == want && out == slot, "{case}");
                    let second = inputs[1].as_mut_ptr();
                    let srcs: Vec<*const u8> = inputs.iter().map(|input| input.as_ptr()).collect();
                    // SAFETY: as above; the destination is exactly one of the sources.
                    unsafe { kernel.run_tree((second, null_mut()), (&srcs, joins), (n, size), scale, false) };
                    assert!(inputs[1] == want, "{case}, in place");
                }
            }
        }
    }
}
