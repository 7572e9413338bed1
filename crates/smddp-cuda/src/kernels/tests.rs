use std::collections::BTreeSet;

use sha2::{Digest, Sha256};

use super::{Args, DIVIDE, KEEP, Launch, THREADS, TIMES, USUAL_BLOCKS, copy, launch, ptx, round};
use crate::{Copy, Element, Error, Fold, MAX_SOURCES, Reduction, Rounding};

/// A sum of two arrays that begin `at` bytes after a pack boundary.
fn sum(element: Element, count: usize, at: u64) -> Reduction {
    let sources = vec![0x10_0000 + at, 0x20_0000 + at];
    Reduction { element, fold: Fold::Sum, sources, to: 0x30_0000 + at, count, divide: None, times: None }
}

fn launched(reduction: &Reduction) -> Launch {
    launch(reduction, USUAL_BLOCKS).expect("a valid reduction").expect("elements")
}

fn text() -> &'static str {
    ptx().to_str().expect("PTX is ASCII")
}

#[test]
fn ptx_matches_the_hash_of_its_source() {
    let sum = Sha256::digest(include_bytes!("../../kernels/reduce.cu"));
    let hex: String = sum.iter().map(|byte| format!("{byte:02x}")).collect();
    let recorded = text().lines().find_map(|line| line.strip_prefix("// source: sha256 "));
    assert_eq!(recorded, Some(hex.as_str()), "reduce.cu was changed: run scripts/kernels.py");
}

#[test]
fn ptx_targets_drivers_since_525() {
    assert!(text().contains("\n.version 8.0\n.target sm_70\n.address_size 64\n"));
}

#[test]
fn ptx_has_no_fused_approximate_or_flushing_instructions() {
    let code: Vec<&str> = text().lines().filter(|line| !line.starts_with("//")).collect();
    for word in ["fma", "mad.f", "mad.rn.f", ".approx", ".ftz", ".full", "add.f", "mul.f", "div.f", "sub.f"] {
        assert_eq!(code.iter().find(|line| line.contains(word)), None, "{word}");
    }
}

#[test]
fn launches_and_kernels_match() {
    let exported: BTreeSet<&str> = text()
        .lines()
        .filter_map(|line| line.strip_prefix(".visible .entry "))
        .map(|line| line.trim_end_matches('('))
        .collect();
    let mut launched = BTreeSet::new();
    for element in Element::ALL {
        for fold in Fold::ALL {
            if let Ok(Some(launch)) = launch(&Reduction { fold, ..sum(element, 1, 0) }, 1) {
                launched.insert(launch.name.to_str().expect("ASCII"));
            }
        }
    }
    let small = [Copy { to: 16, from: 32, bytes: 1 }];
    for rounding in [Rounding::Bf16, Rounding::F16, Rounding::Int8] {
        let rounded = round(rounding, (16, 32), 1, 1).ok().flatten().expect("an element");
        launched.insert(rounded.name.to_str().expect("ASCII"));
    }
    launched.insert(copy(&small).expect("few bytes").name.to_str().expect("ASCII"));
    assert_eq!(launched, exported);
}

#[test]
fn kernel_parameters_match_the_arguments() {
    let parameters = text().lines().filter(|line| line.contains(".param .align")).count();
    let ours = format!("_param_0[{}]", size_of::<Args>());
    assert_eq!(text().lines().filter(|line| line.ends_with(&ours)).count(), parameters);
    assert_eq!(text().matches(&format!("\n.maxntid {THREADS},1,1\n")).count(), parameters);
}

/// `n` copies of `bytes` bytes each, which begin `at` bytes after a pack boundary.
fn copies(n: usize, bytes: usize, at: u64) -> Vec<Copy> {
    let place = |base: u64, i: usize| base + i as u64 * 0x10_0000 + at;
    (0..n).map(|i| Copy { to: place(0x1000_0000, i), from: place(0x2000_0000, i), bytes }).collect()
}

#[test]
fn few_small_copies_of_one_size_are_one_launch_on_at_most_eight_sms() {
    let parts = |n, bytes, at| {
        copy(&copies(n, bytes, at)).map(|launch| (launch.blocks, launch.args.finish, launch.args.packs))
    };
    assert_eq!(parts(1, 1024, 0), Some((1, 16, 64)));
    assert_eq!(parts(2, 1024, 4), Some((2, 4, 256)));
    assert_eq!(parts(2, 1024, 1), Some((4, 4, 0)));
    assert_eq!(parts(2, 128 << 10, 0), Some((8, 16, 8192)));
    assert_eq!(parts(3, 80 << 10, 0), Some((6, 16, 5120)));
    assert_eq!(parts(8, 32 << 10, 0), Some((USUAL_BLOCKS, 16, 2048)));
    for (n, bytes, at) in
        [(2, (128 << 10) + 16, 0), (2, (32 << 10) + 4, 4), (2, (8 << 10) + 1, 1), (9, 1, 0), (1, 0, 0)]
    {
        assert_eq!(parts(n, bytes, at), None, "{n} of {bytes} at {at}");
    }
    let mut mixed = copies(2, 64, 0);
    mixed[1].bytes = 32;
    assert_eq!(copy(&mixed), None);
    assert_eq!(copy(&[]), None);
}

