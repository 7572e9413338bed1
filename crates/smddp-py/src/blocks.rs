//! Buffers as Python names them: addresses and element counts.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};
use smddp_core::Blocks;

/// Owns what a `Blocks` borrows.
pub(crate) enum Given {
    None,
    Flat(usize, usize),
    Cut(usize, Vec<usize>),
    List(Vec<(*mut u8, usize)>),
}

impl Given {
    pub(crate) fn borrow(&self) -> Blocks<'_> {
        match self {
            Given::None => Blocks::None,
            Given::Flat(ptr, count) => Blocks::Flat { ptr: *ptr as *mut u8, count: *count },
            Given::Cut(ptr, counts) => Blocks::Cut { ptr: *ptr as *mut u8, counts },
            Given::List(parts) => Blocks::List { parts },
        }
    }
}

/// `None`, `(address, count)`, `(address, [counts])` or `[(address, count), ...]`.
pub(crate) fn parse(object: &Bound<'_, PyAny>) -> PyResult<Given> {
    if object.is_none() {
        return Ok(Given::None);
    }
    if let Ok(pair) = object.cast::<PyTuple>()
        && pair.len() == 2
    {
        let (ptr, count) = (pair.get_item(0)?, pair.get_item(1)?);
        if let Ok(ptr) = ptr.extract::<usize>() {
            return match count.extract::<usize>() {
                Ok(count) => Ok(Given::Flat(ptr, count)),
                Err(_) => Ok(Given::Cut(ptr, count.extract()?)),
            };
        }
    }
    if let Ok(list) = object.cast::<PyList>() {
        let parts = list
            .iter()
            .map(|item| item.extract::<(usize, usize)>().map(|(ptr, count)| (ptr as *mut u8, count)));
        return Ok(Given::List(parts.collect::<PyResult<_>>()?));
    }
    let parts: Vec<(usize, usize)> = object
        .extract()
        .map_err(|_| PyValueError::new_err(format!("not a buffer: {object:?} (see smddp/_core.pyi)")))?;
    Ok(Given::List(parts.into_iter().map(|(ptr, count)| (ptr as *mut u8, count)).collect()))
}
