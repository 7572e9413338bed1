//! Input and output of a call on arrays: their elements, their blocks, and the objects that keep their addresses valid.

use pyo3::exceptions::{PyMemoryError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use smddp_core::{Blocks, DType};

use crate::buffers::{Access, Elements, Export, elements};

/// The arrays of a pending call, and the exports that keep their addresses valid. A Python object, since any thread can drop
/// a reference to it.
#[pyclass(frozen)]
pub(crate) struct HeldBuffer {
    #[expect(dead_code, reason = "kept until the call is done")]
    exports: Vec<Export>,
    #[expect(dead_code, reason = "kept until the call is done")]
    arrays: Vec<Py<PyAny>>,
}

/// Input or output of a call.
pub(crate) struct BufferSide<'a, 'py> {
    array: &'a Bound<'py, PyAny>,
    pub(crate) elements: Elements,
    export: Export,
    pub(crate) blocks: Blocks<'a>,
}

impl<'a> BufferSide<'a, '_> {
    /// Returns the other side of an in-place call.
    pub(crate) fn in_place(&self) -> Self {
        BufferSide { array: self.array, elements: self.elements, export: Export::Object, blocks: self.blocks }
    }

    /// Divides the array into blocks of these counts, if given.
    pub(crate) fn cut(self, options: CallOptions, counts: Option<&'a [usize]>) -> PyResult<Self> {
        let Elements { ptr, count, .. } = self.elements;
        let Some(counts) = counts else { return Ok(self) };
        let sum = counts.iter().sum::<usize>();
        if sum == count {
            return Ok(BufferSide { blocks: Blocks::Cut { ptr, counts }, ..self });
        }
        Err(PyValueError::new_err(format!(
            "{}: the sum of counts {counts:?} is {sum}, but the array has {count} elements",
            options.call
        )))
    }

    /// Returns an error for device memory: send and recv support host memory only.
    pub(crate) fn on_host(self, options: CallOptions) -> PyResult<Self> {
        if self.elements.device < 0 {
            return Ok(self);
        }
        Err(PyValueError::new_err(format!(
            "{}: the array is on CUDA device {}, but messages need host memory: copy the array to the host, or use a collective",
            options.call, self.elements.device
        )))
    }
}

/// Name and keyword arguments of a call.
#[derive(Clone, Copy)]
pub(crate) struct CallOptions {
    pub(crate) call: &'static str,
    pub(crate) asynchronous: bool,
    pub(crate) timeout: Option<f64>,
    pub(crate) stream: Option<u64>,
}

impl CallOptions {
    /// # Errors
    /// ValueError for a timeout that is not positive.
    pub(crate) fn new(
        call: &'static str,
        asynchronous: bool,
        timeout: Option<f64>,
        stream: Option<u64>,
    ) -> PyResult<Self> {
        match timeout {
            Some(seconds) if seconds.is_nan() || seconds <= 0.0 => Err(PyValueError::new_err(format!(
                "{call}: timeout must be a positive number of seconds, not {seconds}"
            ))),
            _ => Ok(Self { call, asynchronous, timeout, stream }),
        }
    }

    /// Converts a rank, root, tag or count, which must not be negative.
    pub(crate) fn number(self, name: &str, value: i64) -> PyResult<usize> {
        usize::try_from(value)
            .map_err(|_| PyValueError::new_err(format!("{}: {name} {value} is negative", self.call)))
    }

    /// Converts the element counts of blocks. Their sum must be a valid number of elements.
    pub(crate) fn counts(self, counts: Option<Vec<i64>>) -> PyResult<Option<Vec<usize>>> {
        let Some(counts) = counts else { return Ok(None) };
        if counts.iter().try_fold(0_i64, |sum, &count| sum.checked_add(count)).is_none() {
            let reason =
                format!("{}: the sum of counts {counts:?} is out of range: at most {}", self.call, i64::MAX);
            return Err(PyValueError::new_err(reason));
        }
        counts.into_iter().map(|count| self.number("a count of", count)).collect::<PyResult<_>>().map(Some)
    }

    pub(crate) fn input<'a, 'py>(self, array: &'a Bound<'py, PyAny>) -> PyResult<BufferSide<'a, 'py>> {
        self.side(array, "the array", false)
    }