#[test]
fn unsupported_element_and_operator_pairs_are_rejected() {
    for element in Element::ALL {
        for fold in Fold::ALL {
            let bits = matches!(fold, Fold::Band | Fold::Bor | Fold::Bxor);
            let order = matches!(fold, Fold::Min | Fold::Max);
            let can = match element {
                Element::F32 | Element::F64 | Element::F16 | Element::BF16 => !bits,
                Element::C64 | Element::C128 => !bits && !order,
                _ => true,
            };
            let reduction = Reduction { fold, ..sum(element, 1, 0) };
            assert_eq!(launch(&reduction, 1).is_ok(), can, "{element:?} {fold:?}");
        }
    }
}

#[test]
fn invalid_reductions_are_rejected_even_when_empty() {
    let plain = sum(Element::F32, 0, 0);
    let bad = [
        Reduction { sources: Vec::new(), ..plain.clone() },
        Reduction { sources: vec![0; MAX_SOURCES + 1], ..plain.clone() },
        Reduction { fold: Fold::Bxor, ..plain.clone() },
        Reduction { fold: Fold::Max, divide: Some(2), ..plain.clone() },
        Reduction { fold: Fold::Prod, times: Some(2.0), ..plain.clone() },
        Reduction { divide: Some(2), times: Some(2.0), ..plain.clone() },
        Reduction { element: Element::Bool, times: Some(2.0), ..plain.clone() },
        Reduction { count: usize::MAX / 2, ..plain.clone() },
        sum(Element::F32, 0, 2),
        sum(Element::C64, 0, 2),
        Reduction { to: 0x30_0001, ..sum(Element::BF16, 0, 0) },
    ];
    for reduction in bad {
        assert!(matches!(launch(&reduction, 1), Err(Error::Invalid(_))), "{reduction:?}");
    }
    assert_eq!(launch(&plain, 1), Ok(None));
}

#[test]
fn launch_uses_no_more_blocks_than_allowed_and_needed() {
    let blocks = |element, count, at| launched(&sum(element, count, at)).blocks;
    assert_eq!(blocks(Element::F32, 1, 0), 1);
    assert_eq!(blocks(Element::F32, 4 * 512, 0), 1);
    assert_eq!(blocks(Element::F32, 4 * 512 + 4, 0), 2);
    assert_eq!(blocks(Element::F32, 1 << 40, 0), USUAL_BLOCKS);
    for most in [1, 7, 64] {
        let large = launch(&sum(Element::F32, 1 << 40, 0), most).expect("a sum").expect("elements");
        assert_eq!(large.blocks, most);
    }
    // Shorter than the part before the first pack.
    assert_eq!(blocks(Element::U8, 3, 9), 1);
    let mixed = Reduction { to: 0x30_0004, ..sum(Element::F32, 4 * 512, 0) };
    assert_eq!(launched(&mixed).blocks, 4);
}

#[test]
fn packs_start_where_all_arrays_are_aligned() {
    let parts = |reduction: &Reduction| {
        let Args { head, packs, count, .. } = launched(reduction).args;
        (head, packs, count)
    };
    assert_eq!(parts(&sum(Element::F32, 100, 0)), (0, 25, 100));
    assert_eq!(parts(&sum(Element::F32, 100, 4)), (3, 24, 100));
    assert_eq!(parts(&sum(Element::BF16, 100, 14)), (1, 12, 100));
    // In kernel elements: parts of complex numbers, bytes for bitwise operators.
    assert_eq!(parts(&sum(Element::C128, 10, 8)), (1, 9, 20));
    assert_eq!(parts(&Reduction { fold: Fold::Band, ..sum(Element::I32, 10, 1) }), (15, 1, 40));
    // A product needs whole complex numbers in its packs.
    assert_eq!(parts(&Reduction { fold: Fold::Prod, ..sum(Element::C128, 10, 0) }), (0, 10, 10));
    assert_eq!(parts(&Reduction { fold: Fold::Prod, ..sum(Element::C128, 10, 8) }), (0, 0, 10));
    // One array with another alignment, or an end before the boundary.
    assert_eq!(parts(&Reduction { to: 0x30_0008, ..sum(Element::F32, 100, 0) }), (0, 0, 100));
    assert_eq!(parts(&sum(Element::F32, 2, 4)), (0, 0, 2));
}

#[test]
fn average_divides_only_without_an_exact_reciprocal() {
    let last = |element, divide| {
        let Args { finish, divide, times, .. } = launched(&Reduction { divide, ..sum(element, 1, 0) }).args;
        (finish, divide, times)
    };
    assert_eq!(last(Element::BF16, None), (KEEP, 1, 1.0));
    assert_eq!(last(Element::F32, Some(8)), (TIMES, 1, 0.125));
    assert_eq!(last(Element::C64, Some(12)), (DIVIDE, 12, 1.0));
    assert_eq!(last(Element::I32, Some(8)), (DIVIDE, 8, 1.0));
    for none in [0, 1] {
        assert_eq!(last(Element::F64, Some(none)), (KEEP, 1, 1.0));
    }
    assert_eq!(last(Element::Bool, Some(3)), (KEEP, 1, 1.0));
}
