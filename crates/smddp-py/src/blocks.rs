//! Buffers as Python passes them: addresses and element counts.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};
use smddp_core::Blocks;

/// Owned form of [`Blocks`].
pub(crate) enum BlockArgument {
    None,
    Flat(usize, usize),
    Cut(usize, Vec<usize>),
    List(Vec<(*mut u8, usize)>),
}

impl BlockArgument {
    pub(crate) fn borrow(&self) -> Blocks<'_> {
        match self {
            BlockArgument::None => Blocks::None,
            BlockArgument::Flat(ptr, count) => Blocks::Flat { ptr: *ptr as *mut u8, count: *count },
            BlockArgument::Cut(ptr, counts) => Blocks::Cut { ptr: *ptr as *mut u8, counts },
            BlockArgument::List(parts) => Blocks::List { parts },
        }
    }
}

/// Parses `None`, `(address, count)`, `(address, [counts])` or `[(address, count), ...]`.
pub(crate) fn parse(object: &Bound<'_, PyAny>) -> PyResult<BlockArgument> {
    if object.is_none() {
        return Ok(BlockArgument::None);
    }
    if let Ok(pair) = object.cast::<PyTuple>()
        && pair.len() == 2
    {
        let (ptr, count) = (pair.get_item(0)?, pair.get_item(1)?);
        if let Ok(ptr) = ptr.extract::<usize>() {
            return match count.extract::<usize>() {
                Ok(count) => Ok(BlockArgument::Flat(ptr, count)),
                Err(_) => Ok(BlockArgument::Cut(ptr, count.extract()?)),
            };
        }
    }
    if let Ok(list) = object.cast::<PyList>() {
        let parts = list
            .iter()
            .map(|item| item.extract::<(usize, usize)>().map(|(ptr, count)| (ptr as *mut u8, count)));
        return Ok(BlockArgument::List(parts.collect::<PyResult<_>>()?));
    }
    let parts: Vec<(usize, usize)> = object.extract().map_err(|_| {
        PyValueError::new_err(format!(
            "invalid buffer {object:?}: expected the form of _Blocks in smddp/_core.pyi"
        ))
    })?;
    Ok(BlockArgument::List(parts.into_iter().map(|(ptr, count)| (ptr as *mut u8, count)).collect()))
}
