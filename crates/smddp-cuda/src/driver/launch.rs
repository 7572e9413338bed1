//! The reduction module. The driver compiles it at the first use.

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_void};
use std::sync::{Mutex, OnceLock, PoisonError};

use super::cuda::Cuda;
use super::types::*;
use crate::device::{Error, Result, Stream};
use crate::kernels::{self, Launch};

/// Size of the compiler's error log in bytes.
const LOG: usize = 4096;

/// The kernels in one context, which is current during every call.
#[derive(Debug, Default)]
pub(super) struct Kernels {
    /// Keeps a failure too: another compilation would fail again, and takes a second.
    module: OnceLock<Result<CUmodule>>,
    functions: Mutex<HashMap<CString, CUfunction>>,
}

impl Kernels {
    /// Compiles the module and loads every function.
    ///
    /// Drivers load functions lazily. A load at the first launch may wait for the device, whose streams may wait for
    /// a word.
    pub(super) fn prepare(&self, cuda: &Cuda) -> Result<()> {
        let ptx = kernels::ptx();
        for name in entries(ptx.to_bytes()) {
            let name = CString::new(name).map_err(|_| Error::Invalid("a kernel has no name".to_owned()))?;
            self.function(cuda, &name)?;
        }
        Ok(())
    }

    /// # Safety
    /// The contract of [`Device`](crate::Device)'s unsafe methods, for what the arguments name.
    pub(super) unsafe fn launch(&self, cuda: &Cuda, stream: Stream, launch: &Launch) -> Result<()> {
        let function = self.function(cuda, launch.name)?;
        let mut arguments = [(&raw const launch.args).cast_mut().cast::<c_void>()];
        // SAFETY: one argument of the kernel's type (`kernels::launch` pairs them), copied before the call returns.
        unsafe {
            cuda.table.required.launch_kernel(
                function,
                launch.blocks,
                1,
                1,
                launch.threads,
                1,
                1,
                0,
                stream.0,
                arguments.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        }
    }

    fn function(&self, cuda: &Cuda, name: &CStr) -> Result<CUfunction> {
        let mut functions = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(&function) = functions.get(name) {
            return Ok(function);
        }
        let module = self.module.get_or_init(|| load(cuda)).clone()?;
        let mut function = 0;
        // SAFETY: a loaded module and a null-terminated string.
        unsafe { cuda.table.required.module_get_function(&raw mut function, module, name.as_ptr()) }
            .map_err(|error| named(error, name))?;
        if let Some(load) = cuda.table.func_load {
            // Without this the first launch may load the function.
            // SAFETY: a function of a loaded module.
            let code = unsafe { load(function) };
            cuda.table.required.check(c"cuFuncLoad", code).map_err(|error| named(error, name))?;
        }
        functions.insert(name.to_owned(), function);
        Ok(function)
    }

    /// Unloads the module. No launch may follow.
    pub(super) fn unload(&mut self, cuda: &Cuda) {
        if let Some(Ok(module)) = self.module.take() {
            // SAFETY: loaded here, and no launch can follow. At process exit the driver returns an error, which needs
            // no handling.
            unsafe { (cuda.table.required.module_unload)(module) };
        }
    }
}

fn load(cuda: &Cuda) -> Result<CUmodule> {
    let mut log = vec![0u8; LOG];
    let mut options = [JIT_ERROR_LOG_BUFFER, JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
    // The size is passed in the pointer itself.
    let mut values = [log.as_mut_ptr().cast::<c_void>(), LOG as *mut c_void];
    let mut module = 0;
    // SAFETY: null-terminated text; one value per option, of the option's type.
    unsafe {
        cuda.table.required.module_load(
            &raw mut module,
            kernels::ptx().as_ptr().cast(),
            options.len() as u32,
            options.as_mut_ptr(),
            values.as_mut_ptr(),
        )
    }
    .map_err(|error| {
        let end = log.iter().position(|&byte| byte == 0).unwrap_or(LOG);
        extend(error, &format!("the compiler reports: {}", String::from_utf8_lossy(&log[..end]).trim()))
    })?;
    Ok(module)
}

fn named(error: Error, name: &CStr) -> Error {
    extend(error, &format!("the kernel {}", name.to_string_lossy()))
}

fn extend(error: Error, more: &str) -> Error {
    match error {
        Error::Driver { call, code, name, advice } => {
            let advice = if advice.is_empty() { more.to_owned() } else { format!("{advice}; {more}") };
            Error::Driver { call, code, name, advice }
        }
        other => other,
    }
}

/// Returns the names of the kernels in PTX text.
fn entries(ptx: &[u8]) -> impl Iterator<Item = String> {
    let text = String::from_utf8_lossy(ptx).into_owned();
    let names: Vec<String> = text
        .split(".entry")
        .skip(1)
        .map(|rest| {
            rest.trim_start().chars().take_while(|c| c.is_alphanumeric() || matches!(c, '_' | '$')).collect()
        })
        .collect();
    names.into_iter()
}
