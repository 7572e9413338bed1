//! Modules and launches. PTX is not interpreted: the kernel's name selects a Rust implementation, which processes the
//! elements one by one. Only a GPU can test the PTX.

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::Mutex;

use crate::api;
use crate::memory::read;
use crate::numbers::CUDA_ERROR_INVALID_HANDLE;
use crate::operation::Operation;
use crate::state::*;
use crate::streams::{acquiring, stream};
use crate::types::*;

/// `struct Args` of the kernels: `smddp_cuda::kernels::Args`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Args {
    sources: [u64; 16],
    to: u64,
    count: u64,
    head: u64,
    packs: u64,
    times: f64,
    n: u32,
    finish: u32,
    divide: u32,
    unused: u32,
}

/// Values of `finish`.
const DIVIDE: u32 = 1;
const TIMES: u32 = 2;

pub(crate) struct Launch {
    name: String,
    args: Args,
}

#[derive(Default)]
struct Modules {
    /// The kernels of each module, with the bytes of their single parameter.
    modules: HashMap<usize, HashMap<String, usize>>,
    functions: HashMap<usize, String>,
}

static MODULES: Mutex<Option<Modules>> = Mutex::new(None);

fn modules<T>(f: impl FnOnce(&mut Modules) -> T) -> T {
    f(lock(&MODULES).get_or_insert_with(Modules::default))
}

pub(crate) fn open() -> u64 {
    modules(|all| all.modules.len() as u64)
}

pub(crate) fn reset() {
    *lock(&MODULES) = None;
}

/// Returns the kernels of a PTX program.
fn kernels(text: &str) -> HashMap<String, usize> {
    let kernel = |rest: &str| {
        let (name, rest) = rest.split_once('(')?;
        let bytes = rest.split_once('[')?.1.split_once(']')?.0.parse().ok()?;
        Some((name.trim().to_owned(), bytes))
    };
    text.split(".entry").skip(1).filter_map(kernel).collect()
}

unsafe fn write_log(text: &str, count: c_uint, options: *mut c_int, values: *mut *mut c_void) {
    let value =
        |wanted: c_int| (0..count as usize).find(|&i| *options.add(i) == wanted).map(|i| *values.add(i));
    if let (Some(log), Some(room)) = (value(JIT_ERROR_LOG_BUFFER), value(JIT_ERROR_LOG_BUFFER_SIZE_BYTES)) {
        let bytes = text.len().min((room as usize).saturating_sub(1));
        std::ptr::copy_nonoverlapping(text.as_ptr(), log.cast(), bytes);
        log.cast::<u8>().add(bytes).write(0);
    }
}

api! {
    fn cuModuleLoadDataEx(
        module: *mut CUmodule,
        image: *const c_void,
        count: c_uint,
        options: *mut c_int,
        values: *mut *mut c_void,
    ) {
        current()?;
        acquiring("cuModuleLoadDataEx")?;
        let text = CStr::from_ptr(image.cast()).to_string_lossy();
        if settings().bad_jit || !text.contains(".version") || !text.contains(".target") {
            write_log("ptxas fatal : the fake driver is set to reject it", count, options, values);
            return Err(CUDA_ERROR_INVALID_PTX);
        }
        let number = fresh() as usize;
        let kernels = kernels(&text);
        modules(|all| all.modules.insert(number, kernels));
        write_out(module, number)
    }

    fn cuModuleUnload(module: CUmodule) {
        current()?;
        modules(|all| all.modules.remove(&module)).map(drop).ok_or(CUDA_ERROR_INVALID_HANDLE)
    }

    fn cuModuleGetFunction(function: *mut CUfunction, module: CUmodule, name: *const c_char) {
        current()?;
        let name = CStr::from_ptr(name).to_str().map_err(|_| CUDA_ERROR_NOT_FOUND)?;
        let number = modules(|all| {
            let kernels = all.modules.get(&module).ok_or(CUDA_ERROR_INVALID_HANDLE)?;
            if *kernels.get(name).ok_or(CUDA_ERROR_NOT_FOUND)? != size_of::<Args>() {
                return Err(CUDA_ERROR_INVALID_VALUE);
            }
            let number = fresh() as usize;
            all.functions.insert(number, name.to_owned());
            Ok(number)
        })?;
        write_out(function, number)
    }

    fn cuFuncLoad(function: CUfunction) {
        current()?;
        acquiring("cuFuncLoad")?;
        modules(|all| all.functions.contains_key(&function)).then_some(()).ok_or(CUDA_ERROR_INVALID_HANDLE)
    }

    fn cuLaunchKernel(
        function: CUfunction,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        _shared: c_uint,
        number: CUstream,
        parameters: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) {
        let handle = stream(number)?;
        if handle.device() != current()? {
            return Err(CUDA_ERROR_INVALID_HANDLE);
        }
        let name = modules(|all| all.functions.get(&function).cloned()).ok_or(CUDA_ERROR_INVALID_HANDLE)?;
        let sizes = [grid_x, grid_y, grid_z, block_x, block_y, block_z];
        if sizes.contains(&0) || block_x * block_y * block_z > 1024 || parameters.is_null() || !extra.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let args = (*parameters).cast::<Args>().read();
        handle.submit(Operation::Launch(Launch { name, args }));
        Ok(())
    }
}

