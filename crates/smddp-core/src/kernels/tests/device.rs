//! GPU kernels, compiled for the host from the same source, give the bits of the host kernels.

use std::ffi::{CStr, CString, c_void};
use std::path::Path;
use std::process::Command;
use std::ptr::null_mut;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use smddp_cuda::kernels::{self, Args, Launch, USUAL_BLOCKS, launch};
use smddp_cuda::{Copy, Element, Fold, MAX_SOURCES, Reduction, Rounding};
use smddp_plan::Format;

use super::super::{Kernel, premultiply, round};
use super::{Guarded, Random};
use crate::call::types::{DType, RedOp};

/// Runs a kernel on a grid, one thread after another, over arrays of `bytes`. Aborts at an access outside of them.
type Run =
    unsafe extern "C" fn(kernel: *mut c_void, blocks: u32, threads: u32, args: *const Args, bytes: u64);

/// `reduce.cu` as a host library. Its grid is a global variable, so one launch runs at a time.
struct Program {
    library: *mut c_void,
    run: Run,
}

// SAFETY: the library stays open, and its globals are used only under the lock of the single Program.
unsafe impl Send for Program {}

impl Program {
    fn get() -> MutexGuard<'static, Program> {
        static PROGRAM: OnceLock<Mutex<Program>> = OnceLock::new();
        let program = PROGRAM.get_or_init(|| Mutex::new(Program::build()));
        program.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn build() -> Program {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../smddp-cuda/kernels/reduce.cu");
        // Next to the test binary, where loading programs is permitted.
        let library = std::env::current_exe().unwrap().with_extension(format!("{}.so", std::process::id()));
        let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
        let mut command = Command::new(&compiler);
        // Every product and sum is rounded, as on a device.
        command.args(["-x", "c", "-std=c11", "-O1", "-w", "-ffp-contract=off", "-fPIC", "-shared", "-o"]);
        let done = command.arg(&library).arg(source).output();
        let done = done.unwrap_or_else(|error| {
            panic!("a C compiler is needed (smddp's prerequisites): {compiler}: {error}")
        });
        assert!(done.status.success(), "{command:?}:\n{}", String::from_utf8_lossy(&done.stderr));
        let path = CString::new(library.to_str().unwrap()).unwrap();
        // SAFETY: a new library without constructors; `path` is a C string.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        std::fs::remove_file(&library).unwrap();
        assert!(!handle.is_null(), "{}: cannot be loaded", library.display());
        let run = symbol(handle, c"smddp_host_launch");
        // SAFETY: host.h defines the function like this; dlsym returns its pointer as one to void.
        Program { library: handle, run: unsafe { std::mem::transmute::<*mut c_void, Run>(run) } }
    }
}

fn symbol(library: *mut c_void, name: &CStr) -> *mut c_void {
    // SAFETY: an open library and a C string.
    let found = unsafe { libc::dlsym(library, name.as_ptr()) };
    assert!(!found.is_null(), "no {name:?}");
    found
}

/// Runs a reduction with the device kernels. Returns false if it is not supported.
fn reduce_on_device(reduction: &Reduction) -> bool {
    let Ok(launch) = launch(reduction, USUAL_BLOCKS) else {
        return false;
    };
    if let Some(launch) = launch {
        run(&launch, reduction.count * reduction.element.size());
    }
    true
}

/// Runs a launch. The caller owns the arrays of `bytes` in its arguments.
fn run(launch: &Launch, bytes: usize) {
    let program = Program::get();
    let kernel = symbol(program.library, launch.name);
    // SAFETY: a kernel of that library; the caller's arrays.
    unsafe { (program.run)(kernel, launch.blocks, launch.threads, &launch.args, bytes as u64) };
}

/// The last step of a reduction.
#[derive(Clone, Copy, Debug)]
enum Last {
    None,
    Divide(u32),
    Times(f64),
}

/// One reduction and the alignment of its arrays.
#[derive(Clone, Copy, Debug)]
struct Case {
    element: Element,
    fold: Fold,
    n: usize,
    count: usize,
    last: Last,
    /// Bytes from a 64-byte boundary: of the destination, of the first source, and between sources (`apart`).
    to: usize,
    from: usize,
    apart: usize,
    in_place: Option<usize>,
}

impl Case {
    fn plain(element: Element, fold: Fold, n: usize, count: usize) -> Case {
        Case { element, fold, n, count, last: Last::None, to: 0, from: 0, apart: 0, in_place: None }
    }

    fn dtype(&self) -> DType {
        DType::from_u8(self.element as u8).unwrap()
    }

