//! Python's buffer protocol.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;

use pyo3::ffi;
use pyo3::prelude::*;
use smddp_core::DType;

use super::{Access, Elements, contiguous, numbers};

/// `Py_buffer`. CPython's stable ABI contains it since 3.11; its layout is unchanged since 3.0.
#[repr(C)]
pub(crate) struct View {
    buf: *mut c_void,
    obj: *mut ffi::PyObject,
    len: isize,
    itemsize: isize,
    readonly: c_int,
    ndim: c_int,
    format: *const c_char,
    shape: *const isize,
    strides: *const isize,
    suboffsets: *const isize,
    internal: *mut c_void,
}

// SAFETY: addresses that are only dereferenced with the GIL held; `drop` acquires it.
unsafe impl Send for View {}
// SAFETY: as above.
unsafe impl Sync for View {}

unsafe extern "C" {
    fn PyObject_CheckBuffer(object: *mut ffi::PyObject) -> c_int;
    fn PyObject_GetBuffer(object: *mut ffi::PyObject, view: *mut View, flags: c_int) -> c_int;
    fn PyBuffer_Release(view: *mut View);
}

const WRITABLE: c_int = 1;
const FORMAT: c_int = 4;
const STRIDES: c_int = 0x18;

impl View {
    /// Returns `None` for an object without the protocol, or with an element type that only DLPack supports.
    pub(super) fn of(object: &Bound<'_, PyAny>, usage: Access) -> PyResult<Option<(Elements, Box<Self>)>> {
        // SAFETY: a live object, with the GIL.
        if unsafe { PyObject_CheckBuffer(object.as_ptr()) } == 0 {
            return Ok(None);
        }
        let mut view = Box::new(View {
            buf: ptr::null_mut(),
            obj: ptr::null_mut(),
            len: 0,
            itemsize: 0,
            readonly: 0,
            ndim: 0,
            format: ptr::null(),
            shape: ptr::null(),
            strides: ptr::null(),
            suboffsets: ptr::null(),
            internal: ptr::null_mut(),
        });
        let py = object.py();
        let asked = if usage.writes { STRIDES | FORMAT | WRITABLE } else { STRIDES | FORMAT };
        // SAFETY: as above; the view is filled in place and not moved until it is released.
        if unsafe { PyObject_GetBuffer(object.as_ptr(), &raw mut *view, asked) } != 0 {
            let reason = PyErr::fetch(py);
            // If a read-only view is possible, the reason is a read-only array.
            // SAFETY: as above.
            let reads = usage.writes
                && unsafe { PyObject_GetBuffer(object.as_ptr(), &raw mut *view, STRIDES | FORMAT) } == 0;
            if reads {
                return Err(usage.read_only());
            }
            drop(PyErr::take(py));
            if object.hasattr("__dlpack__")? {
                // Its element type is not supported by the buffer protocol.
                return Ok(None);
            }
            return Err(usage.value_error(format!("gives no buffer: {reason}")));
        }
        // SAFETY: the exporter filled the arrays with `ndim` numbers; a format is a C string.
        let (shape, strides, format) = unsafe {
            let format = (!view.format.is_null()).then(|| CStr::from_ptr(view.format).to_bytes());
            (numbers(view.shape, view.ndim), numbers(view.strides, view.ndim), format.unwrap_or(b"B"))
        };
        if !contiguous(shape, strides, view.itemsize) || !view.suboffsets.is_null() {
            return Err(usage.not_contiguous());
        }
        let bytes = view.itemsize.max(1) as usize;
        let dtype = of_format(format, bytes).ok_or_else(|| {
            let format = String::from_utf8_lossy(format);
            usage.type_error(format!(
                "has elements of format '{format}' ({bytes} bytes), which smddp does not support"
            ))
        })?;
        let found = Elements { ptr: view.buf.cast(), count: view.len as usize / bytes, dtype, device: -1 };
        Ok(Some((found, view)))
    }
}

impl Drop for View {
    fn drop(&mut self) {
        if !self.obj.is_null() {
            // SAFETY: `PyObject_GetBuffer` filled it, and it is released once, with the GIL.
            Python::attach(|_| unsafe { PyBuffer_Release(self) });
        }
    }
}

/// Returns the element type of a format of Python's `struct` module.
fn of_format(format: &[u8], bytes: usize) -> Option<DType> {
    let format = match format {
        [b'@' | b'=' | b'<', rest @ ..] => rest,
        format => format,
    };
    Some(match (format, bytes) {
        (b"?", 1) => DType::Bool,
        (b"b", 1) => DType::I8,
        (b"B" | b"c", 1) => DType::U8,
        (b"h", 2) => DType::I16,
        (b"H", 2) => DType::U16,
        (b"i" | b"l", 4) => DType::I32,
        (b"I" | b"L", 4) => DType::U32,
        (b"l" | b"q" | b"n", 8) => DType::I64,
        (b"L" | b"Q" | b"N", 8) => DType::U64,
        (b"e", 2) => DType::F16,
        (b"f", 4) => DType::F32,
        (b"d", 8) => DType::F64,
        (b"Zf" | b"F", 8) => DType::C64,
        (b"Zd" | b"D", 16) => DType::C128,
        _ => return None,
    })
}
