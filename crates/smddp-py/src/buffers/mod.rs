//! Address and element type of an array, from numpy's fields, the buffer protocol or DLPack.
//!
//! The unsafe code reads structures of other libraries, whose layouts are part of their stable binary interfaces (numpy's
//! array object, CPython's `Py_buffer`, DLPack 0 and 1). It always runs with the GIL held.

pub(crate) mod dlpack;
mod numpy;
mod view;

use std::ffi::c_int;
use std::ops::Mul;

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use smddp_core::DType;

use self::view::View;

/// The contiguous elements of an array.
#[derive(Clone, Copy)]
pub(crate) struct Elements {
    pub(crate) ptr: *mut u8,
    pub(crate) count: usize,
    pub(crate) dtype: DType,
    /// The CUDA device of the address; -1 for the host.
    pub(crate) device: i32,
}

/// The owner that keeps an exported address valid.
pub(crate) enum Export {
    /// The array object itself, while it is referenced.
    Object,
    /// A buffer view. Boxed, since exporters may point into it.
    View(#[expect(dead_code, reason = "released when dropped")] Box<View>),
    /// A DLPack capsule that is not consumed: its destructor returns the tensor.
    Capsule(#[expect(dead_code, reason = "returned when dropped")] Py<PyAny>),
}

/// The intended use of an array: call, argument, and read or write.
#[derive(Clone, Copy)]
pub(crate) struct Access {
    pub(crate) call: &'static str,
    pub(crate) argument: &'static str,
    pub(crate) writes: bool,
    /// The caller's stream on the device of the array.
    pub(crate) stream: Option<u64>,
}

impl Access {
    fn value_error(self, reason: impl std::fmt::Display) -> PyErr {
        PyValueError::new_err(format!("{}: {} {reason}", self.call, self.argument))
    }

    fn type_error(self, what: impl std::fmt::Display) -> PyErr {
        PyTypeError::new_err(format!("{}: {} {what}", self.call, self.argument))
    }

    fn not_contiguous(self) -> PyErr {
        self.value_error("is not contiguous in memory; give a contiguous copy (numpy.ascontiguousarray)")
    }

    fn read_only(self) -> PyErr {
        self.value_error("is read-only, and the call writes to it; give a copy, or another array as out=")
    }
}

/// Returns the elements of `array`, and the owner of their address.
///
/// # Errors
/// TypeError for an object that is not an array, or for an unsupported element type. ValueError for an array that is not
/// contiguous, has another byte order, or is read-only but would be written.
pub(crate) fn elements(array: &Bound<'_, PyAny>, usage: Access) -> PyResult<(Elements, Export)> {
    if let Some(found) = numpy::elements(array, usage)? {
        return Ok((found, Export::Object));
    }
    if let Some((found, view)) = View::of(array, usage)? {
        return Ok((found, Export::View(view)));
    }
    if let Some((found, capsule)) = dlpack::elements(array, usage)? {
        return Ok((found, Export::Capsule(capsule)));
    }
    let kind = array.get_type();
    Err(usage.type_error(format!(
        "is a {}: give a numpy array, or anything with the buffer protocol or __dlpack__",
        kind.name()?
    )))
}

/// Returns true if the strides describe C order without gaps. The stride of a dimension of size 1, and of an empty array, is
/// ignored.
fn contiguous<T: Copy + PartialEq + From<u8> + Mul<Output = T>>(
    shape: &[T],
    strides: &[T],
    itemsize: T,
) -> bool {
    if strides.is_empty() || shape.contains(&T::from(0)) {
        return true;
    }
    let mut expected = itemsize;
    shape.iter().zip(strides).rev().all(|(&n, &stride)| {
        let fits = n == T::from(1) || stride == expected;
        expected = expected * n;
        fits
    })
}

/// # Safety
/// `at` points to `count` numbers, or is null.
unsafe fn numbers<'a, T>(at: *const T, count: c_int) -> &'a [T] {
    if at.is_null() || count <= 0 {
        return &[];
    }
    // SAFETY: the contract of this function.
    unsafe { std::slice::from_raw_parts(at, count as usize) }
}
