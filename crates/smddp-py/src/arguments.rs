//! Conversion of numeric arguments. A `TypeError` names the argument, on every Python version.

use pyo3::exceptions::{PyOverflowError, PyTypeError, PyValueError};
use pyo3::prelude::*;

/// Converts the argument `name` to an integer.
fn integer(name: &str, value: &Bound<'_, PyAny>) -> PyResult<i64> {
    value.extract().map_err(|error| type_error(name, "an integer", value, error))
}

/// Converts the argument `name` to a non-negative integer.
fn unsigned(name: &str, value: &Bound<'_, PyAny>) -> PyResult<u64> {
    let value = integer(name, value)?;
    u64::try_from(value).map_err(|_| PyValueError::new_err(format!("{name} {value} is negative")))
}

fn type_error(name: &str, wanted: &str, value: &Bound<'_, PyAny>, error: PyErr) -> PyErr {
    if error.is_instance_of::<PyOverflowError>(value.py()) {
        let reason = format!("{name} {value:?} is out of range: expected {wanted} of at most {}", i64::MAX);
        return PyValueError::new_err(reason);
    }
    if !error.is_instance_of::<PyTypeError>(value.py()) {
        return error;
    }
    let found = value.get_type().name().map_or_else(|_| "another type".to_owned(), |name| name.to_string());
    PyTypeError::new_err(format!("{name} must be {wanted}, not {found} ({value:?})"))
}

pub(crate) fn root_of(value: &Bound<'_, PyAny>) -> PyResult<i64> {
    integer("root", value)
}

pub(crate) fn dst_of(value: &Bound<'_, PyAny>) -> PyResult<i64> {
    integer("dst", value)
}

pub(crate) fn tag_of(value: &Bound<'_, PyAny>) -> PyResult<i64> {
    integer("tag", value)
}

/// Converts the source of a receive; `None` is any rank.
pub(crate) fn src_of(value: &Bound<'_, PyAny>) -> PyResult<Option<i64>> {
    if value.is_none() { Ok(None) } else { integer("src", value).map(Some) }
}

/// Converts a timeout to seconds: a number or a `datetime.timedelta`, as in torch. `None` is the group's timeout.
pub(crate) fn timeout_of(value: &Bound<'_, PyAny>) -> PyResult<Option<f64>> {
    if value.is_none() {
        return Ok(None);
    }
    let seconds = value.call_method0("total_seconds");
    let seconds = seconds.as_ref().unwrap_or(value).extract::<f64>();
    let wanted = "a number of seconds or a datetime.timedelta";
    seconds.map(Some).map_err(|error| type_error("timeout", wanted, value, error))
}

/// Converts the stream of a call: a raw CUDA handle or `None`.
pub(crate) fn stream_of(value: &Bound<'_, PyAny>) -> PyResult<Option<u64>> {
    if value.is_none() { Ok(None) } else { unsigned("stream", value).map(Some) }
}

/// Converts the numbers of elements of each rank, or `None`.
pub(crate) fn counts_of(value: &Bound<'_, PyAny>) -> PyResult<Option<Vec<i64>>> {
    if value.is_none() {
        return Ok(None);
    }
    let counts =
        value.try_iter().map_err(|error| type_error("counts", "a sequence of integers", value, error))?;
    counts.map(|count| integer("a count of", &count?)).collect::<PyResult<_>>().map(Some)
}

/// Converts the numbers of sent and of received elements, or `None`.
pub(crate) fn pair_of_counts_of(value: &Bound<'_, PyAny>) -> PyResult<Option<(Vec<i64>, Vec<i64>)>> {
    if value.is_none() {
        return Ok(None);
    }
    let (sent, received): (Bound<'_, PyAny>, Bound<'_, PyAny>) = value
        .extract()
        .map_err(|error| type_error("counts", "a pair of sequences of integers", value, error))?;
    Ok(counts_of(&sent)?.zip(counts_of(&received)?))
}

/// Converts the color of a split, or `None`.
pub(crate) fn color_of(value: &Bound<'_, PyAny>) -> PyResult<Option<i64>> {
    if value.is_none() { Ok(None) } else { integer("color", value).map(Some) }
}

pub(crate) fn key_of(value: &Bound<'_, PyAny>) -> PyResult<i64> {
    integer("key", value)
}
