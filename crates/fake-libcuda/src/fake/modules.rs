//! Modules and launches. No PTX is interpreted: what a kernel of smddp's does is told by its name, one element after
//! the other. (What the PTX itself does can be shown on a GPU alone.)

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::Mutex;

use crate::api;
use crate::memory::read;
use crate::state::*;
use crate::operation::Operation;
use crate::streams::{acquiring, stream};
use crate::numbers::CUDA_ERROR_INVALID_HANDLE;
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
    /// The kernels of each, with the bytes of their one parameter.
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

pub(crate) fn forget() {
    *lock(&MODULES) = None;
}

/// The kernels of a program.
fn kernels(text: &str) -> HashMap<String, usize> {
    let kernel = |rest: &str| {
        let (name, rest) = rest.split_once('(')?;
        let bytes = rest.split_once('[')?.1.split_once(']')?.0.parse().ok()?;
        Some((name.trim().to_owned(), bytes))
    };
    text.split(".entry").skip(1).filter_map(kernel).collect()
}

unsafe fn complain(text: &str, count: c_uint, options: *mut c_int, values: *mut *mut c_void) {
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
            complain("ptxas fatal : the fake driver was told to refuse it", count, options, values);
            return Err(CUDA_ERROR_INVALID_PTX);
        }
        let number = fresh() as usize;
        let kernels = kernels(&text);
        modules(|all| all.modules.insert(number, kernels));
        give(module, number)
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
        give(function, number)
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

/// How two numbers become one.
#[derive(Clone, Copy, PartialEq)]
enum Fold {
    Sum,
    Prod,
    Min,
    Max,
    Band,
    Bor,
    Bxor,
}

impl Fold {
    fn of(name: &str) -> Result<Self, String> {
        Ok(match name {
            "sum" => Self::Sum,
            "prod" => Self::Prod,
            "min" => Self::Min,
            "max" => Self::Max,
            "band" => Self::Band,
            "bor" => Self::Bor,
            "bxor" => Self::Bxor,
            _ => return Err(format!("{name} is not known here")),
        })
    }
}

/// Numbers of one kind: how they are read, combined and written.
trait Element: Copy {
    const BYTES: usize;
    unsafe fn get(at: u64) -> Self;
    unsafe fn put(self, at: u64);
    fn fold(self, with: Self, fold: Fold) -> Option<Self>;
    fn divide(self, _by: u32) -> Self {
        self
    }
    fn times(self, _factor: f64) -> Self {
        self
    }
}

