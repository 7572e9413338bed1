//! DLPack, on the host and on CUDA devices.

use std::ffi::{CStr, c_void};

use pyo3::exceptions::PyTypeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use smddp_core::DType;

use super::{Elements, Use, contiguous, numbers};

#[repr(C)]
pub(crate) struct DlTensor {
    data: *mut u8,
    pub(crate) device: i32,
    pub(crate) ordinal: i32,
    ndim: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

/// The beginning of a tensor of DLPack 1; one of DLPack 0 begins with its `DlTensor`.
#[repr(C)]
struct DlVersioned {
    major: u32,
    minor: u32,
    context: *mut c_void,
    deleter: *mut c_void,
    flags: u64,
    tensor: DlTensor,
}

const READ_ONLY: u64 = 1;
pub(crate) const ON_CPU: i32 = 1;
pub(crate) const ON_CUDA: i32 = 2;
const ON_CUDA_HOST: i32 = 3;

/// `None` for what has no `__dlpack_device__`.
pub(super) fn elements(array: &Bound<'_, PyAny>, usage: Use) -> PyResult<Option<(Elements, Py<PyAny>)>> {
    let py = array.py();
    let Ok(device) = array.call_method0("__dlpack_device__") else { return Ok(None) };
    let (device, _): (i32, i32) = device.extract()?;
    // Immutable, which DLPack 0 cannot say.
    if usage.writes && array.get_type().module()?.to_cow()?.starts_with("jax") {
        return Err(usage.read_only());
    }
    let arguments = PyDict::new(py);
    if let (ON_CUDA, Some(stream)) = (device, usage.stream) {
        // DLPack's name for the default stream is 1.
        arguments.set_item("stream", stream.max(1))?;
    }
    let older = arguments.copy()?;
    arguments.set_item("max_version", (1, 0))?;
    let asked = match array.call_method("__dlpack__", (), Some(&arguments)) {
        Err(error) if error.is_instance_of::<PyTypeError>(py) => {
            array.call_method("__dlpack__", (), Some(&older))
        }
        asked => asked,
    };
    let capsule = asked.map_err(|why| usage.refused(format!("gives no DLPack tensor: {why}")))?;
    // SAFETY: a live object, with the GIL; a capsule of that name holds a tensor of that version, which lives as long as
    // the capsule that nobody consumes.
    let (tensor, flags) = unsafe {
        let named = |name: &'static CStr| {
            let valid = ffi::PyCapsule_IsValid(capsule.as_ptr(), name.as_ptr()) != 0;
            valid.then(|| ffi::PyCapsule_GetPointer(capsule.as_ptr(), name.as_ptr()))
        };
        if let Some(at) = named(c"dltensor_versioned") {
            let versioned = &*at.cast::<DlVersioned>();
            (&versioned.tensor, versioned.flags)
        } else if let Some(at) = named(c"dltensor") {
            (&*at.cast::<DlTensor>(), 0)
        } else {
            return Err(usage.no_type("gives something else by __dlpack__ than a fresh capsule"));
        }
    };
    if usage.writes && flags & READ_ONLY != 0 {
        return Err(usage.read_only());
    }
    let device = match tensor.device {
        ON_CPU | ON_CUDA_HOST => -1,
        ON_CUDA => tensor.ordinal,
        other => {
            return Err(usage.no_type(format!(
                "is on a device of DLPack type {other}; smddp moves host and CUDA memory"
            )));
        }
    };
    let dtype = tensor.dtype().ok_or_else(|| {
        let (code, bits, lanes) = (tensor.code, tensor.bits, tensor.lanes);
        usage.no_type(format!(
            "has elements of DLPack type ({code}, {bits} bits, {lanes} lanes), which smddp does not move"
        ))
    })?;
    // SAFETY: a whole tensor, whose numbers live as long as the capsule.
    let (ptr, count) = unsafe { tensor.row() }.ok_or_else(|| usage.not_contiguous())?;
    Ok(Some((Elements { ptr, count, dtype, device }, capsule.unbind())))
}

impl DlTensor {
    /// # Safety
    /// Somebody has filled it in, and what it describes still lives.
    pub(crate) unsafe fn shape(&self) -> &[i64] {
        // SAFETY: as many numbers as dimensions.
        unsafe { numbers(self.shape, self.ndim) }
    }

    /// Address and number of its elements, if they lie in C's order without gaps.
    ///
    /// # Safety
    /// As of [`Self::shape`].
    pub(crate) unsafe fn row(&self) -> Option<(*mut u8, usize)> {
        // SAFETY: the caller's promise; strides may be absent.
        let (shape, strides) = unsafe { (self.shape(), numbers(self.strides, self.ndim)) };
        let count = shape.iter().map(|&n| n as usize).product();
        contiguous(shape, strides, 1).then(|| (self.data.wrapping_add(self.byte_offset as usize), count))
    }

    /// `None`: of a type that smddp does not move.
    pub(crate) fn dtype(&self) -> Option<DType> {
        if self.lanes != 1 {
            return None;
        }
        Some(match (self.code, self.bits) {
            (0, 8) => DType::I8,
            (0, 16) => DType::I16,
            (0, 32) => DType::I32,
            (0, 64) => DType::I64,
            (1, 8) => DType::U8,
            (1, 16) => DType::U16,
            (1, 32) => DType::U32,
            (1, 64) => DType::U64,
            (2, 16) => DType::F16,
            (2, 32) => DType::F32,
            (2, 64) => DType::F64,
            (4, 16) => DType::BF16,
            (5, 32) => DType::C32,
            (5, 64) => DType::C64,
            (5, 128) => DType::C128,
            (6, 8) => DType::Bool,
            // The float8 types.
            (7..=14, 8) => DType::Opaque1,
            _ => return None,
        })
    }
}
