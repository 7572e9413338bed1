//! DLPack tensors on the host and on CUDA devices.

use std::ffi::{CStr, c_void};

use pyo3::exceptions::PyTypeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use smddp_core::DType;

use super::{Access, Elements, contiguous, numbers};

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

/// The first fields of a DLPack 1 tensor. A DLPack 0 tensor begins with its `DlTensor`.
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

/// Returns `None` for an object without `__dlpack_device__`.
pub(super) fn elements(array: &Bound<'_, PyAny>, usage: Access) -> PyResult<Option<(Elements, Py<PyAny>)>> {
    let py = array.py();
    let Ok(device) = array.call_method0("__dlpack_device__") else { return Ok(None) };
    let (device, _): (i32, i32) = device.extract()?;
    // JAX arrays are immutable, which DLPack 0 cannot express.
    if usage.writes && array.get_type().module()?.to_cow()?.starts_with("jax") {
        return Err(usage.read_only());
    }
    let arguments = PyDict::new(py);
    if let (ON_CUDA, Some(stream)) = (device, usage.stream) {
        // DLPack's number of the default stream is 1.
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
    let capsule = asked.map_err(|reason| usage.value_error(format!("gives no DLPack tensor: {reason}")))?;
    // SAFETY: a live object, with the GIL. A capsule of that name contains a tensor of that version, which lives as long as
    // the capsule, because it is not consumed.
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
            return Err(usage.type_error("returns no unconsumed capsule from __dlpack__"));
        }
    };
    if usage.writes && flags & READ_ONLY != 0 {
        return Err(usage.read_only());
    }
    let device = match tensor.device {
        ON_CPU | ON_CUDA_HOST => -1,
        ON_CUDA => tensor.ordinal,
        other => {
            return Err(usage.type_error(format!(
                "is on a device of DLPack type {other}; smddp supports host and CUDA memory"
            )));
        }
    };
    let dtype = tensor.dtype().ok_or_else(|| {
        let (code, bits, lanes) = (tensor.code, tensor.bits, tensor.lanes);
        usage.type_error(format!(
            "has elements of DLPack type ({code}, {bits} bits, {lanes} lanes), which smddp does not support"
        ))
    })?;
    // SAFETY: a complete tensor, whose shape and strides live as long as the capsule.
    let (ptr, count) = unsafe { tensor.contiguous_elements() }.ok_or_else(|| usage.not_contiguous())?;
    Ok(Some((Elements { ptr, count, dtype, device }, capsule.unbind())))
}

impl DlTensor {
    /// # Safety
    /// The tensor is filled in, and the memory that it describes is live.
    pub(crate) unsafe fn shape(&self) -> &[i64] {
        // SAFETY: `shape` has `ndim` numbers.
        unsafe { numbers(self.shape, self.ndim) }
    }

    /// Returns address and number of the elements if they are contiguous in C order.
    ///
    /// # Safety
    /// As of [`Self::shape`].
    pub(crate) unsafe fn contiguous_elements(&self) -> Option<(*mut u8, usize)> {
        // SAFETY: the contract of this function; strides may be null.
        let (shape, strides) = unsafe { (self.shape(), numbers(self.strides, self.ndim)) };
        let count = shape.iter().map(|&n| n as usize).product();
        contiguous(shape, strides, 1).then(|| (self.data.wrapping_add(self.byte_offset as usize), count))
    }

    /// Returns the element type, or `None` if smddp does not support it.
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
