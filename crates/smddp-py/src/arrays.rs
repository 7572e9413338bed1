//! `Arrays`: a group's calls on arrays, without torch.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use smddp_core::{Blocks, Call, Collective, Communicator, DType, On, Options, RedOp, Stream};

use crate::buffers::{Elements, Export, Use, elements};
use crate::comm::{Comm, Sendable};
use crate::errors::raise;
use crate::work::{Work, seconds};

/// One group's ranks, for arrays. `smddp.Communicator` is made of it.
#[pyclass(subclass, frozen)]
pub(crate) struct Arrays {
    comm: Communicator,
    /// Messages and their bytes, by the rank that they went to.
    sent: Mutex<BTreeMap<usize, (u64, u64)>>,
}

/// What a call under way holds: arrays, and what makes their addresses valid. A Python object, since only that may be let go
/// of on any thread.
#[pyclass(frozen)]
struct Held {
    #[expect(dead_code, reason = "held until the call is over")]
    exports: Vec<Export>,
    #[expect(dead_code, reason = "held until the call is over")]
    arrays: Vec<Py<PyAny>>,
}

/// One side of a call: an array, what keeps its address valid, and its elements.
struct Side<'a, 'py> {
    array: &'a Bound<'py, PyAny>,
    elements: Elements,
    export: Export,
}

/// How a call is to be made, as its keywords say.
#[derive(Clone, Copy)]
struct How {
    call: &'static str,
    asynchronous: bool,
    timeout: Option<f64>,
    stream: Option<u64>,
}

impl How {
    fn input<'a, 'py>(self, array: &'a Bound<'py, PyAny>) -> PyResult<Side<'a, 'py>> {
        self.side(array, "the array", false)
    }

    /// An array that is input and output.
    fn place<'a, 'py>(self, array: &'a Bound<'py, PyAny>) -> PyResult<Side<'a, 'py>> {
        self.side(array, "the array", true)
    }

    fn output<'a, 'py>(self, array: &'a Bound<'py, PyAny>) -> PyResult<Side<'a, 'py>> {
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
        Ok(Side { array, elements, export })
    }

    /// A new array for the output, like `like` but of that shape.
    fn fresh<'py>(self, like: &Bound<'py, PyAny>, shape: &[usize]) -> PyResult<Bound<'py, PyAny>> {
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
        made().map_err(|_| {
            let kind = like.get_type();
            PyTypeError::new_err(format!(
                "{}: needs out= where the array is no numpy array: {kind}",
                self.call
            ))
        })
    }

    fn shape(self, array: &Bound<'_, PyAny>) -> PyResult<Vec<usize>> {
        match array.getattr("shape") {
            Ok(shape) => shape.extract(),
            Err(_) => {
                Err(PyTypeError::new_err(format!("{}: needs out= where the array has no shape", self.call)))
            }
        }
    }

    /// The shape of one block of an array whose first dimension is cut in as many as there are ranks.
    fn cut(self, array: &Bound<'_, PyAny>, size: usize) -> PyResult<Vec<usize>> {
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

fn flat(elements: Elements) -> Blocks<'static> {
    Blocks::Flat { ptr: elements.ptr, count: elements.count }
}

/// Whole, or cut in blocks of these counts.
fn blocks<'a>(side: &Side<'_, '_>, how: How, counts: Option<&'a [usize]>) -> PyResult<Blocks<'a>> {
    let Elements { ptr, count, .. } = side.elements;
    let Some(counts) = counts else { return Ok(Blocks::Flat { ptr, count }) };
    let sum = counts.iter().sum::<usize>();
    if sum == count {
        return Ok(Blocks::Cut { ptr, counts });
    }
    Err(PyValueError::new_err(format!(
        "{}: counts {counts:?} are {sum} elements together, and the array has {count}",
        how.call
    )))
}

const REDUCTIONS: &str = "sum, avg, min, max, prod, band, bor, bxor, or (\"premul_sum\", factor)";

fn reduction(op: Option<&Bound<'_, PyAny>>) -> PyResult<RedOp> {
    let Some(op) = op else { return Ok(RedOp::Sum) };
    let unknown = || PyValueError::new_err(format!("no reduction is called {op:?}: there are {REDUCTIONS}"));
    if let Ok((name, factor)) = op.extract::<(String, f64)>() {
        return if name == "premul_sum" { Ok(RedOp::PremulSum(factor)) } else { Err(unknown()) };
    }
    let name: std::borrow::Cow<'_, str> = op.extract().map_err(|_| unknown())?;
    Ok(match name.as_ref() {
        "sum" => RedOp::Sum,
        "avg" | "mean" => RedOp::Avg,
        "min" => RedOp::Min,
        "max" => RedOp::Max,
        "prod" | "product" => RedOp::Prod,
        "band" => RedOp::Band,
        "bor" => RedOp::Bor,
        "bxor" => RedOp::Bxor,
        _ => return Err(unknown()),
    })
}

