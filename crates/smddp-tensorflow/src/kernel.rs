//! What every kernel does: read its attributes, make its call, tell how it failed.

use std::cell::Cell;
use std::ffi::{CStr, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};

use smddp_core::Error;

use crate::interface::{Code, Opaque, Status, get};

/// How a kernel failed, as TensorFlow's errors say it.
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

/// TensorFlow's own texts.
impl From<String> for Failure {
    fn from(text: String) -> Self {
        Self { code: Code::Internal, text }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let (code, name) = match &error {
            Error::Invalid(_) | Error::Config(_) => (Code::InvalidArgument, "ValueError"),
            Error::Mismatch { .. } => (Code::InvalidArgument, "smddp.MismatchError"),
            Error::Timeout { .. } => (Code::DeadlineExceeded, "smddp.CollectiveTimeoutError"),
            // Not Unavailable: TensorFlow makes Internal of that inside of functions, and only there.
            Error::PeerLost { .. } => (Code::Internal, "smddp.PeerLostError"),
            Error::Closed { .. } | Error::Interrupted => (Code::Cancelled, "smddp.ClosedError"),
            Error::Topology(_) => (Code::Internal, "smddp.TopologyError"),
            Error::Forked { .. } => (Code::FailedPrecondition, "smddp.ClosedError"),
            _ => (Code::Internal, "smddp.Error"),
        };
        Self { code, text: format!("{name}: {error}") }
    }
}

/// What an op was made with.
#[derive(Default)]
pub(crate) struct Attributes {
    pub(crate) op: u8,
    pub(crate) root: usize,
}

/// One kind of kernel.
pub(crate) trait Kernel {
    /// The op's integer attributes that it reads.
    const ATTRIBUTES: &'static [&'static CStr];

    /// One call.
    fn compute(attributes: &Attributes, context: Opaque) -> Result<(), Failure>;
}

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread is in a kernel: a signal's Python handler must not run there, since its exception would be lost in
/// TensorFlow.
pub fn in_kernel() -> bool {
    INSIDE.get()
}

/// Calls of kernels under way, on any thread.
static UNDER_WAY: AtomicUsize = AtomicUsize::new(0);

/// Whether a kernel is under way on any thread.
pub fn any_under_way() -> bool {
    UNDER_WAY.load(Ordering::Relaxed) > 0
}

pub(crate) unsafe extern "C" fn create<K: Kernel>(construction: Opaque) -> *mut c_void {
    let mut made = Attributes::default();
    for name in K::ATTRIBUTES {
        let (status, mut value) = (Status::new(), 0);
        // SAFETY: TensorFlow's construction under way, a string, and a number to write to.
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
            b"op" => made.op = u8::try_from(value).unwrap_or(u8::MAX),
            _ => made.root = usize::try_from(value).unwrap_or(usize::MAX),
        }
    }
    Box::into_raw(Box::new(made)).cast()
}

pub(crate) unsafe extern "C" fn compute<K: Kernel>(kernel: *mut c_void, context: Opaque) {
    // SAFETY: made by `create`, and not yet given to `delete`; kernels only read it.
    let attributes = unsafe { &*kernel.cast::<Attributes>() };
    INSIDE.set(true);
    UNDER_WAY.fetch_add(1, Ordering::Relaxed);
    let outcome = catch_unwind(AssertUnwindSafe(|| K::compute(attributes, context)));
    UNDER_WAY.fetch_sub(1, Ordering::Relaxed);
    INSIDE.set(false);
    let failure = match outcome {
        Ok(Ok(())) => return,
        Ok(Err(failure)) => failure,
        Err(_) => {
            Failure::from("smddp: a kernel of the library panicked: its message is on stderr".to_owned())
        }
    };
    let status = Status::new();
    status.set(failure.code, &failure.text);
    // SAFETY: the context of the call under way.
    unsafe { (get().TF_OpKernelContext_Failure)(context, status.raw()) };
}

pub(crate) unsafe extern "C" fn delete(kernel: *mut c_void) {
    // SAFETY: made by `create`; TensorFlow deletes it once, when no call of it is under way.
    drop(unsafe { Box::from_raw(kernel.cast::<Attributes>()) });
}

/// What a kernel of this device says: none is there.
pub(crate) unsafe extern "C" fn refuse(construction: Opaque) -> *mut c_void {
    let status = Status::new();
    status.set(
        Code::InvalidArgument,
        "smddp's operations wait for other ranks, which a program compiled by XLA cannot do: leave jit_compile=True out \
         (jit_compile=False), or keep them outside of the function that is compiled",
    );
    // SAFETY: TensorFlow's construction under way.
    unsafe { (get().TF_OpKernelConstruction_Failure)(construction, status.raw()) };
    Box::into_raw(Box::new(Attributes::default())).cast()
}
