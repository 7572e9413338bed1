//! `Arrays`: calls of a group on arrays, without torch.

use std::collections::BTreeMap;
use std::sync::Mutex;

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use smddp_core::duration as seconds;
use smddp_core::{Blocks, Call, Collective, Communicator, DType, DeviceStream, Options, RedOp, Stream, lock};

use crate::arguments::{
    counts_of, dst_of, pair_of_counts_of, root_of, src_of, stream_of, tag_of, timeout_of,
};
use crate::buffer_pair::{BufferSide, CallOptions, common_type, hold};
use crate::buffers::Elements;
use crate::comm::{Comm, Sendable, Wait};
use crate::errors::raise;
use crate::work::Work;

/// Calls of one group on arrays. `smddp.Communicator` is a subclass.
#[pyclass(subclass, frozen)]
pub(crate) struct Arrays {
    comm: Communicator,
    /// Sent messages and their bytes, by receiver.
    sent: Mutex<BTreeMap<usize, (u64, u64)>>,
}

const REDUCTIONS: &str = "sum, avg, min, max, prod, band, bor, bxor, or (\"premul_sum\", factor)";

fn reduction(op: Option<&Bound<'_, PyAny>>) -> PyResult<RedOp> {
    let Some(op) = op else { return Ok(RedOp::Sum) };
    let unknown = || PyValueError::new_err(format!("invalid reduction {op:?}: expected {REDUCTIONS}"));
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
        "premul_sum" => {
            return Err(PyValueError::new_err("premul_sum needs a factor: (\"premul_sum\", 0.5)"));
        }
        _ => return Err(unknown()),
    })
}

type Sides<'a, 'py> = [Option<BufferSide<'a, 'py>>; 2];

/// Returns input and output of a call whose result has the array's size, and the array for the result.
fn in_place_or<'a, 'py>(
    how: CallOptions,
    array: &'a Bound<'py, PyAny>,
    out: Option<&'a Bound<'py, PyAny>>,
) -> PyResult<(Sides<'a, 'py>, &'a Bound<'py, PyAny>)> {
    let Some(out) = out else {
        let side = how.in_out(array)?;
        return Ok(([Some(side.in_place()), Some(side)], array));
    };
    Ok(([Some(how.input(array)?), Some(how.output(out)?)], out))
}

impl Arrays {
    /// Runs or starts the call. `sides` are input and output; `result` is the return value of a completed call.
    fn run(
        &self,
        py: Python<'_>,
        how: CallOptions,
        collective: Collective,
        (redop, root): (RedOp, usize),
        sides: [Option<BufferSide<'_, '_>>; 2],
        result: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Py<PyAny>> {
        let (dtype, device) = common_type(how, &sides)?;
        if (redop, dtype) == (RedOp::Avg, DType::Bool) {
            return Err(PyValueError::new_err(format!("{}: avg of bool is not defined", how.call)));
        }
        let [input, output] =
            sides.each_ref().map(|side| side.as_ref().map_or(Blocks::None, |side| side.blocks));
        let call = Call { collective, dtype, redop, root, input, output };
        let mut options = Options { timeout: how.timeout.map(seconds), keep: None, on: None };
        if how.asynchronous || device >= 0 {
            let held = Py::new(py, hold(sides))?;
            options.keep = Some(Box::new(held));
            if device >= 0 {
                let device =
                    py.detach(|| smddp_core::device::device(device)).map_err(|error| raise(py, error))?;
                options.on = Some(DeviceStream { device, stream: Stream(how.stream.unwrap_or(0)) });
            }
            let call = Sendable(&call);
            // SAFETY: `keep` keeps the arrays and their addresses valid until the call is done.
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
        // SAFETY: the caller's frame keeps the arrays, and `sides` keeps their addresses, until this returns.
        let over = unsafe { self.comm.run_detached(&call, options, Wait::detached(py)) };
        over.map_err(|error| raise(py, error))?;
        Ok(done(py, result))
    }
}

#[pymethods]
impl Arrays {
    #[new]
    fn new(comm: &Comm) -> Self {
        Self { comm: comm.communicator().clone(), sent: Mutex::default() }
    }

    /// Sent messages and their bytes: {receiver: (messages, bytes)}.
    #[getter]
    fn sent(&self) -> BTreeMap<usize, (u64, u64)> {
        lock(&self.sent).clone()
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
        #[pyo3(from_py_with = timeout_of)] timeout: Option<f64>,
        #[pyo3(from_py_with = stream_of)] stream: Option<u64>,
    ) -> PyResult<Py<PyAny>> {
        let how = CallOptions::new("all_reduce", async_op, timeout, stream)?;
        let op = reduction(op)?;
        let (sides, result) = in_place_or(how, array, out)?;
        self.run(py, how, Collective::AllReduce, (op, 0), sides, Some(result))
    }

    #[pyo3(signature = (array, op=None, root=0, *, out=None, async_op=false, timeout=None, stream=None))]
    #[expect(clippy::too_many_arguments, reason = "the call as Python makes it, documented in _core.pyi")]
    fn reduce(
        &self,
        py: Python<'_>,
        array: &Bound<'_, PyAny>,
        op: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = root_of)] root: i64,
        out: Option<&Bound<'_, PyAny>>,
        async_op: bool,
        #[pyo3(from_py_with = timeout_of)] timeout: Option<f64>,
        #[pyo3(from_py_with = stream_of)] stream: Option<u64>,
    ) -> PyResult<Py<PyAny>> {
        let how = CallOptions::new("reduce", async_op, timeout, stream)?;
        let root = how.number("root", root)?;
        let what = (reduction(op)?, root);
        if self.comm.rank() != root {
            return self.run(py, how, Collective::Reduce, what, [Some(how.input(array)?), None], None);
        }
        let (sides, result) = in_place_or(how, array, out)?;
        self.run(py, how, Collective::Reduce, what, sides, Some(result))
    }

