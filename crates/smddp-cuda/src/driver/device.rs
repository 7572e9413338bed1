//! Operations of one device.

mod enqueue;
mod memory;
mod streams;

use std::sync::atomic::{AtomicBool, AtomicU32};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::context::Context;
use super::cuda::Cuda;
use super::launch::Kernels;
use super::region_cache::RegionCache;
use super::table::Required;
use super::types::*;
use crate::device::{Error, Result, Stream, Uuid};
use crate::kernels;

/// One device as used by this process.
///
/// Every thread may call every method. A method makes the device's primary context current for its duration where it
/// needs the context. Only `synchronize` waits for the device by design; a call that frees memory may wait too.
///
/// # Safety
/// The unsafe methods enqueue work or access memory. The caller must keep their arguments' memory valid until the
/// stream has completed the operation.
#[derive(Debug)]
pub struct Device {
    pub(super) cuda: Arc<Cuda>,
    pub(super) context: Context,
    ordinal: i32,
    device: CUdevice,
    uuid: Uuid,
    description: String,
    mem_ops_error: Option<String>,
    /// The highest stream priority: the lowest number.
    priority: i32,
    /// Set while the driver's batched copy is available and has not failed.
    batches: AtomicBool,
    kernels: Kernels,
    /// Maximum number of blocks of a reduction.
    max_blocks: AtomicU32,
    regions: Mutex<RegionCache>,
    /// Released streams for reuse.
    free_streams: Mutex<Vec<Stream>>,
}

impl Cuda {
    /// Returns the device `ordinal` with its primary context.
    ///
    /// The ordinal counts as in torch, in the order of CUDA_VISIBLE_DEVICES. The device retains the context, and the
    /// call creates it if necessary.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the ordinal does not exist or the device lacks unified addressing; [`Error::Driver`] if a
    /// driver call fails.
    pub fn device(self: &Arc<Self>, ordinal: i32) -> Result<Arc<Device>> {
        if !(0..self.count()).contains(&ordinal) {
            return Err(Error::Invalid(format!(
                "CUDA device {ordinal} does not exist: this process sees {} (see CUDA_VISIBLE_DEVICES)",
                self.count()
            )));
        }
        Ok(Arc::new(Device::new(self.clone(), ordinal, self.handle(ordinal)?)?))
    }
}

impl Device {
    fn new(cuda: Arc<Cuda>, ordinal: i32, device: CUdevice) -> Result<Self> {
        let name = cuda.name(device)?;
        let (major, minor) = cuda.version();
        if cuda.attribute(device, UNIFIED_ADDRESSING) == 0 {
            return Err(Error::Invalid(format!("{name} does not support unified addressing")));
        }
        let mem_ops_error = if cuda.table.words.is_none() {
            Some(format!("the driver (CUDA {major}.{minor}) has no 64-bit stream memory operations"))
        } else if cuda.attribute(device, CAN_USE_64_BIT_STREAM_MEM_OPS) == 0 {
            Some(format!("{name} has no 64-bit stream memory operations"))
        } else {
            None
        };
        let context = Context::retain(cuda.clone(), device)?;
        let (mut least, mut greatest) = (0, 0);
        {
            let _current = context.enter()?;
            // SAFETY: the call writes both values.
            unsafe { cuda.table.required.ctx_priorities(&raw mut least, &raw mut greatest) }?;
        }
        let driver = kernel_module().map_or_else(String::new, |version| format!("driver {version}, "));
        Ok(Self {
            description: format!("{name}, {driver}CUDA {major}.{minor}"),
            uuid: cuda.uuid(device)?,
            batches: AtomicBool::new(cuda.table.memcpy_batch.is_some()),
            kernels: Kernels::default(),
            max_blocks: AtomicU32::new(kernels::USUAL_BLOCKS),
            regions: Mutex::default(),
            free_streams: Mutex::default(),
            priority: greatest,
            context,
            cuda,
            ordinal,
            device,
            mem_ops_error,
        })
    }

    fn driver(&self) -> &Required {
        &self.cuda.table.required
    }

    fn free_streams(&self) -> MutexGuard<'_, Vec<Stream>> {
        self.free_streams.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // The field `context` is dropped after this and releases the context.
        if let Ok(_current) = self.context.enter_relaxed() {
            self.kernels.unload(&self.cuda);
            for stream in self.free_streams().drain(..) {
                // SAFETY: created by `create_stream`; the device has no other users in `drop`.
                unsafe { (self.driver().stream_destroy)(stream.0) };
            }
        }
    }
}

/// Version of NVIDIA's kernel module, for example "580.95.05".
fn kernel_module() -> Option<String> {
    let text = std::fs::read_to_string("/sys/module/nvidia/version").ok()?;
    Some(text.trim().to_owned()).filter(|version| !version.is_empty())
}

impl Device {
    /// Returns the description of the device, for example "NVIDIA H200, driver 580.95, CUDA 13.0".
    pub fn describe(&self) -> String {
        self.description.clone()
    }

    /// Returns the CUDA ordinal in this process.
    pub fn ordinal(&self) -> i32 {
        self.ordinal
    }

    /// Returns the UUID of the device.
    pub fn uuid(&self) -> Uuid {
        self.uuid
    }

    /// Returns true if both devices belong to one opened driver of this process.
    pub fn shares_driver(&self, other: &Device) -> bool {
        Arc::ptr_eq(&self.cuda, &other.cuda)
    }

    /// Returns the reason why stream-ordered waits and writes on host words are unavailable; `None` if they are available.
    pub fn mem_ops_error(&self) -> Option<String> {
        self.mem_ops_error.clone()
    }

    /// Returns true if this process can map memory of the device `other` (which may be itself) and copy from it.
    ///
    /// Also returns true if only an attempt can decide: for a device that CUDA_VISIBLE_DEVICES hides from this
    /// process. The driver opens legacy handles of such devices (documented since CUDA 10.1), but has no query for
    /// it.
    pub fn reaches(&self, other: &Uuid) -> bool {
        let visible = (0..self.cuda.count()).filter_map(|ordinal| self.cuda.handle(ordinal).ok());
        let named = |peer: &CUdevice| self.cuda.uuid(*peer).is_ok_and(|uuid| uuid == *other);
        *other == self.uuid || visible.filter(named).all(|peer| self.cuda.can_access(self.device, peer))
    }

    /// Loads the reduction kernels, which otherwise happens at the first reduction and waits for the device.
    ///
    /// Call it while no stream waits for a word.
    ///
    /// # Errors
    /// [`Error::Driver`](crate::Error::Driver) if a driver call fails.
    pub fn prepare(&self) -> Result<()> {
        let _current = self.context.enter_relaxed()?;
        self.kernels.prepare(&self.cuda)
    }
}
