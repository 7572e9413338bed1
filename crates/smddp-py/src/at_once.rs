//! `AtOnce`: calls on ordinary tensors, in host memory where the caller waits, and on the devices that the group has met. torch
//! tells of its tensors in C (the exchange API of DLPack 1.3), so a small call is not mostly Python. What is not so plain is
//! left to Python's way.

mod met;

use std::ffi::{c_int, c_void};

use pyo3::exceptions::PyValueError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyList, PyType};
use smddp_core::{Blocks, Call, Collective, Communicator, DType, Options, RedOp};

use self::met::{Current, Met, Started};
use crate::buffers::dlpack::{DlTensor, ON_CPU, ON_CUDA};
use crate::comm::{Comm, Sendable, Wait, redop_of};
use crate::errors::raise;
use crate::work::Work;

/// Fills in what a Python object's tensor is, which it goes on owning; not 0: an exception is set.
type Tell = unsafe extern "C" fn(*mut pyo3::ffi::PyObject, *mut DlTensor) -> c_int;

/// DLPack's `DLPackExchangeAPI`, as far as it is used.
#[repr(C)]
struct Exchange {
    major: u32,
    minor: u32,
    older: *const Exchange,
    others: [*const c_void; 3],
    tell: Option<Tell>,
    current: Option<Current>,
}

/// Memory that was given back has an address like its offset; see `block` in `smddp.torch.arguments`.
const LOW: usize = 1 << 40;

/// A tensor's elements, in a row.
#[derive(Clone, Copy)]
struct Row {
    ptr: *mut u8,
    count: usize,
    /// Of its first axis; 0 where it has none.
    length: i64,
    dtype: DType,
    /// The ordinal of its CUDA device; -1 for the host.
    device: i32,
}

impl Row {
    fn blocks(self) -> Blocks<'static> {
        Blocks::Flat { ptr: self.ptr, count: self.count }
    }
}

/// What a call came to, for Python.
#[derive(IntoPyObject)]
enum Answer {
    /// It is over, or the current stream waits for it; false: nothing has moved.
    Over(bool),
    UnderWay(Work),
}

const NO: Answer = Answer::Over(false);

/// One group's.
#[pyclass(frozen)]
pub(crate) struct AtOnce {
    comm: Communicator,
    tell: Tell,
    current: Current,
    /// The group serves host memory.
    host: bool,
    met: Met,
    /// The classes of ordinary tensors, without those derived from them.
    kinds: Vec<Py<PyType>>,
    /// torch's reductions, the most frequent first, and their numbers.
    reductions: Vec<(Py<PyAny>, RedOp)>,
    /// A timeout that is none.
    zero: Py<PyAny>,
}

/// Returns whether the memory of `dtype` equals its value. Excludes complex types (DLPack hides a lazy conjugation) and opaque
/// bytes.
fn ordinary(dtype: DType) -> bool {
    !matches!(dtype, DType::C32 | DType::C64 | DType::C128 | DType::Opaque1)
}

impl AtOnce {
    /// `None`: it is not an ordinary tensor of ours, with elements that lie in order.
    fn row(&self, tensor: &Bound<'_, PyAny>) -> PyResult<Option<Row>> {
        let py = tensor.py();
        let kind = tensor.get_type();
        if !self.kinds.iter().any(|known| kind.is(known)) {
            return Ok(None);
        }
        let mut told = std::mem::MaybeUninit::<DlTensor>::zeroed();
        // SAFETY: torch's function of that type; the GIL is held, the object lives as long as the caller's reference, and the
        // struct is as large as DLPack 1 says.
        if unsafe { (self.tell)(tensor.as_ptr(), told.as_mut_ptr()) } != 0 {
            // Without memory, as transformed by functorch: Python's way says what there is to say.
            drop(PyErr::take(py));
            return Ok(None);
        }
        // SAFETY: zeroes are one, too.
        let told = unsafe { told.assume_init() };
        let device = match told.device {
            ON_CPU if self.host => -1,
            ON_CUDA => told.ordinal,
            _ => return Ok(None),
        };
        let Some(dtype) = told.dtype().filter(|&dtype| ordinary(dtype)) else { return Ok(None) };
        // SAFETY: torch filled it in; the tensor lives as above, and nobody changes its shape while the GIL is held.
        let (row, first) = unsafe { (told.row(), told.shape().first()) };
        let Some((ptr, count)) = row.filter(|&(_, count)| count > 0) else { return Ok(None) };
        if (ptr as usize) < LOW {
            let offset = tensor.call_method0(intern!(py, "storage_offset"))?.extract::<usize>()?;
            if ptr as usize == offset * dtype.size() {
                return Ok(None);
            }
        }
        // Only numbers with a sign in front may be negated in the reading, which is not told either.
        let negated = matches!(dtype, DType::F16 | DType::BF16 | DType::F32 | DType::F64)
            && tensor.call_method0(intern!(py, "is_neg"))?.is_truthy()?;
        Ok((!negated).then_some(Row { ptr, count, length: first.copied().unwrap_or(0), dtype, device }))
    }

