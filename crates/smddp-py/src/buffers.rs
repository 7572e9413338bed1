//! Where an array's elements are: numpy's own fields, the buffer protocol, DLPack.
//!
//! The unsafe here reads structures that other libraries fill: their layouts are part of those libraries' stable binary
//! interfaces (numpy's array object, CPython's `Py_buffer`, DLPack 0 and 1), and all of it happens with the GIL held.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyType};
use smddp_core::DType;

/// Elements in a row that an array has.
#[derive(Clone, Copy)]
pub(crate) struct Elements {
    pub(crate) ptr: *mut u8,
    pub(crate) count: usize,
    pub(crate) dtype: DType,
    /// The CUDA device that the address is of; -1 for the host.
    pub(crate) device: i32,
}

/// What keeps an address valid that an object gave away for reading or writing.
pub(crate) enum Export {
    /// The object itself does, as long as somebody holds it.
    Object,
    /// In place: exporters may point into it.
    View(#[expect(dead_code, reason = "released when dropped")] Box<View>),
    /// A DLPack capsule that nobody consumed: its own end gives the tensor back.
    Capsule(#[expect(dead_code, reason = "given back when dropped")] Py<PyAny>),
}

/// How an array is going to be used: as which argument of which call, and whether it is written.
#[derive(Clone, Copy)]
pub(crate) struct Use {
    pub(crate) call: &'static str,
    pub(crate) argument: &'static str,
    pub(crate) writes: bool,
    /// For arrays of a device: the caller's stream there.
    pub(crate) stream: Option<u64>,
}

impl Use {
    fn refused(self, why: impl std::fmt::Display) -> PyErr {
        PyValueError::new_err(format!("{}: {} {why}", self.call, self.argument))
    }

    fn no_type(self, what: impl std::fmt::Display) -> PyErr {
        PyTypeError::new_err(format!("{}: {} {what}", self.call, self.argument))
    }

    fn not_contiguous(self) -> PyErr {
        self.refused("is not contiguous in memory; give a contiguous copy (numpy.ascontiguousarray)")
    }

    fn read_only(self) -> PyErr {
        self.refused("is read-only, and the call writes to it; give a copy, or another array as out=")
    }
}

/// Where the elements of `array` are.
///
/// # Errors
/// TypeError for what is no array or has elements that cannot be moved; ValueError for an array that is not contiguous, is
/// in another byte order, or would be written and is read-only.
pub(crate) fn elements(array: &Bound<'_, PyAny>, usage: Use) -> PyResult<(Elements, Export)> {
    if let Some(found) = of_numpy(array, usage)? {
        return Ok((found, Export::Object));
    }
    if let Some((found, view)) = View::of(array, usage)? {
        return Ok((found, Export::View(view)));
    }
    if let Some((found, capsule)) = of_dlpack(array, usage)? {
        return Ok((found, Export::Capsule(capsule)));
    }
    let kind = array.get_type();
    Err(usage.no_type(format!(
        "is a {}: give a numpy array, or anything with the buffer protocol or __dlpack__",
        kind.name()?
    )))
}

// ---- numpy ----

/// The beginning of `PyArrayObject_fields`: the same in numpy 1 and 2.
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

/// The beginning of `PyArray_Descr`: the same in numpy 1 and 2.
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

/// numpy's array type. Nobody has an array where numpy is not loaded.
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

fn of_numpy(array: &Bound<'_, PyAny>, usage: Use) -> PyResult<Option<Elements>> {
    let Some(kind) = numpy_arrays(array.py()) else { return Ok(None) };
    if !array.is_exact_instance(kind) && !array.is_instance(kind)? {
        return Ok(None);
    }
    // SAFETY: an instance of numpy.ndarray begins with these fields, and holds its type; the GIL keeps others from
    // changing them.
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
        return Err(usage.refused("has big-endian elements; give a copy in this machine's byte order"));
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
    // SAFETY: `shape` has as many numbers as there are dimensions.
    let shape = unsafe { numbers(array_fields.shape, array_fields.dimensions) };
    let count = shape.iter().map(|&n| n as usize).product();
    Ok(Some(Elements { ptr: array_fields.data, count, dtype, device: -1 }))
}

/// Types that other packages add to numpy, as `ml_dtypes` does.
fn by_name(array: &Bound<'_, PyAny>, usage: Use) -> PyResult<DType> {
    let dtype = array.getattr("dtype")?;
    let name: String = dtype.getattr("name")?.extract()?;
    Ok(match name.as_str() {
        "bfloat16" => DType::BF16,
        name if name.starts_with("float8") => DType::Opaque1,
        _ => {
            return Err(usage.no_type(format!("has elements of type {name}, which smddp does not move")));
        }
    })
}

/// # Safety
/// `at` has `count` numbers, or there are none.
unsafe fn numbers<'a, T>(at: *const T, count: c_int) -> &'a [T] {
    if at.is_null() || count <= 0 {
        return &[];
    }
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(at, count as usize) }
}

// ---- the buffer protocol ----

/// `Py_buffer`. CPython's stable interface has it from 3.11 on only; its layout has been this one since 3.0.
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

// SAFETY: addresses; whoever follows them has the GIL, which `drop` takes.
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
    fn of(object: &Bound<'_, PyAny>, usage: Use) -> PyResult<Option<(Elements, Box<Self>)>> {
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
            let why = PyErr::fetch(py);
            // Whether it can be read tells why it cannot be written.
            // SAFETY: as above.
            let reads = usage.writes
                && unsafe { PyObject_GetBuffer(object.as_ptr(), &raw mut *view, STRIDES | FORMAT) } == 0;
            if reads {
                return Err(usage.read_only());
            }
            drop(PyErr::take(py));
            if object.hasattr("__dlpack__")? {
                // Of a type that the buffer protocol has not.
                return Ok(None);
            }
            return Err(usage.refused(format!("gives no buffer: {why}")));
        }
        // SAFETY: the exporter filled them for so many dimensions; a format is a C string.
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
            usage.no_type(format!(
                "has elements of format '{format}' ({bytes} bytes), which smddp does not move"
            ))
        })?;
        let found = Elements { ptr: view.buf.cast(), count: view.len as usize / bytes, dtype, device: -1 };
        Ok(Some((found, view)))
    }
}