    /// Reduces the sources with the host kernels.
    fn run_on_host(&self, sources: &[Vec<u8>]) -> Option<Vec<u8>> {
        let redop = match self.fold {
            Fold::Sum => RedOp::Sum,
            Fold::Prod => RedOp::Prod,
            Fold::Min => RedOp::Min,
            Fold::Max => RedOp::Max,
            Fold::Band => RedOp::Band,
            Fold::Bor => RedOp::Bor,
            Fold::Bxor => RedOp::Bxor,
        };
        let pointers: Vec<*const u8> = sources.iter().map(|source| source.as_ptr()).collect();
        let mut to = vec![0; self.count * self.element.size()];
        let at = to.as_mut_ptr();
        // SAFETY: all arrays are owned here and hold `count` elements.
        let done = unsafe {
            match self.last {
                Last::Times(factor) => premultiply(self.dtype(), at, pointers[0], self.count, factor),
                last => Kernel::new(self.dtype(), redop).is_some_and(|kernel| {
                    let ranks = if let Last::Divide(ranks) = last { Some(ranks) } else { None };
                    kernel.run(at, null_mut(), &pointers, self.count, ranks, false);
                    true
                }),
            }
        };
        done.then_some(to)
    }

    /// Reduces the sources with the device kernels.
    fn run_on_device(&self, sources: &[Vec<u8>]) -> Option<Vec<u8>> {
        let mut arrays: Vec<Guarded> = sources
            .iter()
            .enumerate()
            .map(|(k, source)| Guarded::holding(source, (self.from + k * self.apart) % 64))
            .collect();
        let mut out = Guarded::new(self.count * self.element.size(), self.to);
        let to = match self.in_place {
            Some(k) => arrays[k].mut_ptr(),
            None => out.mut_ptr(),
        };
        let addresses = arrays.iter().map(|array| array.ptr() as u64).collect();
        let done = reduce_on_device(&Reduction {
            element: self.element,
            fold: self.fold,
            sources: addresses,
            to: to as u64,
            count: self.count,
            divide: if let Last::Divide(ranks) = self.last { Some(ranks) } else { None },
            times: if let Last::Times(factor) = self.last { Some(factor) } else { None },
        });
        for (k, (array, source)) in arrays.iter().zip(sources).enumerate() {
            let kept = self.in_place == Some(k) || array.content() == source;
            assert!(kept, "source {k} changed: {self:?}");
        }
        let out = self.in_place.map_or(&out, |k| &arrays[k]);
        done.then(|| out.content().to_vec())
    }

    fn check(&self, random: &mut Random) {
        let sources: Vec<_> = (0..self.n).map(|_| elements(self.element, self.count, random)).collect();
        self.check_with(&sources);
    }

    fn check_with(&self, sources: &[Vec<u8>]) {
        let (expected, found) = (self.run_on_host(sources), self.run_on_device(sources));
        assert_eq!(found.is_some(), expected.is_some(), "{self:?}");
        let (Some(expected), Some(found)) = (expected, found) else {
            return;
        };
        // Which NaN arithmetic returns depends on the processor.
        let any_nan = matches!(self.fold, Fold::Sum | Fold::Prod);
        let part = parts(self.element);
        for (at, (a, b)) in expected.chunks_exact(part).zip(found.chunks_exact(part)).enumerate() {
            let same = a == b || (any_nan && is_nan(self.element, a) && is_nan(self.element, b));
            assert!(same, "{self:?}: part {at} is {b:x?} and not {a:x?}");
        }
    }
}

/// Bytes of an element's real part.
fn parts(element: Element) -> usize {
    match element {
        Element::C64 => 4,
        Element::C128 => 8,
        real => real.size(),
    }
}

/// The bits of an infinity, and the number of fraction bits; `None` for elements that are not floats.
fn float(element: Element) -> Option<(u64, u32)> {
    match element {
        Element::F16 => Some((0x7c00, 10)),
        Element::BF16 => Some((0x7f80, 7)),
        Element::F32 | Element::C64 => Some((0x7f80_0000, 23)),
        Element::F64 | Element::C128 => Some((0x7ff0_0000_0000_0000, 52)),
        _ => None,
    }
}

fn is_nan(element: Element, part: &[u8]) -> bool {
    let mut bits = [0; 8];
    bits[..part.len()].copy_from_slice(part);
    let bits = u64::from_ne_bytes(bits) & (u64::MAX >> (65 - 8 * part.len() as u32));
    float(element).is_some_and(|(infinity, _)| bits > infinity)
}

