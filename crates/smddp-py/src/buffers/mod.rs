//! Where an array's elements are: numpy's own fields, the buffer protocol, DLPack.
//!
//! The unsafe here reads structures that other libraries fill: their layouts are part of those libraries' stable binary
//! interfaces (numpy's array object, CPython's `Py_buffer`, DLPack 0 and 1), and all of it happens with the GIL held.

pub(crate) mod dlpack;
mod numpy;
mod view;

use std::ffi::c_int;
use std::ops::Mul;

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use smddp_core::DType;

use self::view::View;

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
    Err(usage.no_type(format!(
        "is a {}: give a numpy array, or anything with the buffer protocol or __dlpack__",
        kind.name()?
    )))
}

/// Rows in C's order without gaps; where there is nothing, or one alone, a stride says nothing.
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
/// `at` has `count` numbers, or there are none.
unsafe fn numbers<'a, T>(at: *const T, count: c_int) -> &'a [T] {
    if at.is_null() || count <= 0 {
        return &[];
    }
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(at, count as usize) }
}
