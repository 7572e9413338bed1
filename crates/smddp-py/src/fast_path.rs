//! `FastPath`: calls on ordinary tensors, synchronous in host memory or on a cached device. It reads the metadata of torch's
//! tensors in C (the exchange API of DLPack 1.3), so that Python does not dominate the time of a small call. Unsupported calls
//! return to the Python implementation.

mod device_cache;

use std::ffi::{c_int, c_void};

use pyo3::exceptions::PyValueError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyList, PyType};
use smddp_core::{Blocks, Call, Collective, Communicator, DType, Options, RedOp};

use self::device_cache::{CurrentStream, DeviceCache, StartedCall};
use crate::buffers::dlpack::{DlTensor, ON_CPU, ON_CUDA};
use crate::comm::{Comm, Sendable, Wait, redop_of};
use crate::errors::raise;
use crate::work::Work;

/// Fills in the metadata of a tensor, which the Python object still owns. Returns nonzero with an exception set on failure.
type ReadTensor = unsafe extern "C" fn(*mut pyo3::ffi::PyObject, *mut DlTensor) -> c_int;

/// The used fields of DLPack's `DLPackExchangeAPI`.
#[repr(C)]
struct ExchangeApi {
    major: u32,
    minor: u32,
    older: *const ExchangeApi,
    others: [*const c_void; 3],
    read_tensor: Option<ReadTensor>,
    current: Option<CurrentStream>,
}

/// A tensor without memory has its storage offset as address; see `block` in `smddp.torch.arguments`.
const MAX_FREED_ADDRESS: usize = 1 << 40;

/// The contiguous elements of a tensor.
#[derive(Clone, Copy)]
struct FlatTensor {
    ptr: *mut u8,
    count: usize,
    /// Length of the first dimension; 0 for a scalar.
    length: i64,
    dtype: DType,
    /// The ordinal of its CUDA device; -1 for the host.
    device: i32,
}

impl FlatTensor {
    fn blocks(self) -> Blocks<'static> {
        Blocks::Flat { ptr: self.ptr, count: self.count }
    }
}

/// The result of a call, for Python.
#[derive(IntoPyObject)]
enum CallResult {
    /// True: the call is done, or the current stream waits for it. False: no data was sent.
    Done(bool),
    Pending(Work),
}

const UNSUPPORTED: CallResult = CallResult::Done(false);

/// The fast path of one group.
#[pyclass(frozen)]
pub(crate) struct FastPath {
    comm: Communicator,
    read_tensor: ReadTensor,
    current: CurrentStream,
    /// The group serves host memory.
    host: bool,
    devices: DeviceCache,
    /// The classes of ordinary tensors. Derived classes are not supported.
    kinds: Vec<Py<PyType>>,
    /// torch's reductions and the core's, in the order of frequency.
    reductions: Vec<(Py<PyAny>, RedOp)>,
    /// The timeout that selects the group's timeout.
    zero: Py<PyAny>,
}

/// Returns true if the memory of `dtype` equals its value. Excludes complex types (DLPack hides a lazy conjugation) and opaque
/// bytes.
fn ordinary(dtype: DType) -> bool {
    !matches!(dtype, DType::C32 | DType::C64 | DType::C128 | DType::Opaque1)
}

impl FastPath {
    /// Returns the elements of an ordinary contiguous tensor, or `None` for other objects.
    fn flat_tensor(&self, tensor: &Bound<'_, PyAny>) -> PyResult<Option<FlatTensor>> {
        let py = tensor.py();
        let kind = tensor.get_type();
        if !self.kinds.iter().any(|known| kind.is(known)) {
            return Ok(None);
        }
        let mut read = std::mem::MaybeUninit::<DlTensor>::zeroed();
        // SAFETY: torch's function of that type. The GIL is held, the object lives as long as the caller's reference, and the
        // struct has the size that DLPack 1 defines.
        if unsafe { (self.read_tensor)(tensor.as_ptr(), read.as_mut_ptr()) } != 0 {
            // A tensor without memory, for example of functorch: the Python implementation reports the error.
            drop(PyErr::take(py));
            return Ok(None);
        }
        // SAFETY: zeros are a valid `DlTensor`.
        let read = unsafe { read.assume_init() };
        let device = match read.device {
            ON_CPU if self.host => -1,
            ON_CUDA => read.ordinal,
            _ => return Ok(None),
        };
        let Some(dtype) = read.dtype().filter(|&dtype| ordinary(dtype)) else { return Ok(None) };
        // SAFETY: torch filled it in. The tensor lives as above, and its shape is constant while the GIL is held.
        let (elements, first) = unsafe { (read.contiguous_elements(), read.shape().first()) };
        let Some((ptr, count)) = elements.filter(|&(_, count)| count > 0) else { return Ok(None) };
        if (ptr as usize) < MAX_FREED_ADDRESS {
            let offset = tensor.call_method0(intern!(py, "storage_offset"))?.extract::<usize>()?;
            if ptr as usize == offset * dtype.size() {
                return Ok(None);
            }
        }
        // Real signed floating-point tensors can be lazily negated, which DLPack does not report.
        let negated = matches!(dtype, DType::F16 | DType::BF16 | DType::F32 | DType::F64)
            && tensor.call_method0(intern!(py, "is_neg"))?.is_truthy()?;
        Ok((!negated).then_some(FlatTensor {
            ptr,
            count,
            length: first.copied().unwrap_or(0),
            dtype,
            device,
        }))
    }