/// Random elements, including many corner cases of the arithmetic.
fn elements(element: Element, count: usize, random: &mut Random) -> Vec<u8> {
    let part = parts(element);
    let sign = 1_u64 << (8 * part - 1);
    let corners: Vec<u64> = match float(element) {
        Some((infinity, fraction)) => {
            let (one, least) = ((infinity >> 1) & (infinity << 1), 1_u64 << fraction);
            let quiet = infinity | (least >> 1);
            // Zero, subnormals, the least normal, one, the next, two, the largest, infinity, NaNs of both kinds.
            let positive =
                [0, 1, least - 1, least, one, one + 1, one + least, infinity - 1, infinity, quiet, quiet | 5];
            positive.into_iter().chain([infinity | 1]).flat_map(|bits| [bits, bits | sign]).collect()
        }
        None => {
            vec![0, 1, 2, 3, 0_u64.wrapping_sub(1), 0_u64.wrapping_sub(2), sign, sign - 1, sign + 1, sign - 2]
        }
    };
    let mut bytes = Vec::with_capacity(count * element.size());
    for _ in 0..count * element.size() / part {
        let bits = match random.next() >> 62 {
            0 => corners[(random.next() >> 32) as usize % corners.len()],
            _ => random.next(),
        };
        bytes.extend_from_slice(&bits.to_le_bytes()[..part]);
    }
    bytes
}

/// Every (element, fold).
fn pairs() -> impl Iterator<Item = (Element, Fold)> {
    Element::ALL.into_iter().flat_map(|element| Fold::ALL.map(|fold| (element, fold)))
}

#[test]
fn device_reductions_equal_host_reductions_for_any_alignment() {
    const COUNTS: [usize; 14] = [0, 1, 2, 3, 7, 8, 15, 16, 17, 63, 64, 65, 1000, 1025];
    let mut random = Random(0x5eed);
    for (element, fold) in pairs() {
        for n in 1..=MAX_SOURCES {
            for _ in 0..6 {
                // Random choice: aligned, equally misaligned, or differently misaligned; in place or not.
                let unit = element.size().min(8);
                let mut some = |limit: usize| (random.next() >> 32) as usize % limit;
                let count = COUNTS[some(COUNTS.len())];
                let (to, from, apart) = match some(3) {
                    0 => (0, 0, 0),
                    1 => {
                        let off = unit * some(16 / unit);
                        (off, off + 16, 16)
                    }
                    _ => (unit * some(8), unit * some(8), unit),
                };
                let in_place = (some(3) == 0).then(|| some(n));
                Case { to, from, apart, in_place, ..Case::plain(element, fold, n, count) }.check(&mut random);
            }
        }
    }
}

#[test]
fn arrays_beyond_one_grid_iteration_are_reduced_completely() {
    let mut random = Random(0x1096);
    for (element, fold) in pairs() {
        // More than eight blocks read in one iteration: four packs in each thread.
        let count = (300 << 10) / element.size() + 3;
        let unit = element.size().min(8);
        let case = Case::plain(element, fold, 3, count);
        Case { from: unit, to: unit, ..case }.check(&mut random);
        Case { apart: unit, ..case }.check(&mut random);
    }
}

#[test]
fn device_averages_equal_host_averages() {
    let mut random = Random(0xa7e6);
    for element in Element::ALL {
        for ranks in [0, 1, 2, 3, 5, 7, 8, 96, 200, 1000, 65_536, 70_001, (1 << 24) + 1, 1 << 31, u32::MAX] {
            let last = Last::Divide(ranks);
            Case { last, ..Case::plain(element, Fold::Sum, 1, 1003) }.check(&mut random);
            Case { last, in_place: Some(1), ..Case::plain(element, Fold::Sum, 3, 1003) }.check(&mut random);
        }
    }
}

#[test]
fn device_factors_equal_host_factors() {
    let mut random = Random(0xfac7);
    let factors =
        [0.0, -0.0, 1.0, 0.5, -1.0, 1.0 / 3.0, -2.75, 1e-3, 1e10, -1e39, 1e-310, f64::INFINITY, f64::NAN];
    for element in Element::ALL {
        for factor in factors {
            let last = Last::Times(factor);
            for in_place in [None, Some(0)] {
                Case { last, in_place, ..Case::plain(element, Fold::Sum, 1, 1003) }.check(&mut random);
            }
        }
    }
}