impl Drop for View {
    fn drop(&mut self) {
        if !self.obj.is_null() {
            // SAFETY: filled by `PyObject_GetBuffer` and released once, with the GIL.
            Python::attach(|_| unsafe { PyBuffer_Release(self) });
        }
    }
}

/// Rows in C's order without gaps; where there is nothing, or one alone, a stride says nothing.
fn contiguous(shape: &[isize], strides: &[isize], itemsize: isize) -> bool {
    if strides.is_empty() || shape.contains(&0) {
        return true;
    }
    let mut expected = itemsize;
    shape.iter().zip(strides).rev().all(|(&n, &stride)| {
        let fits = n == 1 || stride == expected;
        expected *= n;
        fits
    })
}

/// A format of the struct module, of one element.
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

// ---- DLPack ----

#[repr(C)]
struct DlTensor {
    data: *mut u8,
    device: i32,
    ordinal: i32,
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
const ON_CPU: i32 = 1;
const ON_CUDA: i32 = 2;
const ON_CUDA_HOST: i32 = 3;

fn of_dlpack(array: &Bound<'_, PyAny>, usage: Use) -> PyResult<Option<(Elements, Py<PyAny>)>> {
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
    let dtype = of_code(tensor).ok_or_else(|| {
        let (code, bits, lanes) = (tensor.code, tensor.bits, tensor.lanes);
        usage.no_type(format!(
            "has elements of DLPack type ({code}, {bits} bits, {lanes} lanes), which smddp does not move"
        ))
    })?;
    // SAFETY: as many numbers as dimensions; strides may be absent.
    let (shape, strides) =
        unsafe { (numbers(tensor.shape, tensor.ndim), numbers(tensor.strides, tensor.ndim)) };
    let sizes = |numbers: &[i64]| numbers.iter().map(|&n| n as isize).collect::<Vec<_>>();
    if !contiguous(&sizes(shape), &sizes(strides), 1) {
        return Err(usage.not_contiguous());
    }
    let count = shape.iter().map(|&n| n as usize).product();
    let ptr = tensor.data.wrapping_add(tensor.byte_offset as usize);
    Ok(Some((Elements { ptr, count, dtype, device }, capsule.unbind())))
}

fn of_code(tensor: &DlTensor) -> Option<DType> {
    let (DlTensor { code, bits, .. }, 1) = (tensor, tensor.lanes) else { return None };
    Some(match (code, bits) {
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
