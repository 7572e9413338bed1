//! Conversion of numeric arguments. A `TypeError` names the argument, on every Python version.

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

/// An integer that `name` needs.
fn integer(name: &str, value: &Bound<'_, PyAny>) -> PyResult<i64> {
    value.extract().map_err(|error| of_type(name, "an integer", value, error))
}

fn of_type(name: &str, wanted: &str, value: &Bound<'_, PyAny>, error: PyErr) -> PyErr {
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

/// The source of a recv; `None` is any rank.
pub(crate) fn src_of(value: &Bound<'_, PyAny>) -> PyResult<Option<i64>> {
    if value.is_none() { Ok(None) } else { integer("src", value).map(Some) }
}

/// Seconds of a deadline: a number, or a `datetime.timedelta` as torch takes it. `None` is the group's own deadline.
pub(crate) fn timeout_of(value: &Bound<'_, PyAny>) -> PyResult<Option<f64>> {
    if value.is_none() {
        return Ok(None);
    }
    let seconds = value.call_method0("total_seconds");
    let seconds = seconds.as_ref().unwrap_or(value).extract::<f64>();
    let wanted = "a number of seconds or a datetime.timedelta";
    seconds.map(Some).map_err(|error| of_type("timeout", wanted, value, error))
}