macro_rules! integers {
    ($($kind:ty)*) => {
        $(impl Element for $kind {
            const BYTES: usize = size_of::<Self>();
            unsafe fn get(at: u64) -> Self {
                (at as *const Self).read_unaligned()
            }
            unsafe fn put(self, at: u64) {
                (at as *mut Self).write_unaligned(self)
            }
            fn fold(self, with: Self, fold: Fold) -> Option<Self> {
                Some(match fold {
                    Fold::Sum => self.wrapping_add(with),
                    Fold::Prod => self.wrapping_mul(with),
                    Fold::Min => self.min(with),
                    Fold::Max => self.max(with),
                    Fold::Band => self & with,
                    Fold::Bor => self | with,
                    Fold::Bxor => self ^ with,
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
        $(impl Element for $kind {
            const BYTES: usize = size_of::<Self>();
            unsafe fn get(at: u64) -> Self {
                (at as *const Self).read_unaligned()
            }
            unsafe fn put(self, at: u64) {
                (at as *mut Self).write_unaligned(self)
            }
            fn fold(self, with: Self, fold: Fold) -> Option<Self> {
                Some(match fold {
                    Fold::Sum => self + with,
                    Fold::Prod => self * with,
                    // A NaN wins.
                    Fold::Min => if with < self || with.is_nan() { with } else { self },
                    Fold::Max => if with > self || with.is_nan() { with } else { self },
                    _ => return None,
                })
            }
            fn divide(self, by: u32) -> Self {
                self / by as Self
            }
            fn times(self, factor: f64) -> Self {
                self * factor as Self
            }
        })*
    };
}

floats!(f32 f64);

/// Sixteen bits, in f32 meanwhile.
macro_rules! halves {
    ($($name:ident: $widen:expr, $round:expr;)*) => {
        $(#[derive(Clone, Copy)]
        struct $name(f32);

        impl Element for $name {
            const BYTES: usize = 2;
            unsafe fn get(at: u64) -> Self {
                Self($widen((at as *const u16).read_unaligned()))
            }
            unsafe fn put(self, at: u64) {
                (at as *mut u16).write_unaligned($round(self.0))
            }
            fn fold(self, with: Self, fold: Fold) -> Option<Self> {
                self.0.fold(with.0, fold).map(Self)
            }
            fn divide(self, by: u32) -> Self {
                Self(self.0.divide(by))
            }
            fn times(self, factor: f64) -> Self {
                Self(self.0.times(factor))
            }
        })*
    };
}

halves! {
    Half: widen_half, round_half;
    Brain: |bits: u16| f32::from_bits(u32::from(bits) << 16), round_brain;
}

fn round_brain(value: f32) -> u16 {
    let bits = value.to_bits();
    if value.is_nan() {
        return (bits >> 16) as u16 | 0x40;
    }
    ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16) as u16
}

fn widen_half(bits: u16) -> f32 {
    let sign = if bits & 0x8000 == 0 { 1.0 } else { -1.0 };
    let (exponent, fraction) = (i32::from(bits >> 10 & 31), f32::from(bits & 1023));
    match exponent {
        0 => sign * fraction * 2f32.powi(-24),
        31 if fraction == 0.0 => sign * f32::INFINITY,
        31 => f32::from_bits(u32::from(bits & 0x8000) << 16 | 0x7F80_0000 | u32::from(bits & 1023) << 13),
        _ => sign * (1024.0 + fraction) * 2f32.powi(exponent - 25),
    }
}

fn round_half(value: f32) -> u16 {
    let sign = (value.to_bits() >> 16 & 0x8000) as u16;
    if value.is_nan() {
        return sign | 0x7E00 | (value.to_bits() >> 13 & 1023) as u16;
    }
    let size = value.abs();
    if size >= 65520.0 {
        return sign | 0x7C00;
    }
    // The place of the last bit: 2^-24 below the normal numbers.
    let exponent = ((size.to_bits() >> 23) as i32 - 127).max(-14);
    let parts = f64::from(size) / 2f64.powi(exponent - 10);
    let rounded = parts.round_ties_even() as u16;
    // A carry into the next exponent is what the addition makes of it.
    sign | (((exponent + 14) as u16) << 10).wrapping_add(rounded)
}

/// A pair of numbers: products only, sums being of the parts.
macro_rules! pairs {
    ($($name:ident: $kind:ty;)*) => {
        $(#[derive(Clone, Copy)]
        struct $name($kind, $kind);

        impl Element for $name {
            const BYTES: usize = 2 * size_of::<$kind>();
            unsafe fn get(at: u64) -> Self {
                Self(<$kind>::get(at), <$kind>::get(at + size_of::<$kind>() as u64))
            }
            unsafe fn put(self, at: u64) {
                self.0.put(at);
                self.1.put(at + size_of::<$kind>() as u64);
            }
            fn fold(self, with: Self, fold: Fold) -> Option<Self> {
                let product = Self(self.0 * with.0 - self.1 * with.1, self.0 * with.1 + self.1 * with.0);
                (fold == Fold::Prod).then_some(product)
            }
        })*
    };
}

pairs! {
    C64: f32;
    C128: f64;
}

/// A byte that is not 0 is true.
#[derive(Clone, Copy)]
struct Truth(u8);

impl Element for Truth {
    const BYTES: usize = 1;
    unsafe fn get(at: u64) -> Self {
        Self(u8::get(at).min(1))
    }
    unsafe fn put(self, at: u64) {
        self.0.put(at)
    }
    fn fold(self, with: Self, fold: Fold) -> Option<Self> {
        self.0.fold(with.0, fold).map(Self)
    }
}

impl std::fmt::Display for Launch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Args { sources, to, count, n, .. } = &self.args;
        write!(f, "{} of {count} from {:#x?} to {to:#x}", self.name, &sources[..*n as usize])
    }
}

impl Launch {
    /// What it reads and writes. A source may be what is written, in whole.
    pub(crate) fn parts(&self) -> Vec<(u64, usize, bool)> {
        let Args { sources, to, count, n, .. } = &self.args;
        // A kernel is named after the bits of its elements; without any they are bytes.
        let bits = self.name.rsplit('_').next().unwrap_or_default().trim_start_matches(char::is_alphabetic);
        let bytes = *count as usize * bits.parse().map_or(1, |bits: usize| bits / 8);
        let sources = sources[..*n as usize].iter().filter(|source| *source != to);
        sources.map(|source| (*source, bytes, false)).chain([(*to, bytes, true)]).collect()
    }

    pub(crate) fn run(&self) {
        let name = self.name.strip_prefix("smddp_").unwrap_or(&self.name);
        let done = match name.split_once('_') {
            Some(("bool", fold)) => self.reduce::<Truth>(fold),
            Some((fold, "f32")) => self.reduce::<f32>(fold),
            Some((fold, "f64")) => self.reduce::<f64>(fold),
            Some((fold, "f16")) => self.reduce::<Half>(fold),
            Some((fold, "bf16")) => self.reduce::<Brain>(fold),
            Some((fold, "i8")) => self.reduce::<i8>(fold),
            Some((fold, "i16")) => self.reduce::<i16>(fold),
            Some((fold, "i32")) => self.reduce::<i32>(fold),
            Some((fold, "i64")) => self.reduce::<i64>(fold),
            Some((fold, "u8")) => self.reduce::<u8>(fold),
            Some((fold, "u16")) => self.reduce::<u16>(fold),
            Some((fold, "u32")) => self.reduce::<u32>(fold),
            Some((fold, "u64")) => self.reduce::<u64>(fold),
            Some((fold, "c64")) => self.reduce::<C64>(fold),
            Some((fold, "c128")) => self.reduce::<C128>(fold),
            // Bits, as bytes.
            None => self.reduce::<u8>(name),
            _ => Err("it is not known here".to_owned()),
        };
        if let Err(why) = done {
            break_context(CUDA_ERROR_LAUNCH_FAILED, &format!("the kernel {}: {why}", self.name));
        }
    }

    fn reduce<E: Element>(&self, fold: &str) -> Result<(), String> {
        let fold = Fold::of(fold)?;
        let Args { sources, to, count, times, n, finish, divide, .. } = self.args;
        let sources = &sources[..n as usize];
        let bytes = count as usize * E::BYTES;
        // Held to the end, so that nobody takes the memory away meanwhile.
        let memory = read();
        for &at in sources.iter().chain([&to]) {
            if !memory.covers(at, bytes) {
                return Err(format!("{bytes} bytes at {at:#x} are not there"));
            }
        }
        for at in (0..bytes as u64).step_by(E::BYTES) {
            unsafe {
                let mut value = E::get(sources[0] + at);
                for source in &sources[1..] {
                    value = value.fold(E::get(source + at), fold).ok_or("no such operation")?;
                }
                value = match finish {
                    DIVIDE => value.divide(divide),
                    TIMES => value.times(times),
                    _ => value,
                };
                value.put(to + at);
            }
        }
        Ok(())
    }
}