impl Arrays {
    #[expect(clippy::too_many_arguments, reason = "both sides with what they hold")]
    /// Makes the call of these two sides; `result` is what a call that is over returns.
    fn make(
        &self,
        py: Python<'_>,
        how: How,
        collective: Collective,
        (redop, root): (RedOp, usize),
        (input, input_blocks): (Option<Side<'_, '_>>, Blocks<'_>),
        (output, output_blocks): (Option<Side<'_, '_>>, Blocks<'_>),
        result: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Py<PyAny>> {
        let sides = [input, output];
        let (dtype, device) = agreed(how, &sides)?;
        if (redop, dtype) == (RedOp::Avg, DType::Bool) {
            return Err(PyValueError::new_err(format!("{}: avg of bool is not defined", how.call)));
        }
        let call = Call { collective, dtype, redop, root, input: input_blocks, output: output_blocks };
        let mut options = Options { timeout: how.timeout.map(seconds), keep: None, on: None };
        if how.asynchronous || device >= 0 {
            let held = Py::new(py, held(sides))?;
            options.keep = Some(Box::new(held));
            if device >= 0 {
                let device =
                    py.detach(|| smddp_core::device::device(device)).map_err(|error| raise(py, error))?;
                options.on = Some(On { device, stream: Stream(how.stream.unwrap_or(0)) });
            }
            let call = Sendable(&call);
            // SAFETY: what is held keeps the arrays and their addresses until the call is over.
            let work = py.detach(|| unsafe { self.comm.start(call.get(), options) });
            let work = work.map_err(|error| raise(py, error))?;
            if how.asynchronous {
                return Ok(Py::new(py, Work(work))?.into_any());
            }
            let over = py.detach(|| match how.stream {
                Some(stream) => work.wait_stream(Stream(stream)),
                None => work.wait(None),
            });
            over.map_err(|error| raise(py, error))?;
            return Ok(done(py, result));
        }
        let aside = |wait: &mut dyn FnMut()| {
            let wait = Wait(wait);
            py.detach(|| wait.over());
        };
        // SAFETY: the caller's frame holds the arrays until this returns, `sides` their addresses; where a signal has it
        // return before the call is over, both are held for ever.
        match unsafe { self.comm.run_aside(&call, options, aside) } {
            Ok(()) => Ok(done(py, result)),
            Err(error) => {
                if error == smddp_core::Error::Interrupted {
                    std::mem::forget(held(sides));
                }
                Err(raise(py, error))
            }
        }
    }
}

/// The core's wait on its way through `detach`, which asks that nothing of one thread's Python goes along.
struct Wait<'a>(&'a mut dyn FnMut());

impl Wait<'_> {
    fn over(self) {
        (self.0)();
    }
}

// SAFETY: it runs on this thread, and has addresses, counts and the group's own.
unsafe impl Send for Wait<'_> {}

fn done(py: Python<'_>, result: Option<&Bound<'_, PyAny>>) -> Py<PyAny> {
    result.map_or_else(|| py.None(), |result| result.clone().unbind())
}

fn held<const N: usize>(sides: [Option<Side<'_, '_>>; N]) -> Held {
    let (arrays, exports) =
        sides.into_iter().flatten().map(|side| (side.array.clone().unbind(), side.export)).unzip();
    Held { exports, arrays }
}

/// The element type and device that all sides have.
fn agreed(how: How, sides: &[Option<Side<'_, '_>>; 2]) -> PyResult<(DType, i32)> {
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

#[pymethods]
impl Arrays {
    #[new]
    fn new(comm: &Comm) -> Self {
        Self { comm: comm.communicator().clone(), sent: Mutex::default() }
    }

    /// What was sent so far: {rank: (messages, bytes)}.
    #[getter]
    fn sent(&self) -> BTreeMap<usize, (u64, u64)> {
        self.sent.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    #[pyo3(signature = (array, op=None, *, out=None, async_op=false, timeout=None, stream=None))]
    #[expect(clippy::too_many_arguments, reason = "the call as Python makes it, documented in _core.pyi")]
    fn all_reduce(
        &self,
        py: Python<'_>,
        array: &Bound<'_, PyAny>,
        op: Option<&Bound<'_, PyAny>>,
        out: Option<&Bound<'_, PyAny>>,
        async_op: bool,
        timeout: Option<f64>,
        stream: Option<u64>,
    ) -> PyResult<Py<PyAny>> {
        let how = How { call: "all_reduce", asynchronous: async_op, timeout, stream };
        let op = reduction(op)?;
        let Some(out) = out else {
            let side = how.place(array)?;
            let place = flat(side.elements);
            return self.make(
                py,
                how,
                Collective::AllReduce,
                (op, 0),
                (Some(side), place),
                (None, place),
                Some(array),
            );
        };
        let (input, output) = (how.input(array)?, how.output(out)?);
        let (from, to) = (flat(input.elements), flat(output.elements));
        self.make(py, how, Collective::AllReduce, (op, 0), (Some(input), from), (Some(output), to), Some(out))
    }

    #[pyo3(signature = (array, op=None, root=0, *, out=None, async_op=false, timeout=None, stream=None))]
    #[expect(clippy::too_many_arguments, reason = "the call as Python makes it, documented in _core.pyi")]
    fn reduce(
        &self,
        py: Python<'_>,
        array: &Bound<'_, PyAny>,
        op: Option<&Bound<'_, PyAny>>,
        root: usize,
        out: Option<&Bound<'_, PyAny>>,
        async_op: bool,
        timeout: Option<f64>,
        stream: Option<u64>,
    ) -> PyResult<Py<PyAny>> {
        let how = How { call: "reduce", asynchronous: async_op, timeout, stream };
        let op = reduction(op)?;
        let collective = Collective::Reduce;
        if self.comm.rank() != root {
            let input = how.input(array)?;
            let from = flat(input.elements);
            return self.make(
                py,
                how,
                collective,
                (op, root),
                (Some(input), from),
                (None, Blocks::None),
                None,
            );
        }
        let Some(out) = out else {
            let side = how.place(array)?;
            let place = flat(side.elements);
            return self.make(
                py,
                how,
                collective,
                (op, root),
                (Some(side), place),
                (None, place),
                Some(array),
            );
        };
        let (input, output) = (how.input(array)?, how.output(out)?);
        let (from, to) = (flat(input.elements), flat(output.elements));
        self.make(py, how, collective, (op, root), (Some(input), from), (Some(output), to), Some(out))
    }

    #[pyo3(signature = (array, root=0, *, async_op=false, timeout=None, stream=None))]
    fn broadcast(
        &self,
        py: Python<'_>,
        array: &Bound<'_, PyAny>,
        root: usize,
        async_op: bool,
        timeout: Option<f64>,
        stream: Option<u64>,
    ) -> PyResult<Py<PyAny>> {
        let how = How { call: "broadcast", asynchronous: async_op, timeout, stream };
        let gives = self.comm.rank() == root;
        let side = if gives { how.input(array)? } else { how.place(array)? };
        let place = flat(side.elements);
        let from = if gives { place } else { Blocks::None };
        self.make(
            py,
            how,
            Collective::Broadcast,
            (RedOp::Sum, root),
            (Some(side), from),
            (None, place),
            Some(array),
        )
    }

    #[pyo3(signature = (array, *, out=None, counts=None, async_op=false, timeout=None, stream=None))]
    #[expect(clippy::too_many_arguments, reason = "the call as Python makes it, documented in _core.pyi")]
    fn all_gather(
        &self,
        py: Python<'_>,
        array: &Bound<'_, PyAny>,
        out: Option<&Bound<'_, PyAny>>,
        counts: Option<Vec<usize>>,
        async_op: bool,
        timeout: Option<f64>,
        stream: Option<u64>,
    ) -> PyResult<Py<PyAny>> {
        let how = How { call: "all_gather", asynchronous: async_op, timeout, stream };
        let input = how.input(array)?;
        let out = self.gathered(how, array, out, counts.as_deref())?;
        let output = how.output(&out)?;
        let (from, to) = (flat(input.elements), blocks(&output, how, counts.as_deref())?);
        let sides = ((Some(input), from), (Some(output), to));
        self.make(py, how, Collective::AllGather, (RedOp::Sum, 0), sides.0, sides.1, Some(&out))
    }

    #[pyo3(signature = (array, root=0, *, out=None, async_op=false, timeout=None, stream=None))]
    #[expect(clippy::too_many_arguments, reason = "the call as Python makes it, documented in _core.pyi")]
    fn gather(
        &self,
        py: Python<'_>,
        array: &Bound<'_, PyAny>,
        root: usize,
        out: Option<&Bound<'_, PyAny>>,
        async_op: bool,
        timeout: Option<f64>,
        stream: Option<u64>,
    ) -> PyResult<Py<PyAny>> {
        let how = How { call: "gather", asynchronous: async_op, timeout, stream };
        let input = how.input(array)?;
        let from = flat(input.elements);
        let what = (RedOp::Sum, root);
        if self.comm.rank() != root {
            return self.make(
                py,
                how,
                Collective::Gather,
                what,
                (Some(input), from),
                (None, Blocks::None),
                None,
            );
        }
        let out = self.gathered(how, array, out, None)?;
        let output = how.output(&out)?;
        let to = flat(output.elements);
        self.make(py, how, Collective::Gather, what, (Some(input), from), (Some(output), to), Some(&out))
    }

    #[pyo3(signature = (array, op=None, *, out=None, counts=None, async_op=false, timeout=None, stream=None))]
    #[expect(clippy::too_many_arguments, reason = "the call as Python makes it, documented in _core.pyi")]
    fn reduce_scatter(
        &self,
        py: Python<'_>,
        array: &Bound<'_, PyAny>,
        op: Option<&Bound<'_, PyAny>>,
        out: Option<&Bound<'_, PyAny>>,
        counts: Option<Vec<usize>>,
        async_op: bool,
        timeout: Option<f64>,
        stream: Option<u64>,
    ) -> PyResult<Py<PyAny>> {
        let how = How { call: "reduce_scatter", asynchronous: async_op, timeout, stream };
        let op = reduction(op)?;
        let input = how.input(array)?;
        let from = blocks(&input, how, counts.as_deref())?;
        let out = match (out, &counts) {
            (Some(out), _) => out.clone(),
            (None, Some(counts)) => {
                let mine = counts.get(self.comm.rank()).copied().unwrap_or(0);
                how.fresh(array, &[mine])?
            }
            (None, None) => how.fresh(array, &how.cut(array, self.comm.size())?)?,
        };
        let output = how.output(&out)?;
        let to = flat(output.elements);
        let sides = ((Some(input), from), (Some(output), to));
        self.make(py, how, Collective::ReduceScatter, (op, 0), sides.0, sides.1, Some(&out))
    }

    #[pyo3(signature = (array, out, root=0, *, async_op=false, timeout=None, stream=None))]
    #[expect(clippy::too_many_arguments, reason = "the call as Python makes it, documented in _core.pyi")]
    fn scatter(
        &self,
        py: Python<'_>,
        array: Option<&Bound<'_, PyAny>>,
        out: &Bound<'_, PyAny>,
        root: usize,
        async_op: bool,
        timeout: Option<f64>,
        stream: Option<u64>,
    ) -> PyResult<Py<PyAny>> {
        let how = How { call: "scatter", asynchronous: async_op, timeout, stream };
        let output = how.output(out)?;
        let to = flat(output.elements);
        let input = match (array, self.comm.rank() == root) {
            (Some(array), true) => Some(how.input(array)?),
            (None, true) => {
                let why = format!("scatter: rank {root} is the root and gives no array to cut");
                return Err(PyTypeError::new_err(why));
            }
            (_, false) => None,
        };
        let from = input.as_ref().map_or(Blocks::None, |input| flat(input.elements));
        self.make(
            py,
            how,
            Collective::Scatter,
            (RedOp::Sum, root),
            (input, from),
            (Some(output), to),
            Some(out),
        )
    }

    #[pyo3(signature = (array, *, out=None, counts=None, async_op=false, timeout=None, stream=None))]
    #[expect(clippy::too_many_arguments, reason = "the call as Python makes it, documented in _core.pyi")]
    fn all_to_all(
        &self,
        py: Python<'_>,
        array: &Bound<'_, PyAny>,
        out: Option<&Bound<'_, PyAny>>,
        counts: Option<(Vec<usize>, Vec<usize>)>,
        async_op: bool,
        timeout: Option<f64>,
        stream: Option<u64>,
    ) -> PyResult<Py<PyAny>> {
        let how = How { call: "all_to_all", asynchronous: async_op, timeout, stream };
        let input = how.input(array)?;
        let (sent, received) = counts
            .as_ref()
            .map_or((None, None), |(sent, received)| (Some(sent.as_slice()), Some(received.as_slice())));
        let out = match (out, received) {
            (Some(out), _) => out.clone(),
            (None, Some(received)) => how.fresh(array, &[received.iter().sum()])?,
            (None, None) => {
                how.cut(array, self.comm.size())?;
                how.fresh(array, &how.shape(array)?)?
            }
        };
        let output = how.output(&out)?;
        let (from, to) = (blocks(&input, how, sent)?, blocks(&output, how, received)?);
        let sides = ((Some(input), from), (Some(output), to));
        self.make(py, how, Collective::AllToAll, (RedOp::Sum, 0), sides.0, sides.1, Some(&out))
    }

    #[pyo3(signature = (*, async_op=false, timeout=None))]
    fn barrier(&self, py: Python<'_>, async_op: bool, timeout: Option<f64>) -> PyResult<Py<PyAny>> {
        let how = How { call: "barrier", asynchronous: async_op, timeout, stream: None };
        let nothing = || (None, Blocks::None);
        self.make(py, how, Collective::Barrier, (RedOp::Sum, 0), nothing(), nothing(), None)
    }

    #[pyo3(signature = (array, dst, tag=0, *, async_op=false, timeout=None))]
    fn send(
        &self,
        py: Python<'_>,
        array: &Bound<'_, PyAny>,
        dst: usize,
        tag: u64,
        async_op: bool,
        timeout: Option<f64>,
    ) -> PyResult<Option<Work>> {
        let how = How { call: "send", asynchronous: async_op, timeout, stream: None };
        let side = on_host(how, how.input(array)?)?;
        let Elements { ptr, count, dtype, .. } = side.elements;
        let address = ptr as usize;
        let options = kept(py, timeout, side)?;
        let start =
            // SAFETY: what is held keeps the array and its address until the call is over.
            || unsafe { self.comm.send(address as *const u8, count, dtype, dst, tag, options) };
        let work = waited(py, async_op, py.detach(start))?;
        if dst != self.comm.rank() {
            let mut sent = self.sent.lock().unwrap_or_else(PoisonError::into_inner);
            let counts = sent.entry(dst).or_default();
            *counts = (counts.0 + 1, counts.1 + (count * dtype.size()) as u64);
        }
        Ok(work)
    }

    #[pyo3(signature = (out, src=None, tag=0, *, async_op=false, timeout=None))]
    fn recv(
        &self,
        py: Python<'_>,
        out: &Bound<'_, PyAny>,
        src: Option<usize>,
        tag: u64,
        async_op: bool,
        timeout: Option<f64>,
    ) -> PyResult<Py<PyAny>> {
        let how = How { call: "recv", asynchronous: async_op, timeout, stream: None };
        let side = on_host(how, how.output(out)?)?;
        let Elements { ptr, count, dtype, .. } = side.elements;
        let address = ptr as usize;
        let options = kept(py, timeout, side)?;
        let start =
            // SAFETY: what is held keeps the array and its address until the call is over.
            || unsafe { self.comm.recv(address as *mut u8, count, dtype, src, tag, options) };
        match waited(py, async_op, py.detach(start))? {
            Some(work) => Ok(Py::new(py, work)?.into_any()),
            None => Ok(out.clone().unbind()),
        }
    }
}

impl Arrays {
    /// Where a gather's blocks go: as given, or a new array of them in rank order.
    fn gathered<'py>(
        &self,
        how: How,
        array: &Bound<'py, PyAny>,
        out: Option<&Bound<'py, PyAny>>,
        counts: Option<&[usize]>,
    ) -> PyResult<Bound<'py, PyAny>> {
        match (out, counts) {
            (Some(out), _) => Ok(out.clone()),
            (None, Some(counts)) => how.fresh(array, &[counts.iter().sum()]),
            (None, None) => {
                let mut shape = vec![self.comm.size()];
                shape.extend(how.shape(array)?);
                how.fresh(array, &shape)
            }
        }
    }
}

/// Messages go from host memory.
fn on_host<'a, 'py>(how: How, side: Side<'a, 'py>) -> PyResult<Side<'a, 'py>> {
    if side.elements.device < 0 {
        return Ok(side);
    }
    Err(PyValueError::new_err(format!(
        "{}: the array is on CUDA device {}; messages go from host memory: copy it there, or use a collective",
        how.call, side.elements.device
    )))
}

fn kept(py: Python<'_>, timeout: Option<f64>, side: Side<'_, '_>) -> PyResult<Options> {
    let held = Py::new(py, held([Some(side)]))?;
    Ok(Options { timeout: timeout.map(seconds), keep: Some(Box::new(held)), on: None })
}

/// The work, or nothing once it is over.
fn waited(
    py: Python<'_>,
    asynchronous: bool,
    work: smddp_core::Result<smddp_core::Work>,
) -> PyResult<Option<Work>> {
    let work = work.map_err(|error| raise(py, error))?;
    if asynchronous {
        return Ok(Some(Work(work)));
    }
    py.detach(|| work.wait(None)).map_err(|error| raise(py, error))?;
    Ok(None)
}