/// Combines two numbers of one type.
type Fold<N> = fn(N, N) -> N;

/// Number types of the computation.
trait Number: Copy {
    fn fold(name: &str) -> Option<Fold<Self>>;
    fn divide(self, _by: u32) -> Self {
        self
    }
    fn times(self, _factor: f64) -> Self {
        self
    }
}

macro_rules! integers {
    ($($kind:ty)*) => {
        $(impl Number for $kind {
            fn fold(name: &str) -> Option<Fold<Self>> {
                Some(match name {
                    "sum" => Self::wrapping_add,
                    "prod" => Self::wrapping_mul,
                    "min" => Self::min,
                    "max" => Self::max,
                    "band" => |a, b| a & b,
                    "bor" => |a, b| a | b,
                    "bxor" => |a, b| a ^ b,
                    _ => return None,
                })
            }
            fn divide(self, by: u32) -> Self {
                (i128::from(self) / i128::from(by)) as Self
            }
            fn times(self, factor: f64) -> Self {
                (self as f64 * factor) as Self
            }
        })*
    };
}

integers!(i8 i16 i32 i64 u8 u16 u32 u64);

macro_rules! floats {
    ($($kind:ty)*) => {
        $(impl Number for $kind {
            fn fold(name: &str) -> Option<Fold<Self>> {
                Some(match name {
                    "sum" => |a, b| a + b,
                    "prod" => |a, b| a * b,
                    // NaN propagates.
                    "min" => |a, b| if b < a || b.is_nan() { b } else { a },
                    "max" => |a, b| if b > a || b.is_nan() { b } else { a },
                    _ => return None,
                })
            }
            fn divide(self, by: u32) -> Self {
                self / by as Self
            }
            fn times(self, factor: f64) -> Self {
                self * factor as Self
            }
        }

        /// A complex number. Products only, because sums add the parts.
        impl Number for [$kind; 2] {
            fn fold(name: &str) -> Option<Fold<Self>> {
                let product: Fold<Self> = |[a, b], [c, d]| [a * c - b * d, a * d + b * c];
                (name == "prod").then_some(product)
            }
        })*
    };
}

floats!(f32 f64);

fn round_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    if value.is_nan() {
        return (bits >> 16) as u16 | 0x40;
    }
    ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16) as u16
}

fn widen_f16(bits: u16) -> f32 {
    let sign = if bits & 0x8000 == 0 { 1.0 } else { -1.0 };
    let (exponent, fraction) = (i32::from(bits >> 10 & 31), f32::from(bits & 1023));
    match exponent {
        0 => sign * fraction * 2f32.powi(-24),
        31 if fraction == 0.0 => sign * f32::INFINITY,
        31 => f32::from_bits(u32::from(bits & 0x8000) << 16 | 0x7F80_0000 | u32::from(bits & 1023) << 13),
        _ => sign * (1024.0 + fraction) * 2f32.powi(exponent - 25),
    }
}