    /// Returns true if the caller wants a handle (the default), or `None` for an unsupported call: an asynchronous call in host
    /// memory, or a call with its own timeout.
    fn handle(&self, opts: &Bound<'_, PyAny>) -> PyResult<Option<bool>> {
        let py = opts.py();
        let requested = opts.getattr_opt(intern!(py, "asyncOp"))?;
        let handle = requested.map_or(Ok(true), |requested| requested.is_truthy())?;
        // Host memory is supported for synchronous calls only.
        if handle && !self.devices.any() {
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

    fn run(
        &self,
        (collective, redop, root): (Collective, RedOp, usize),
        (input, output): (Blocks<'static>, Blocks<'static>),
        flat: FlatTensor,
        handle: bool,
        tensors: [&Bound<'_, PyAny>; 2],
    ) -> PyResult<CallResult> {
        let py = tensors[0].py();
        let call = Call { collective, dtype: flat.dtype, redop, root, input, output };
        if flat.device >= 0 {
            let started =
                self.devices.start(self.current, flat.device, &self.comm, &call, handle, tensors)?;
            return Ok(match started {
                StartedCall::Unsupported => UNSUPPORTED,
                StartedCall::StreamWaits => CallResult::Done(true),
                StartedCall::Pending(work) => CallResult::Pending(work),
            });
        }
        if handle {
            return Ok(UNSUPPORTED);
        }
        let call = Sendable(&call);
        let kept = tensors.map(|tensor| tensor.clone().unbind());
        let options = Options { keep: Some(Box::new(kept)), ..Options::default() };
        // SAFETY: `keep` keeps the tensors alive until the call is done; Python owns them, the core borrows them.
        let done = unsafe { self.comm.run_detached(call.get(), options, Wait::detached(py)) };
        done.map(|()| CallResult::Done(true)).map_err(|error| raise(py, error))
    }

    /// Returns the only tensor of a list, and whether the caller wants a handle.
    fn one<'py>(
        &self,
        tensors: &Bound<'py, PyAny>,
        opts: &Bound<'_, PyAny>,
    ) -> PyResult<Option<(Bound<'py, PyAny>, FlatTensor, bool)>> {
        let Ok(list) = tensors.cast::<PyList>() else { return Ok(None) };
        if list.len() != 1 {
            return Ok(None);
        }
        let Some(handle) = self.handle(opts)? else { return Ok(None) };
        let tensor = list.get_item(0)?;
        Ok(self.flat_tensor(&tensor)?.map(|flat| (tensor, flat, handle)))
    }

    /// Returns two tensors of one dtype on one device, and whether the caller wants a handle.
    fn two(
        &self,
        output: &Bound<'_, PyAny>,
        input: &Bound<'_, PyAny>,
        opts: &Bound<'_, PyAny>,
    ) -> PyResult<Option<(FlatTensor, FlatTensor, bool)>> {
        let Some(handle) = self.handle(opts)? else { return Ok(None) };
        let Some(output) = self.flat_tensor(output)? else { return Ok(None) };
        let input = self.flat_tensor(input)?;
        let alike = |input: &FlatTensor| (input.dtype, input.device) == (output.dtype, output.device);
        Ok(input.filter(alike).map(|input| (output, input, handle)))
    }

    /// Returns true if `longer` has the elements of `block` for each rank.
    fn divides(&self, block: FlatTensor, longer: FlatTensor) -> bool {
        block.count.checked_mul(self.comm.size()) == Some(longer.count)
    }
}

#[pymethods]
impl FastPath {
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
        // SAFETY: by DLPack a capsule of that name points to a static of torch that begins with its version.
        let known = unsafe { at.cast::<ExchangeApi>().as_ref() };
        let fits = known.major == 1 && known.minor >= 3;
        let (read_tensor, current) =
            known.read_tensor.zip(known.current).filter(|_| fits).ok_or_else(|| {
                let (major, minor) = (known.major, known.minor);
                PyValueError::new_err(format!(
                    "torch has the exchange API of DLPack {major}.{minor}: expected 1.3 or a later 1.x"
                ))
            })?;
        let reductions =
            reductions.into_iter().map(|(reduction, number)| Ok((reduction, redop_of(number, 1.0)?)));
        let reductions = reductions.collect::<PyResult<_>>()?;
        let (comm, devices) = (comm.communicator().clone(), DeviceCache::default());
        Ok(Self { comm, read_tensor, current, host, devices, kinds, reductions, zero })
    }

    /// Enables calls on a device. `stream` is torch's object for the group's stream on it.
    fn add_device(&self, py: Python<'_>, device: i32, stream: Py<PyAny>) -> PyResult<()> {
        self.devices.add(py, device, stream)
    }

    fn all_reduce(&self, tensors: &Bound<'_, PyAny>, opts: &Bound<'_, PyAny>) -> PyResult<CallResult> {
        let Some((tensor, flat, handle)) = self.one(tensors, opts)? else {
            return Ok(UNSUPPORTED);
        };
        let Some(redop) = self.reduction(opts, flat.dtype)? else { return Ok(UNSUPPORTED) };
        let blocks = flat.blocks();
        self.run((Collective::AllReduce, redop, 0), (blocks, blocks), flat, handle, [&tensor, &tensor])
    }

    fn broadcast(&self, tensors: &Bound<'_, PyAny>, opts: &Bound<'_, PyAny>) -> PyResult<CallResult> {
        let Some((tensor, flat, handle)) = self.one(tensors, opts)? else {
            return Ok(UNSUPPORTED);
        };
        let root = opts.getattr(intern!(opts.py(), "rootRank"))?.extract::<usize>().ok();
        let Some(root) = root.filter(|&root| root < self.comm.size()) else { return Ok(UNSUPPORTED) };
        let blocks = flat.blocks();
        let input = if root == self.comm.rank() { blocks } else { Blocks::None };
        self.run((Collective::Broadcast, RedOp::Sum, root), (input, blocks), flat, handle, [&tensor, &tensor])
    }

    fn all_gather(
        &self,
        output: &Bound<'_, PyAny>,
        input: &Bound<'_, PyAny>,
        opts: &Bound<'_, PyAny>,
    ) -> PyResult<CallResult> {
        let Some((to, from, handle)) = self.two(output, input, opts)? else { return Ok(UNSUPPORTED) };
        if !self.divides(from, to) {
            return Ok(UNSUPPORTED);
        }
        let operation = (Collective::AllGather, RedOp::Sum, 0);
        self.run(operation, (from.blocks(), to.blocks()), to, handle, [output, input])
    }

    fn reduce_scatter(
        &self,
        output: &Bound<'_, PyAny>,
        input: &Bound<'_, PyAny>,
        opts: &Bound<'_, PyAny>,
    ) -> PyResult<CallResult> {
        let Some((to, from, handle)) = self.two(output, input, opts)? else { return Ok(UNSUPPORTED) };
        let Some(redop) = self.reduction(opts, to.dtype)? else { return Ok(UNSUPPORTED) };
        if !self.divides(to, from) {
            return Ok(UNSUPPORTED);
        }
        let operation = (Collective::ReduceScatter, redop, 0);
        self.run(operation, (from.blocks(), to.blocks()), to, handle, [output, input])
    }

    /// Supports calls without split sizes only.
    fn all_to_all(
        &self,
        output: &Bound<'_, PyAny>,
        input: &Bound<'_, PyAny>,
        output_splits: &Bound<'_, PyAny>,
        input_splits: &Bound<'_, PyAny>,
        opts: &Bound<'_, PyAny>,
    ) -> PyResult<CallResult> {
        if output_splits.is_truthy()? || input_splits.is_truthy()? {
            return Ok(UNSUPPORTED);
        }
        let Some((to, from, handle)) = self.two(output, input, opts)? else { return Ok(UNSUPPORTED) };
        let size = self.comm.size() as i64;
        let cut = |flat: FlatTensor| flat.length > 0 && flat.length % size == 0;
        if to.count != from.count || !cut(to) || !cut(from) {
            return Ok(UNSUPPORTED);
        }
        let operation = (Collective::AllToAll, RedOp::Sum, 0);
        self.run(operation, (from.blocks(), to.blocks()), to, handle, [output, input])
    }
}