    /// Whether a handle is wanted, as where options do not say; `None`: that is not for here, or the call has a deadline of
    /// its own.
    fn handle(&self, opts: &Bound<'_, PyAny>) -> PyResult<Option<bool>> {
        let py = opts.py();
        let asked = opts.getattr_opt(intern!(py, "asyncOp"))?;
        let handle = asked.map_or(Ok(true), |asked| asked.is_truthy())?;
        // Host memory is served where the caller waits only.
        if handle && !self.met.any() {
            return Ok(None);
        }
        let own = opts.getattr(intern!(py, "timeout"))?.gt(&self.zero)?;
        Ok((!own).then_some(handle))
    }

    fn reduction(&self, opts: &Bound<'_, PyAny>, dtype: DType) -> PyResult<Option<RedOp>> {
        let wanted = opts.getattr(intern!(opts.py(), "reduceOp"))?;
        for (known, redop) in &self.reductions {
            if wanted.eq(known)? {
                return Ok((dtype != DType::Bool || *redop != RedOp::Avg).then_some(*redop));
            }
        }
        Ok(None)
    }

    fn make(
        &self,
        (collective, redop, root): (Collective, RedOp, usize),
        (input, output): (Blocks<'static>, Blocks<'static>),
        row: Row,
        handle: bool,
        tensors: [&Bound<'_, PyAny>; 2],
    ) -> PyResult<Answer> {
        let py = tensors[0].py();
        let call = Call { collective, dtype: row.dtype, redop, root, input, output };
        if row.device >= 0 {
            let started = self.met.start(self.current, row.device, &self.comm, &call, handle, tensors)?;
            return Ok(match started {
                Started::No => NO,
                Started::Waits => Answer::Over(true),
                Started::UnderWay(work) => Answer::UnderWay(work),
            });
        }
        if handle {
            return Ok(NO);
        }
        let call = Sendable(&call);
        let kept = tensors.map(|tensor| tensor.clone().unbind());
        let options = Options { keep: Some(Box::new(kept)), ..Options::default() };
        // SAFETY: `keep` holds the tensors until the call is over; Python owns them, the core only borrows.
        let done = unsafe { self.comm.run_aside(call.get(), options, Wait::detached(py)) };
        done.map(|()| Answer::Over(true)).map_err(|error| raise(py, error))
    }

    /// The only tensor of a list, and whether its caller wants a handle.
    fn one<'py>(
        &self,
        tensors: &Bound<'py, PyAny>,
        opts: &Bound<'_, PyAny>,
    ) -> PyResult<Option<(Bound<'py, PyAny>, Row, bool)>> {
        let Ok(list) = tensors.cast::<PyList>() else { return Ok(None) };
        if list.len() != 1 {
            return Ok(None);
        }
        let Some(handle) = self.handle(opts)? else { return Ok(None) };
        let tensor = list.get_item(0)?;
        Ok(self.row(&tensor)?.map(|row| (tensor, row, handle)))
    }

    /// Two tensors of one dtype on one device, and whether their caller wants a handle.
    fn two(
        &self,
        output: &Bound<'_, PyAny>,
        input: &Bound<'_, PyAny>,
        opts: &Bound<'_, PyAny>,
    ) -> PyResult<Option<(Row, Row, bool)>> {
        let Some(handle) = self.handle(opts)? else { return Ok(None) };
        let Some(output) = self.row(output)? else { return Ok(None) };
        let input = self.row(input)?;
        let alike = |input: &Row| (input.dtype, input.device) == (output.dtype, output.device);
        Ok(input.filter(alike).map(|input| (output, input, handle)))
    }

    /// Whether the longer one has as many elements as `block` for each rank.
    fn divides(&self, block: Row, longer: Row) -> bool {
        block.count.checked_mul(self.comm.size()) == Some(longer.count)
    }
}