fn round_f16(value: f32) -> u16 {
    let sign = (value.to_bits() >> 16 & 0x8000) as u16;
    if value.is_nan() {
        return sign | 0x7E00 | (value.to_bits() >> 13 & 1023) as u16;
    }
    let size = value.abs();
    if size >= 65520.0 {
        return sign | 0x7C00;
    }
    // Exponent of the last bit: 2^-24 below the normal numbers.
    let exponent = ((size.to_bits() >> 23) as i32 - 127).max(-14);
    let parts = f64::from(size) / 2f64.powi(exponent - 10);
    let rounded = parts.round_ties_even() as u16;
    // The addition carries into the next exponent.
    sign | (((exponent + 14) as u16) << 10).wrapping_add(rounded)
}

impl std::fmt::Display for Launch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.is_copy() {
            let moves: Vec<_> = self.moves().collect();
            return write!(f, "copies of {} bytes from and to {moves:#x?}", self.args.count);
        }
        let Args { sources, to, count, n, .. } = &self.args;
        write!(f, "{} of {count} from {:#x?} to {to:#x}", self.name, &sources[..*n as usize])
    }
}

impl Launch {
    /// Returns the ranges that the launch reads and writes. A source may equal the destination.
    pub(crate) fn parts(&self) -> Vec<(u64, usize, bool)> {
        if self.is_copy() {
            let bytes = self.args.count as usize;
            return self.moves().flat_map(|(from, to)| [(from, bytes, false), (to, bytes, true)]).collect();
        }
        let Args { sources, to, count, n, .. } = &self.args;
        // A kernel name ends in the bits of its elements; without a number the elements are bytes.
        let bits = self.name.rsplit('_').next().unwrap_or_default().trim_start_matches(char::is_alphabetic);
        let bytes = *count as usize * bits.parse().map_or(1, |bits: usize| bits / 8);
        let sources = sources[..*n as usize].iter().filter(|source| *source != to);
        sources.map(|source| (*source, bytes, false)).chain([(*to, bytes, true)]).collect()
    }

    /// Returns true for the kernel of small copies.
    fn is_copy(&self) -> bool {
        self.name == "smddp_copy"
    }

    /// Returns the source and destination of each copy.
    fn moves(&self) -> impl Iterator<Item = (u64, u64)> {
        let Args { sources, n, .. } = &self.args;
        sources.chunks_exact(2).take(*n as usize).map(|places| (places[0], places[1]))
    }

    pub(crate) fn run(&self) {
        let name = self.name.strip_prefix("smddp_").unwrap_or(&self.name);
        let done = match name.split_once('_') {
            _ if self.is_copy() => self.copy(),
            // Every non-zero byte is true.
            Some(("bool", fold)) => self.reduce(fold, |byte: u8| byte.min(1), |truth| truth),
            Some((format @ ("bf16" | "f16" | "int8"), "f32")) => self.round(format),
            Some((fold, "f32")) => self.plain::<f32>(fold),
            Some((fold, "f64")) => self.plain::<f64>(fold),
            Some((fold, "f16")) => self.reduce(fold, widen_f16, round_f16),
            Some((fold, "bf16")) => {
                self.reduce(fold, |bits: u16| f32::from_bits(u32::from(bits) << 16), round_bf16)
            }
            Some((fold, "i8")) => self.plain::<i8>(fold),
            Some((fold, "i16")) => self.plain::<i16>(fold),
            Some((fold, "i32")) => self.plain::<i32>(fold),
            Some((fold, "i64")) => self.plain::<i64>(fold),
            Some((fold, "u8")) => self.plain::<u8>(fold),
            Some((fold, "u16")) => self.plain::<u16>(fold),
            Some((fold, "u32")) => self.plain::<u32>(fold),
            Some((fold, "u64")) => self.plain::<u64>(fold),
            Some((fold, "c64")) => self.plain::<[f32; 2]>(fold),
            Some((fold, "c128")) => self.plain::<[f64; 2]>(fold),
            // Bitwise operators process bytes.
            None => self.plain::<u8>(name),
            _ => Err("unknown kernel".to_owned()),
        };
        if let Err(reason) = done {
            break_context(CUDA_ERROR_LAUNCH_FAILED, &format!("the kernel {}: {reason}", self.name));
        }
    }

