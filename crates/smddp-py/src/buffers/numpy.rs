//! numpy arrays, read through their C structure.

use std::ffi::{c_char, c_int};

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyType};
use smddp_core::DType;

use super::{Access, Elements, numbers};

/// The first fields of `PyArrayObject_fields`, equal in numpy 1 and 2.
#[repr(C)]
struct NumpyArray {
    head: ffi::PyObject,
    data: *mut u8,
    dimensions: c_int,
    shape: *const isize,
    strides: *const isize,
    base: *mut ffi::PyObject,
    descr: *const NumpyType,
    flags: c_int,
}

/// The first fields of `PyArray_Descr`, equal in numpy 1 and 2.
#[repr(C)]
struct NumpyType {
    head: ffi::PyObject,
    scalar: *mut ffi::PyObject,
    kind: c_char,
    letter: c_char,
    byte_order: c_char,
    unused: c_char,
    number: c_int,
}

const C_CONTIGUOUS: c_int = 1;
const WRITEABLE: c_int = 0x400;

/// Returns numpy's array type, or `None` if numpy is not loaded: then no arrays exist.
fn numpy_arrays(py: Python<'_>) -> Option<&Bound<'_, PyType>> {
    static TYPE: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    if let Some(found) = TYPE.get(py) {
        return Some(found.bind(py));
    }
    let modules = py.import("sys").ok()?.getattr("modules").ok()?;
    let numpy = modules.cast::<PyDict>().ok()?.get_item("numpy").ok()??;
    let found = numpy.getattr("ndarray").ok()?.cast_into::<PyType>().ok()?.unbind();
    Some(TYPE.get_or_init(py, || found).bind(py))
}

/// Returns true if the array is a masked array, whose mask would not be transferred.
fn is_masked(array: &Bound<'_, PyAny>) -> PyResult<bool> {
    let modules = array.py().import("sys")?.getattr("modules")?;
    let Some(module) = modules.cast::<PyDict>()?.get_item("numpy.ma")? else { return Ok(false) };
    array.is_instance(&module.getattr("MaskedArray")?)
}

/// Returns `None` for an object that is not a numpy array.
pub(super) fn elements(array: &Bound<'_, PyAny>, usage: Access) -> PyResult<Option<Elements>> {
    let Some(kind) = numpy_arrays(array.py()) else { return Ok(None) };
    if !array.is_exact_instance(kind) {
        if !array.is_instance(kind)? {
            return Ok(None);
        }
        if is_masked(array)? {
            let reason = "is a numpy.ma.MaskedArray, whose mask would be lost; give array.data, array.mask or array.filled()";
            return Err(usage.type_error(reason));
        }
    }
    // SAFETY: an instance of numpy.ndarray begins with these fields and owns its type descriptor. The GIL prevents
    // concurrent changes.
    let (array_fields, described) = unsafe {
        let fields = &*array.as_ptr().cast::<NumpyArray>();
        (fields, &*fields.descr)
    };
    if array_fields.flags & C_CONTIGUOUS == 0 {
        return Err(usage.not_contiguous());
    }
    if usage.writes && array_fields.flags & WRITEABLE == 0 {
        return Err(usage.read_only());
    }
    if described.byte_order as u8 == b'>' {
        return Err(usage.value_error("has big-endian elements; give a copy in this machine's byte order"));
    }
    let dtype = match described.number {
        0 => DType::Bool,
        1 => DType::I8,
        2 => DType::U8,
        3 => DType::I16,
        4 => DType::U16,
        5 => DType::I32,
        6 => DType::U32,
        7 | 9 => DType::I64,
        8 | 10 => DType::U64,
        11 => DType::F32,
        12 => DType::F64,
        14 => DType::C64,
        15 => DType::C128,
        23 => DType::F16,
        _ => by_name(array, usage)?,
    };
    // SAFETY: `shape` has `dimensions` numbers.
    let shape = unsafe { numbers(array_fields.shape, array_fields.dimensions) };
    let count = shape.iter().map(|&n| n as usize).product();
    Ok(Some(Elements { ptr: array_fields.data, count, dtype, device: -1 }))
}

/// Returns the type of an extension of numpy, such as `ml_dtypes`.
fn by_name(array: &Bound<'_, PyAny>, usage: Access) -> PyResult<DType> {
    let dtype = array.getattr("dtype")?;
    let name: String = dtype.getattr("name")?.extract()?;
    Ok(match name.as_str() {
        "bfloat16" => DType::BF16,
        name if name.starts_with("float8") => DType::Opaque1,
        _ => {
            return Err(
                usage.type_error(format!("has elements of type {name}, which smddp does not support"))
            );
        }
    })
}
