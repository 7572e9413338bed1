//! Common code of the kernels: attributes, calls and errors.

use std::cell::Cell;
use std::ffi::{CStr, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};

use smddp_core::Error;

use crate::interface::{Code, Opaque, Status, get};

/// An error of a kernel, as a TensorFlow status.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) code: Code,
    pub(crate) text: String,
}

impl Failure {
    pub(crate) fn invalid(text: impl Into<String>) -> Self {
        Self { code: Code::InvalidArgument, text: text.into() }
    }

    pub(crate) fn precondition(text: impl Into<String>) -> Self {
        Self { code: Code::FailedPrecondition, text: text.into() }
    }
}

/// Converts error texts of TensorFlow.
impl From<String> for Failure {
    fn from(text: String) -> Self {
        Self { code: Code::Internal, text }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let (code, name) = match &error {
            Error::Invalid(_) | Error::Config(_) => (Code::InvalidArgument, "ValueError"),
            Error::Corrupted { .. } => (Code::DataLoss, "smddp.CorruptionError"),
            Error::Mismatch { .. } => (Code::InvalidArgument, "smddp.MismatchError"),
            Error::Deadlock { .. } => (Code::Internal, "smddp.DeadlockError"),
            Error::Timeout { .. } => (Code::DeadlineExceeded, "smddp.CollectiveTimeoutError"),
            // Not Unavailable: TensorFlow converts that to Internal inside of functions only.
            Error::PeerLost { .. } => (Code::Internal, "smddp.PeerLostError"),
            Error::Closed { .. } | Error::Interrupted => (Code::Cancelled, "smddp.ClosedError"),
            Error::Topology(_) => (Code::Internal, "smddp.TopologyError"),
            Error::Forked { .. } => (Code::FailedPrecondition, "smddp.ClosedError"),
            _ => (Code::Internal, "smddp.Error"),
        };
        Self { code, text: format!("{name}: {error}") }
    }
}

/// The attributes of an op.
#[derive(Default)]
pub(crate) struct Attributes {
    pub(crate) op: u8,
    pub(crate) root: usize,
}

/// A kernel of one op.
pub(crate) trait Kernel {
    /// The integer attributes that the kernel reads.
    const ATTRIBUTES: &'static [&'static CStr];

    /// Runs the op.
    fn compute(attributes: &Attributes, context: Opaque) -> Result<(), Failure>;
}

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Returns true if this thread runs a kernel. Python signal handlers must not run there, since TensorFlow would lose their
/// exceptions.
pub fn in_kernel() -> bool {
    INSIDE.get()
}

/// Number of running kernels on all threads.
static RUNNING: AtomicUsize = AtomicUsize::new(0);

/// Returns true if a kernel runs on any thread.
pub fn is_any_running() -> bool {
    RUNNING.load(Ordering::Relaxed) > 0
}

pub(crate) unsafe extern "C" fn create<K: Kernel>(construction: Opaque) -> *mut c_void {
    let mut attributes = Attributes::default();
    for name in K::ATTRIBUTES {
        let (status, mut value) = (Status::new(), 0);
        // SAFETY: TensorFlow's current construction, a string, and the address of a number.
        unsafe {
            (get().TF_OpKernelConstruction_GetAttrInt64)(
                construction,
                name.as_ptr(),
                &raw mut value,
                status.raw(),
            );
            if status.ok().is_err() {
                (get().TF_OpKernelConstruction_Failure)(construction, status.raw());
            }
        }
        match name.to_bytes() {
            b"op" => attributes.op = u8::try_from(value).unwrap_or(u8::MAX),
            _ => attributes.root = usize::try_from(value).unwrap_or(usize::MAX),
        }
    }
    Box::into_raw(Box::new(attributes)).cast()
}

pub(crate) unsafe extern "C" fn compute<K: Kernel>(kernel: *mut c_void, context: Opaque) {
    // SAFETY: created by `create` and not deleted yet; kernels only read it.
    let attributes = unsafe { &*kernel.cast::<Attributes>() };
    INSIDE.set(true);
    RUNNING.fetch_add(1, Ordering::Relaxed);
    let outcome = catch_unwind(AssertUnwindSafe(|| K::compute(attributes, context)));
    RUNNING.fetch_sub(1, Ordering::Relaxed);
    INSIDE.set(false);
    let failure = match outcome {
        Ok(Ok(())) => return,
        Ok(Err(failure)) => failure,
        Err(_) => Failure::from("smddp: a kernel panicked; the message is on stderr".to_owned()),
    };
    let status = Status::new();
    status.set(failure.code, &failure.text);
    // SAFETY: the context of the current call.
    unsafe { (get().TF_OpKernelContext_Failure)(context, status.raw()) };
}

pub(crate) unsafe extern "C" fn delete(kernel: *mut c_void) {
    // SAFETY: created by `create`; TensorFlow deletes it once, when no call of the kernel runs.
    drop(unsafe { Box::from_raw(kernel.cast::<Attributes>()) });
}

/// Constructor that fails: the op is not supported on this device.
pub(crate) unsafe extern "C" fn refuse(construction: Opaque) -> *mut c_void {
    let status = Status::new();
    status.set(
        Code::InvalidArgument,
        "smddp's operations wait for other ranks, which a program compiled by XLA cannot do: omit jit_compile=True \
         (jit_compile=False), or call them outside of the compiled function",
    );
    // SAFETY: TensorFlow's current construction.
    unsafe { (get().TF_OpKernelConstruction_Failure)(construction, status.raw()) };
    Box::into_raw(Box::new(Attributes::default())).cast()
}