    fn plain<N: Number>(&self, fold: &str) -> Result<(), String> {
        self.reduce(fold, |number: N| number, |number| number)
    }

    /// Converts floats to a format and back.
    fn round(&self, format: &str) -> Result<(), String> {
        let Args { sources, to, count, .. } = &self.args;
        let (from, bytes) = (sources[0], *count as usize * size_of::<f32>());
        let memory = read();
        if !memory.covers(from, bytes) || !memory.covers(*to, bytes) {
            return Err(format!("{bytes} bytes at {from:#x} or {to:#x} are not mapped"));
        }
        // Equal ranges, or two that do not overlap.
        let given = unsafe { std::slice::from_raw_parts(from as *const f32, *count as usize) }.to_vec();
        let found = unsafe { std::slice::from_raw_parts_mut(*to as *mut f32, *count as usize) };
        for (given, found) in given.chunks(256).zip(found.chunks_mut(256)) {
            let most = given.iter().fold(0f32, |most, x| most.max(x.abs()));
            let exact = (most / 127.0).to_bits();
            let above = f32::from_bits((exact + 0xff) & !0xff);
            let scale = if (127.0 * above).is_finite() { above } else { f32::from_bits(exact & !0xff) };
            for (&x, found) in given.iter().zip(found) {
                *found = match format {
                    "bf16" => f32::from_bits(u32::from(round_bf16(x)) << 16),
                    "f16" => widen_f16(round_f16(x)),
                    _ if given.iter().any(|x| !x.is_finite()) => f32::NAN,
                    _ if most < 2f32.powi(-100) => 0.0,
                    _ => (x * (1.0 / scale)).round_ties_even() * scale,
                };
            }
        }
        Ok(())
    }

    fn copy(&self) -> Result<(), String> {
        let Args { count, packs, finish, .. } = self.args;
        let bytes = count as usize;
        let memory = read();
        for (from, to) in self.moves() {
            if !memory.covers(from, bytes) || !memory.covers(to, bytes) {
                return Err(format!("{bytes} bytes at {from:#x} or {to:#x} are not mapped"));
            }
            if packs > 0 && (from | to) % u64::from(finish) != 0 {
                return Err(format!("{from:#x} or {to:#x} is not aligned to {finish} bytes"));
            }
            unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, bytes) };
        }
        Ok(())
    }

    /// Reduces elements of the storage type `M`, which are computed as `N`.
    fn reduce<M: Copy, N: Number>(
        &self,
        fold: &str,
        widen: fn(M) -> N,
        round: fn(N) -> M,
    ) -> Result<(), String> {
        let fold = N::fold(fold).ok_or("no such operation")?;
        let Args { sources, to, count, times, n, finish, divide, .. } = self.args;
        let sources = &sources[..n as usize];
        let bytes = count as usize * size_of::<M>();
        // Holds the lock until the end, so that the memory remains mapped.
        let memory = read();
        for &at in sources.iter().chain([&to]) {
            if !memory.covers(at, bytes) {
                return Err(format!("{bytes} bytes at {at:#x} are not mapped"));
            }
        }
        for at in (0..bytes as u64).step_by(size_of::<M>()) {
            let get = |source: &u64| widen(unsafe { ((source + at) as *const M).read_unaligned() });
            let value = sources[1..].iter().fold(get(&sources[0]), |value, source| fold(value, get(source)));
            let value = match finish {
                DIVIDE => value.divide(divide),
                TIMES => value.times(times),
                _ => value,
            };
            unsafe { ((to + at) as *mut M).write_unaligned(round(value)) };
        }
        Ok(())
    }
}