#[pymethods]
impl AtOnce {
    #[new]
    #[pyo3(signature = (comm, exchange, kinds, reductions, zero, host=true))]
    fn new(
        comm: &Comm,
        exchange: &Bound<'_, PyCapsule>,
        kinds: Vec<Py<PyType>>,
        reductions: Vec<(Py<PyAny>, u8)>,
        zero: Py<PyAny>,
        host: bool,
    ) -> PyResult<Self> {
        let at = exchange.pointer_checked(Some(c"dlpack_exchange_api"))?;
        // SAFETY: what a capsule of that name points to, as DLPack has it: a static of torch's that begins with its version.
        let known = unsafe { at.cast::<Exchange>().as_ref() };
        let fits = known.major == 1 && known.minor >= 3;
        let (tell, current) = known.tell.zip(known.current).filter(|_| fits).ok_or_else(|| {
            let (major, minor) = (known.major, known.minor);
            PyValueError::new_err(format!(
                "torch tells of its tensors by DLPack {major}.{minor}, not as 1.3 does"
            ))
        })?;
        let reductions = reductions.into_iter().map(|(torchs, number)| Ok((torchs, redop_of(number, 1.0)?)));
        let reductions = reductions.collect::<PyResult<_>>()?;
        let (comm, met) = (comm.communicator().clone(), Met::default());
        Ok(Self { comm, tell, current, host, met, kinds, reductions, zero })
    }

    /// The group has met a device; `stream` is torch's object for its stream there.
    fn meet(&self, py: Python<'_>, device: i32, stream: Py<PyAny>) -> PyResult<()> {
        self.met.add(py, device, stream)
    }

    fn all_reduce(&self, tensors: &Bound<'_, PyAny>, opts: &Bound<'_, PyAny>) -> PyResult<Answer> {
        let Some((tensor, row, handle)) = self.one(tensors, opts)? else { return Ok(NO) };
        let Some(redop) = self.reduction(opts, row.dtype)? else { return Ok(NO) };
        let place = row.blocks();
        self.make((Collective::AllReduce, redop, 0), (place, place), row, handle, [&tensor, &tensor])
    }

    fn broadcast(&self, tensors: &Bound<'_, PyAny>, opts: &Bound<'_, PyAny>) -> PyResult<Answer> {
        let Some((tensor, row, handle)) = self.one(tensors, opts)? else { return Ok(NO) };
        let root = opts.getattr(intern!(opts.py(), "rootRank"))?.extract::<usize>().ok();
        let Some(root) = root.filter(|&root| root < self.comm.size()) else { return Ok(NO) };
        let place = row.blocks();
        let input = if root == self.comm.rank() { place } else { Blocks::None };
        self.make((Collective::Broadcast, RedOp::Sum, root), (input, place), row, handle, [&tensor, &tensor])
    }

    fn all_gather(
        &self,
        output: &Bound<'_, PyAny>,
        input: &Bound<'_, PyAny>,
        opts: &Bound<'_, PyAny>,
    ) -> PyResult<Answer> {
        let Some((to, from, handle)) = self.two(output, input, opts)? else { return Ok(NO) };
        if !self.divides(from, to) {
            return Ok(NO);
        }
        let what = (Collective::AllGather, RedOp::Sum, 0);
        self.make(what, (from.blocks(), to.blocks()), to, handle, [output, input])
    }

    fn reduce_scatter(
        &self,
        output: &Bound<'_, PyAny>,
        input: &Bound<'_, PyAny>,
        opts: &Bound<'_, PyAny>,
    ) -> PyResult<Answer> {
        let Some((to, from, handle)) = self.two(output, input, opts)? else { return Ok(NO) };
        let Some(redop) = self.reduction(opts, to.dtype)? else { return Ok(NO) };
        if !self.divides(to, from) {
            return Ok(NO);
        }
        let what = (Collective::ReduceScatter, redop, 0);
        self.make(what, (from.blocks(), to.blocks()), to, handle, [output, input])
    }

    /// Without split sizes only.
    fn all_to_all(
        &self,
        output: &Bound<'_, PyAny>,
        input: &Bound<'_, PyAny>,
        output_splits: &Bound<'_, PyAny>,
        input_splits: &Bound<'_, PyAny>,
        opts: &Bound<'_, PyAny>,
    ) -> PyResult<Answer> {
        if output_splits.is_truthy()? || input_splits.is_truthy()? {
            return Ok(NO);
        }
        let Some((to, from, handle)) = self.two(output, input, opts)? else { return Ok(NO) };
        let size = self.comm.size() as i64;
        let cut = |row: Row| row.length > 0 && row.length % size == 0;
        if to.count != from.count || !cut(to) || !cut(from) {
            return Ok(NO);
        }
        let what = (Collective::AllToAll, RedOp::Sum, 0);
        self.make(what, (from.blocks(), to.blocks()), to, handle, [output, input])
    }
}
