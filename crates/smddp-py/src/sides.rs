//! The two sides of a call on arrays: what each array is, how it is cut, and what keeps its address valid.

use pyo3::exceptions::{PyMemoryError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use smddp_core::{Blocks, DType};

use crate::buffers::{Elements, Export, Use, elements};

/// What a call under way holds: arrays, and what makes their addresses valid. A Python object, since only that may be let go
/// of on any thread.
#[pyclass(frozen)]
pub(crate) struct Held {
    #[expect(dead_code, reason = "held until the call is over")]
    exports: Vec<Export>,
    #[expect(dead_code, reason = "held until the call is over")]
    arrays: Vec<Py<PyAny>>,
}

/// One side of a call.
pub(crate) struct Side<'a, 'py> {
    array: &'a Bound<'py, PyAny>,
    pub(crate) elements: Elements,
    export: Export,
    pub(crate) blocks: Blocks<'a>,
}

impl<'a> Side<'a, '_> {
    /// The other side of a call in place.
    pub(crate) fn again(&self) -> Self {
        Side { array: self.array, elements: self.elements, export: Export::Object, blocks: self.blocks }
    }

    /// Cut in blocks of these counts, if any.
    pub(crate) fn cut(self, how: How, counts: Option<&'a [usize]>) -> PyResult<Self> {
        let Elements { ptr, count, .. } = self.elements;
        let Some(counts) = counts else { return Ok(self) };
        let sum = counts.iter().sum::<usize>();
        if sum == count {
            return Ok(Side { blocks: Blocks::Cut { ptr, counts }, ..self });
        }
        Err(PyValueError::new_err(format!(
            "{}: counts {counts:?} are {sum} elements together, and the array has {count}",
            how.call
        )))
    }

    /// Messages go from host memory.
    pub(crate) fn on_host(self, how: How) -> PyResult<Self> {
        if self.elements.device < 0 {
            return Ok(self);
        }
        Err(PyValueError::new_err(format!(
            "{}: the array is on CUDA device {}; messages go from host memory: copy it there, or use a collective",
            how.call, self.elements.device
        )))
    }
}

/// How a call is to be made, as its keywords say.
#[derive(Clone, Copy)]
pub(crate) struct How {
    pub(crate) call: &'static str,
    pub(crate) asynchronous: bool,
    pub(crate) timeout: Option<f64>,
    pub(crate) stream: Option<u64>,
}

impl How {
    /// # Errors
    /// ValueError for a deadline that is over before it begins.
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

    /// A rank, root, tag or count, which is never negative.
    pub(crate) fn number(self, name: &str, value: i64) -> PyResult<usize> {
        usize::try_from(value)
            .map_err(|_| PyValueError::new_err(format!("{}: {name} {value} is negative", self.call)))
    }

    /// Counts of blocks, whose sum is a number of elements too.
    pub(crate) fn counts(self, counts: Option<Vec<i64>>) -> PyResult<Option<Vec<usize>>> {
        let Some(counts) = counts else { return Ok(None) };
        if counts.iter().try_fold(0_i64, |sum, &count| sum.checked_add(count)).is_none() {
            let why =
                format!("{}: the sum of counts {counts:?} is out of range: at most {}", self.call, i64::MAX);
            return Err(PyValueError::new_err(why));
        }
        counts.into_iter().map(|count| self.number("a count of", count)).collect::<PyResult<_>>().map(Some)
    }

    pub(crate) fn input<'a, 'py>(self, array: &'a Bound<'py, PyAny>) -> PyResult<Side<'a, 'py>> {
        self.side(array, "the array", false)
    }

    /// An array that is input and output.
    pub(crate) fn place<'a, 'py>(self, array: &'a Bound<'py, PyAny>) -> PyResult<Side<'a, 'py>> {
        self.side(array, "the array", true)
    }

    pub(crate) fn output<'a, 'py>(self, array: &'a Bound<'py, PyAny>) -> PyResult<Side<'a, 'py>> {
        self.side(array, "out", true)
    }

    fn side<'a, 'py>(
        self,
        array: &'a Bound<'py, PyAny>,
        argument: &'static str,
        writes: bool,
    ) -> PyResult<Side<'a, 'py>> {
        let usage = Use { call: self.call, argument, writes, stream: self.stream };
        let (elements, export) = elements(array, usage)?;
        let blocks = Blocks::Flat { ptr: elements.ptr, count: elements.count };
        Ok(Side { array, elements, export, blocks })
    }

    /// A new array for the output, like `like` but of that shape.
    pub(crate) fn fresh<'py>(self, like: &Bound<'py, PyAny>, shape: &[usize]) -> PyResult<Bound<'py, PyAny>> {
        if self.asynchronous {
            return Err(PyTypeError::new_err(format!(
                "{}: async_op=True needs out=, the array that the result goes to",
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
                "{}: needs out= where the array is no numpy array: {kind}",
                self.call
            ))
        })
    }

    pub(crate) fn shape(self, array: &Bound<'_, PyAny>) -> PyResult<Vec<usize>> {
        match array.getattr("shape") {
            Ok(shape) => shape.extract(),
            Err(_) => {
                Err(PyTypeError::new_err(format!("{}: needs out= where the array has no shape", self.call)))
            }
        }
    }

    /// The shape of one block of an array whose first dimension is cut in as many as there are ranks.
    pub(crate) fn cut(self, array: &Bound<'_, PyAny>, size: usize) -> PyResult<Vec<usize>> {
        let mut shape = self.shape(array)?;
        match shape.first_mut() {
            Some(first) if first.is_multiple_of(size) => {
                *first /= size;
                Ok(shape)
            }
            _ => Err(PyValueError::new_err(format!(
                "{}: the array of shape {shape:?} is not cut in {size} equal blocks along its first dimension; give \
                 counts= and out= for blocks that differ",
                self.call
            ))),
        }
    }
}

pub(crate) fn held<const N: usize>(sides: [Option<Side<'_, '_>>; N]) -> Held {
    let (arrays, exports) =
        sides.into_iter().flatten().map(|side| (side.array.clone().unbind(), side.export)).unzip();
    Held { exports, arrays }
}

/// The element type and device that all sides have.
pub(crate) fn agreed(how: How, sides: &[Option<Side<'_, '_>>; 2]) -> PyResult<(DType, i32)> {
    let (first, second) = match sides {
        [Some(first), Some(second)] => (first.elements, second.elements),
        [Some(only), None] | [None, Some(only)] => (only.elements, only.elements),
        [None, None] => return Ok((DType::U8, -1)),
    };
    if first.dtype != second.dtype {
        return Err(PyTypeError::new_err(format!(
            "{}: the array has elements of type {}, out has {}",
            how.call,
            first.dtype.name(),
            second.dtype.name()
        )));
    }
    if first.device != second.device {
        let place =
            |device: i32| if device < 0 { "the host".to_owned() } else { format!("CUDA device {device}") };
        return Err(PyValueError::new_err(format!(
            "{}: the array is on {}, out on {}",
            how.call,
            place(first.device),
            place(second.device)
        )));
    }
    Ok((first.dtype, first.device))
}
