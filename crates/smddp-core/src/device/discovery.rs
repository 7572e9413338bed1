//! CUDA devices of this process.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock};

use smddp_base::fork::PerProcess;
use smddp_cuda::Device;
use smddp_cuda::driver::Cuda;
use smddp_process::undisturbed;

use crate::config::Config;
use crate::error::{Error, Result};
use crate::sync::lock;

const TENSORS: &str = "CUDA tensors";
const DRIVER: &str = "the CUDA driver";

/// Converts an error of the CUDA driver.
pub(crate) fn driver_error(operation: &str, error: &smddp_cuda::Error) -> Error {
    Error::System { operation: operation.to_owned(), reason: error.to_string() }
}

/// Returns the CUDA driver, opened and initialised once. Children forked afterwards cannot use CUDA.
///
/// # Errors
/// [`Error::System`] if no driver is found, or its initialisation fails; the same error in every later call of
/// the process. [`Error::Config`] for an invalid setting.
pub fn cuda() -> Result<&'static Arc<Cuda>> {
    static CUDA: PerProcess<OnceLock<Result<Arc<Cuda>>>> = PerProcess::new();
    let found = CUDA.get().get_or_init(|| {
        let config = Config::get()?;
        undisturbed(DRIVER, || Cuda::open(config.cuda.as_deref()))
            .map_err(|error| driver_error(TENSORS, &error))
    });
    found.as_ref().map_err(Clone::clone)
}

/// Returns the supported CUDA version of the installed driver. Initialises nothing.
///
/// # Errors
/// [`Error::System`] if no driver is found. [`Error::Config`] for an invalid setting.
pub fn cuda_version() -> Result<(i32, i32)> {
    let config = Config::get()?;
    undisturbed(DRIVER, || Cuda::driver_version(config.cuda.as_deref()))
        .map_err(|error| driver_error(TENSORS, &error))
}

/// Returns a device in its primary context, which torch uses, too. `ordinal` is torch's device index.
///
/// # Errors
/// [`Error::System`] if the driver has no device `ordinal` or cannot open it. The errors of [`cuda`].
pub fn device(ordinal: i32) -> Result<Arc<Device>> {
    static DEVICES: PerProcess<Mutex<HashMap<i32, Arc<Device>>>> = PerProcess::new();
    let mut devices = lock(DEVICES.get());
    if let Some(cached) = devices.get(&ordinal) {
        return Ok(cached.clone());
    }
    let cuda = cuda()?;
    let device =
        undisturbed(DRIVER, || cuda.device(ordinal)).map_err(|error| driver_error(TENSORS, &error))?;
    device.set_max_sms(Config::get()?.multiprocessors as u32);
    devices.insert(ordinal, device.clone());
    Ok(device)
}
