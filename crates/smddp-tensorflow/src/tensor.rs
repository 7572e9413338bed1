//! TensorFlow's tensors: what comes in, and what goes out over a bucket's memory.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use smddp_core::DType;

use crate::bucket::Bucket;
use crate::interface::{Opaque, Status, get};

/// Element types, by `TF_DataType`.
const TYPES: [(c_int, DType); 16] = [
    (1, DType::F32),
    (2, DType::F64),
    (3, DType::I32),
    (4, DType::U8),
    (5, DType::I16),
    (6, DType::I8),
    (8, DType::C64),
    (9, DType::I64),
    (10, DType::Bool),
    (14, DType::BF16),
    (17, DType::U16),
    (18, DType::C128),
    (19, DType::F16),
    (22, DType::U32),
    (23, DType::U64),
    // Quantised integers are none of arithmetic.
    (11, DType::Opaque1),
];
const INT64: c_int = 9;

/// A tensor that a kernel was given: a reference to its memory, which stays until this is dropped.
pub(crate) struct Given(Opaque);

// SAFETY: TensorFlow counts references to tensors atomically, and this value has one of its own.
unsafe impl Send for Given {}
// SAFETY: as above; nothing here writes.
unsafe impl Sync for Given {}

impl Given {
    /// Input `index` of a kernel's call.
    pub(crate) fn input(context: Opaque, index: c_int) -> Result<Self, String> {
        let (status, mut raw) = (Status::new(), std::ptr::null_mut());
        // SAFETY: `context` is that of the call under way; the tensor's reference is this value's.
        unsafe { (get().TF_GetInput)(context, index, &raw mut raw, status.raw()) };
        status.ok().map(|()| Self(raw))
    }

    /// All inputs of a kernel's call.
    pub(crate) fn inputs(context: Opaque) -> Result<Vec<Self>, String> {
        // SAFETY: the context of the call under way.
        let count = unsafe { (get().TF_NumInputs)(context) };
        (0..count).map(|index| Self::input(context, index)).collect()
    }

    pub(crate) fn shape(&self) -> Shape {
        // SAFETY: a live tensor.
        unsafe {
            let kind = (get().TF_TensorType)(self.0);
            let dims = (0..(get().TF_NumDims)(self.0)).map(|at| (get().TF_Dim)(self.0, at)).collect();
            Shape { kind, dims, bytes: (get().TF_TensorByteSize)(self.0) }
        }
    }

    /// Its first byte. Whoever follows it has this value.
    pub(crate) fn data(&self) -> *mut u8 {
        // SAFETY: a live tensor.
        unsafe { (get().TF_TensorData)(self.0).cast() }
    }

    /// Of a scalar int64.
    pub(crate) fn number(&self) -> i64 {
        debug_assert_eq!(self.shape().bytes, 8);
        // SAFETY: the op's definition says that this input is int64, and who makes the op that it is a scalar.
        unsafe { self.data().cast::<i64>().read_unaligned() }
    }
}

impl Drop for Given {
    fn drop(&mut self) {
        // SAFETY: this value's own reference.
        unsafe { (get().TF_DeleteTensor)(self.0) };
    }
}

/// Type, dimensions and bytes of a tensor.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Shape {
    pub(crate) kind: c_int,
    pub(crate) dims: Vec<i64>,
    pub(crate) bytes: usize,
}

impl Shape {
    /// # Errors
    /// Elements that cannot be moved as they are: strings, resources, variants.
    pub(crate) fn dtype(&self) -> Result<DType, String> {
        let known = TYPES.iter().find(|(kind, _)| *kind == self.kind);
        known.map(|(_, dtype)| *dtype).ok_or_else(|| {
            format!("tensors of TensorFlow's type number {} cannot be sent: cast them first", self.kind)
        })
    }

    /// What it is in an output: over `bytes` of the bucket's memory from `offset` on.
    pub(crate) fn over(&self, bucket: &Arc<Bucket>, offset: usize) -> Made {
        let held = Arc::into_raw(bucket.clone());
        // SAFETY: the bucket's memory holds the bytes that type and dimensions ask for, aligned as TensorFlow wants; the
        // reference handed on as `held` keeps it until TensorFlow's last one calls `let_go`, on any thread.
        Made(unsafe {
            (get().TF_NewTensor)(
                self.kind,
                self.dims.as_ptr(),
                self.dims.len() as c_int,
                bucket.at(offset).cast(),
                self.bytes,
                let_go,
                held.cast_mut().cast(),
            )
        })
    }
}

unsafe extern "C" fn let_go(_: *mut c_void, _: usize, held: *mut c_void) {
    // SAFETY: made by `Arc::into_raw` in `Shape::over`, and TensorFlow calls this once.
    drop(unsafe { Arc::from_raw(held.cast::<Bucket>()) });
}

/// A tensor made here.
pub(crate) struct Made(Opaque);

impl Made {
    /// A scalar.
    pub(crate) fn number(value: i64) -> Self {
        let bucket = Bucket::of(8);
        // SAFETY: eight aligned bytes, which nobody else has yet.
        unsafe { bucket.at(0).cast::<i64>().write(value) };
        Shape { kind: INT64, dims: Vec::new(), bytes: 8 }.over(&bucket, 0)
    }

    /// Makes it output `index` of a kernel's call.
    pub(crate) fn output(self, context: Opaque, index: usize) -> Result<(), String> {
        let status = Status::new();
        // SAFETY: the context of the call under way, which takes a reference of its own.
        unsafe { (get().TF_SetOutput)(context, index as c_int, self.0, status.raw()) };
        status.ok()
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        // SAFETY: this value's own reference.
        unsafe { (get().TF_DeleteTensor)(self.0) };
    }
}