#[test]
fn all_16_bit_values_are_read_and_written_like_on_the_host() {
    let every: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_ne_bytes).collect();
    for element in [Element::F16, Element::BF16, Element::I16, Element::U16] {
        for fold in [Fold::Sum, Fold::Prod, Fold::Min, Fold::Max] {
            Case::plain(element, fold, 1, 1 << 16).check_with(std::slice::from_ref(&every));
        }
        for last in [Last::Divide(3), Last::Divide(7), Last::Divide(4), Last::Times(0.37), Last::Times(1e-4)]
        {
            let case = Case { last, ..Case::plain(element, Fold::Sum, 1, 1 << 16) };
            case.check_with(std::slice::from_ref(&every));
        }
    }
}

#[test]
fn device_copies_exactly_the_given_bytes_for_any_alignment() {
    let mut random = Random(0xc0b1);
    for n in 1..=8 {
        for bytes in [1, 3, 4, 15, 16, 17, 63, 64, 100, 1000, 1023, 1024, 2048] {
            for (from, to) in [(0, 0), (16, 32), (4, 4), (4, 12), (0, 20), (1, 1), (0, 3), (13, 2)] {
                check_copies(n, bytes, (from, to), &mut random);
            }
        }
    }
    // More than one iteration of a block.
    check_copies(2, 128 << 10, (0, 16), &mut random);
    check_copies(1, (64 << 10) - 6, (4, 8), &mut random);
    check_copies(1, 16 << 10, (1, 2), &mut random);
}

fn check_copies(n: usize, bytes: usize, (from, to): (usize, usize), random: &mut Random) {
    let contents: Vec<_> = (0..n).map(|_| elements(Element::U8, bytes, random)).collect();
    let sources: Vec<_> = contents.iter().map(|content| Guarded::holding(content, from)).collect();
    let mut targets: Vec<_> = (0..n).map(|_| Guarded::new(bytes, to)).collect();
    let copies: Vec<_> = sources
        .iter()
        .zip(&mut targets)
        .map(|(from, to)| Copy { to: to.mut_ptr() as u64, from: from.ptr() as u64, bytes })
        .collect();
    run(&kernels::copy(&copies).unwrap(), bytes);
    for (content, (source, target)) in contents.iter().zip(sources.iter().zip(&targets)) {
        assert_eq!(source.content(), content, "{n} of {bytes} from {from} to {to}");
        assert_eq!(target.content(), content, "{n} of {bytes} from {from} to {to}");
    }
}

#[test]
fn device_rounding_equals_host_rounding() {
    let mut random = Random(11);
    let formats =
        [(Format::Bf16, Rounding::Bf16), (Format::F16, Rounding::F16), (Format::Int8, Rounding::Int8)];
    for (format, rounding) in formats {
        for count in [1, 255, 257, 1000] {
            for special in [None, Some(f32::NAN), Some(f32::INFINITY), Some(-0.0), Some(f32::MAX)] {
                // Exponents over the whole range, then from a narrow one.
                for bits in [8, 2] {
                    let number = |_| {
                        let x = random.next();
                        let exponent =
                            (127 + (x >> 40) as u32 % (1 << bits)).saturating_sub(1 << (bits - 1)).min(254);
                        f32::from_bits((x as u32) & 0x807f_ffff | exponent << 23)
                    };
                    let mut given: Vec<f32> = (0..count).map(number).collect();
                    if let Some(special) = special {
                        given[count / 2] = special;
                    }
                    let (mut wanted, mut found) = (vec![0f32; count], vec![0f32; count]);
                    // SAFETY: vectors of `count` elements.
                    unsafe { round(format, wanted.as_mut_ptr().cast(), given.as_ptr().cast(), count) };
                    let at = |data: *const f32| data as u64;
                    let launch = kernels::round(
                        rounding,
                        (at(found.as_mut_ptr()), at(given.as_ptr())),
                        count,
                        USUAL_BLOCKS,
                    );
                    run(&launch.unwrap().unwrap(), 4 * count);
                    // In place.
                    let launch = kernels::round(
                        rounding,
                        (at(given.as_mut_ptr()), at(given.as_ptr())),
                        count,
                        USUAL_BLOCKS,
                    );
                    run(&launch.unwrap().unwrap(), 4 * count);
                    for (i, wanted) in wanted.iter().enumerate() {
                        for found in [found[i], given[i]] {
                            let same =
                                wanted.to_bits() == found.to_bits() || wanted.is_nan() && found.is_nan();
                            assert!(same, "{format:?}, {i} of {count}, {special:?}: {found}, not {wanted}");
                        }
                    }
                }
            }
        }
    }
}