    /// Returns the side of an array that is input and output.
    pub(crate) fn in_out<'a, 'py>(self, array: &'a Bound<'py, PyAny>) -> PyResult<BufferSide<'a, 'py>> {
        self.side(array, "the array", true)
    }

    pub(crate) fn output<'a, 'py>(self, array: &'a Bound<'py, PyAny>) -> PyResult<BufferSide<'a, 'py>> {
        self.side(array, "out", true)
    }

    fn side<'a, 'py>(
        self,
        array: &'a Bound<'py, PyAny>,
        argument: &'static str,
        writes: bool,
    ) -> PyResult<BufferSide<'a, 'py>> {
        let usage = Access { call: self.call, argument, writes, stream: self.stream };
        let (elements, export) = elements(array, usage)?;
        let blocks = Blocks::Flat { ptr: elements.ptr, count: elements.count };
        Ok(BufferSide { array, elements, export, blocks })
    }

    /// Returns a new output array with the element type of `like` and this shape.
    pub(crate) fn fresh<'py>(self, like: &Bound<'py, PyAny>, shape: &[usize]) -> PyResult<Bound<'py, PyAny>> {
        if self.asynchronous {
            return Err(PyTypeError::new_err(format!(
                "{}: async_op=True needs out=, the array for the result",
                self.call
            )));
        }
        let py = like.py();
        let made = || {
            let keywords = PyDict::new(py);
            keywords.set_item("dtype", like.getattr("dtype")?)?;
            py.import("numpy")?.call_method("empty", (PyTuple::new(py, shape)?,), Some(&keywords))
        };
        made().map_err(|error| {
            if error.is_instance_of::<PyMemoryError>(py) || error.is_instance_of::<PyValueError>(py) {
                return error;
            }
            let kind = like.get_type();
            PyTypeError::new_err(format!(
                "{}: an array of type {kind} needs out=, because only numpy results are allocated",
                self.call
            ))
        })
    }

    pub(crate) fn shape(self, array: &Bound<'_, PyAny>) -> PyResult<Vec<usize>> {
        match array.getattr("shape") {
            Ok(shape) => shape.extract(),
            Err(_) => Err(PyTypeError::new_err(format!("{}: an array without shape needs out=", self.call))),
        }
    }

    /// Returns the shape of one block of an array whose first dimension is divided into `size` blocks.
    pub(crate) fn cut(self, array: &Bound<'_, PyAny>, size: usize) -> PyResult<Vec<usize>> {
        let mut shape = self.shape(array)?;
        match shape.first_mut() {
            Some(first) if first.is_multiple_of(size) => {
                *first /= size;
                Ok(shape)
            }
            _ => Err(PyValueError::new_err(format!(
                "{}: the first dimension of shape {shape:?} is not divisible into {size} equal blocks; give \
                 counts= and out= for blocks that differ",
                self.call
            ))),
        }
    }
}

pub(crate) fn hold<const N: usize>(sides: [Option<BufferSide<'_, '_>>; N]) -> HeldBuffer {
    let (arrays, exports) =
        sides.into_iter().flatten().map(|side| (side.array.clone().unbind(), side.export)).unzip();
    HeldBuffer { exports, arrays }
}

/// Returns the common element type and device of the sides.
pub(crate) fn common_type(
    options: CallOptions,
    sides: &[Option<BufferSide<'_, '_>>; 2],
) -> PyResult<(DType, i32)> {
    let (first, second) = match sides {
        [Some(first), Some(second)] => (first.elements, second.elements),
        [Some(only), None] | [None, Some(only)] => (only.elements, only.elements),
        [None, None] => return Ok((DType::U8, -1)),
    };
    if first.dtype != second.dtype {
        return Err(PyTypeError::new_err(format!(
            "{}: the array has elements of type {}, out has {}",
            options.call,
            first.dtype.name(),
            second.dtype.name()
        )));
    }
    if first.device != second.device {
        let place =
            |device: i32| if device < 0 { "the host".to_owned() } else { format!("CUDA device {device}") };
        return Err(PyValueError::new_err(format!(
            "{}: the array is on {}, out on {}",
            options.call,
            place(first.device),
            place(second.device)
        )));
    }
    Ok((first.dtype, first.device))
}