    #[pyo3(signature = (array, root=0, *, async_op=false, timeout=None, stream=None))]
    fn broadcast(
        &self,
        py: Python<'_>,
        array: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = root_of)] root: i64,
        async_op: bool,
        #[pyo3(from_py_with = timeout_of)] timeout: Option<f64>,
        #[pyo3(from_py_with = stream_of)] stream: Option<u64>,
    ) -> PyResult<Py<PyAny>> {
        let how = CallOptions::new("broadcast", async_op, timeout, stream)?;
        let root = how.number("root", root)?;
        let sides = if self.comm.rank() == root {
            // The root's array is input and output, and only read.
            let side = how.input(array)?;
            [Some(side.in_place()), Some(side)]
        } else {
            [None, Some(how.in_out(array)?)]
        };
        self.run(py, how, Collective::Broadcast, (RedOp::Sum, root), sides, Some(array))
    }

    #[pyo3(signature = (array, *, out=None, counts=None, async_op=false, timeout=None, stream=None))]
    #[expect(clippy::too_many_arguments, reason = "the call as Python makes it, documented in _core.pyi")]
    fn all_gather(
        &self,
        py: Python<'_>,
        array: &Bound<'_, PyAny>,
        out: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = counts_of)] counts: Option<Vec<i64>>,
        async_op: bool,
        #[pyo3(from_py_with = timeout_of)] timeout: Option<f64>,
        #[pyo3(from_py_with = stream_of)] stream: Option<u64>,
    ) -> PyResult<Py<PyAny>> {
        let how = CallOptions::new("all_gather", async_op, timeout, stream)?;
        let counts = how.counts(counts)?;
        let input = how.input(array)?;
        let out = self.gather_output(how, array, out, counts.as_deref())?;
        let output = how.output(&out)?.cut(how, counts.as_deref())?;
        let sides = [Some(input), Some(output)];
        self.run(py, how, Collective::AllGather, (RedOp::Sum, 0), sides, Some(&out))
    }

    #[pyo3(signature = (array, root=0, *, out=None, async_op=false, timeout=None, stream=None))]
    #[expect(clippy::too_many_arguments, reason = "the call as Python makes it, documented in _core.pyi")]
    fn gather(
        &self,
        py: Python<'_>,
        array: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = root_of)] root: i64,
        out: Option<&Bound<'_, PyAny>>,
        async_op: bool,
        #[pyo3(from_py_with = timeout_of)] timeout: Option<f64>,
        #[pyo3(from_py_with = stream_of)] stream: Option<u64>,
    ) -> PyResult<Py<PyAny>> {
        let how = CallOptions::new("gather", async_op, timeout, stream)?;
        let root = how.number("root", root)?;
        let input = Some(how.input(array)?);
        let what = (RedOp::Sum, root);
        if self.comm.rank() != root {
            return self.run(py, how, Collective::Gather, what, [input, None], None);
        }
        let out = self.gather_output(how, array, out, None)?;
        self.run(py, how, Collective::Gather, what, [input, Some(how.output(&out)?)], Some(&out))
    }

    #[pyo3(signature = (array, op=None, *, out=None, counts=None, async_op=false, timeout=None, stream=None))]
    #[expect(clippy::too_many_arguments, reason = "the call as Python makes it, documented in _core.pyi")]
    fn reduce_scatter(
        &self,
        py: Python<'_>,
        array: &Bound<'_, PyAny>,
        op: Option<&Bound<'_, PyAny>>,
        out: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = counts_of)] counts: Option<Vec<i64>>,
        async_op: bool,
        #[pyo3(from_py_with = timeout_of)] timeout: Option<f64>,
        #[pyo3(from_py_with = stream_of)] stream: Option<u64>,
    ) -> PyResult<Py<PyAny>> {
        let how = CallOptions::new("reduce_scatter", async_op, timeout, stream)?;
        let counts = how.counts(counts)?;
        let op = reduction(op)?;
        let input = how.input(array)?.cut(how, counts.as_deref())?;
        let out = match (out, &counts) {
            (Some(out), _) => out.clone(),
            (None, Some(counts)) => {
                let mine = counts.get(self.comm.rank()).copied().unwrap_or(0);
                how.fresh(array, &[mine])?
            }
            (None, None) => how.fresh(array, &how.cut(array, self.comm.size())?)?,
        };
        let sides = [Some(input), Some(how.output(&out)?)];
        self.run(py, how, Collective::ReduceScatter, (op, 0), sides, Some(&out))
    }

    #[pyo3(signature = (array, out, root=0, *, async_op=false, timeout=None, stream=None))]
    #[expect(clippy::too_many_arguments, reason = "the call as Python makes it, documented in _core.pyi")]
    fn scatter(
        &self,
        py: Python<'_>,
        array: Option<&Bound<'_, PyAny>>,
        out: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = root_of)] root: i64,
        async_op: bool,
        #[pyo3(from_py_with = timeout_of)] timeout: Option<f64>,
        #[pyo3(from_py_with = stream_of)] stream: Option<u64>,
    ) -> PyResult<Py<PyAny>> {
        let how = CallOptions::new("scatter", async_op, timeout, stream)?;
        let root = how.number("root", root)?;
        let input = match (array, self.comm.rank() == root) {
            (Some(array), true) => Some(how.input(array)?),
            (None, true) => {
                let reason = format!("scatter: rank {root} is the root and needs an array");
                return Err(PyTypeError::new_err(reason));
            }
            (_, false) => None,
        };
        let sides = [input, Some(how.output(out)?)];
        self.run(py, how, Collective::Scatter, (RedOp::Sum, root), sides, Some(out))
    }

    #[pyo3(signature = (array, *, out=None, counts=None, async_op=false, timeout=None, stream=None))]
    #[expect(clippy::too_many_arguments, reason = "the call as Python makes it, documented in _core.pyi")]
    fn all_to_all(
        &self,
        py: Python<'_>,
        array: &Bound<'_, PyAny>,
        out: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = pair_of_counts_of)] counts: Option<(Vec<i64>, Vec<i64>)>,
        async_op: bool,
        #[pyo3(from_py_with = timeout_of)] timeout: Option<f64>,
        #[pyo3(from_py_with = stream_of)] stream: Option<u64>,
    ) -> PyResult<Py<PyAny>> {
        let how = CallOptions::new("all_to_all", async_op, timeout, stream)?;
        let (sent, received) = counts.unzip();
        let (sent, received) = (how.counts(sent)?, how.counts(received)?);
        let input = how.input(array)?.cut(how, sent.as_deref())?;
        let out = match (out, &received) {
            (Some(out), _) => out.clone(),
            (None, Some(received)) => how.fresh(array, &[received.iter().sum()])?,
            (None, None) => {
                how.cut(array, self.comm.size())?;
                how.fresh(array, &how.shape(array)?)?
            }
        };
        let sides = [Some(input), Some(how.output(&out)?.cut(how, received.as_deref())?)];
        self.run(py, how, Collective::AllToAll, (RedOp::Sum, 0), sides, Some(&out))
    }

    #[pyo3(signature = (*, async_op=false, timeout=None))]
    fn barrier(
        &self,
        py: Python<'_>,
        async_op: bool,
        #[pyo3(from_py_with = timeout_of)] timeout: Option<f64>,
    ) -> PyResult<Py<PyAny>> {
        let how = CallOptions::new("barrier", async_op, timeout, None)?;
        self.run(py, how, Collective::Barrier, (RedOp::Sum, 0), [None, None], None)
    }

    #[pyo3(signature = (array, dst, tag=0, *, async_op=false, timeout=None))]
    fn send(
        &self,
        py: Python<'_>,
        array: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = dst_of)] dst: i64,
        #[pyo3(from_py_with = tag_of)] tag: i64,
        async_op: bool,
        #[pyo3(from_py_with = timeout_of)] timeout: Option<f64>,
    ) -> PyResult<Option<Work>> {
        let how = CallOptions::new("send", async_op, timeout, None)?;
        let (dst, tag) = (how.number("dst", dst)?, how.number("tag", tag)? as u64);
        let side = how.input(array)?.on_host(how)?;
        let Elements { ptr, count, dtype, .. } = side.elements;
        let address = ptr as usize;
        let options = options_with(py, timeout, side)?;
        let start =
            // SAFETY: `keep` keeps the array and its address valid until the call is done.
            || unsafe { self.comm.send(address as *const u8, count, dtype, dst, tag, options) };
        let work = work_or_wait(py, async_op, py.detach(start))?;
        if dst != self.comm.rank() {
            let mut sent = lock(&self.sent);
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
        #[pyo3(from_py_with = src_of)] src: Option<i64>,
        #[pyo3(from_py_with = tag_of)] tag: i64,
        async_op: bool,
        #[pyo3(from_py_with = timeout_of)] timeout: Option<f64>,
    ) -> PyResult<Py<PyAny>> {
        let how = CallOptions::new("recv", async_op, timeout, None)?;
        let src = src.map(|src| how.number("src", src)).transpose()?;
        let tag = how.number("tag", tag)? as u64;
        let side = how.output(out)?.on_host(how)?;
        let Elements { ptr, count, dtype, .. } = side.elements;
        let address = ptr as usize;
        let options = options_with(py, timeout, side)?;
        let start =
            // SAFETY: `keep` keeps the array and its address valid until the call is done.
            || unsafe { self.comm.recv(address as *mut u8, count, dtype, src, tag, options) };
        match work_or_wait(py, async_op, py.detach(start))? {
            Some(work) => Ok(Py::new(py, work)?.into_any()),
            None => Ok(out.clone().unbind()),
        }
    }
}

impl Arrays {
    /// Returns the output of a gather: `out`, or a new array of the blocks in rank order.
    fn gather_output<'py>(
        &self,
        how: CallOptions,
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

fn done(py: Python<'_>, result: Option<&Bound<'_, PyAny>>) -> Py<PyAny> {
    result.map_or_else(|| py.None(), |result| result.clone().unbind())
}

fn options_with(py: Python<'_>, timeout: Option<f64>, side: BufferSide<'_, '_>) -> PyResult<Options> {
    let held = Py::new(py, hold([Some(side)]))?;
    Ok(Options { timeout: timeout.map(seconds), keep: Some(Box::new(held)), on: None })
}

/// Returns the handle of an asynchronous call, or waits for the call and returns `None`.
fn work_or_wait(
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
