//! TensorFlow tensors: inputs of kernels, and outputs in a bucket's memory.

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
    // Quantized integers have no arithmetic.
    (11, DType::Opaque1),
];
const INT64: c_int = 9;

/// An input of a kernel: a counted reference that keeps the tensor's memory alive.
pub(crate) struct InputTensor(Opaque);

// SAFETY: TensorFlow counts references to tensors atomically, and this value owns one.
unsafe impl Send for InputTensor {}
// SAFETY: as above; the methods do not write.
unsafe impl Sync for InputTensor {}

impl InputTensor {
    /// Returns input `index` of a kernel call.
    pub(crate) fn input(context: Opaque, index: c_int) -> Result<Self, String> {
        let (status, mut raw) = (Status::new(), std::ptr::null_mut());
        // SAFETY: `context` belongs to the current call; this value owns the returned reference.
        unsafe { (get().TF_GetInput)(context, index, &raw mut raw, status.raw()) };
        status.ok().map(|()| Self(raw))
    }

    /// Returns all inputs of a kernel call.
    pub(crate) fn inputs(context: Opaque) -> Result<Vec<Self>, String> {
        // SAFETY: the context of the current call.
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

    /// Returns the address of the first byte, valid while this value lives.
    pub(crate) fn data(&self) -> *mut u8 {
        // SAFETY: a live tensor.
        unsafe { (get().TF_TensorData)(self.0).cast() }
    }

    /// Returns the value of an int64 scalar.
    pub(crate) fn number(&self) -> i64 {
        debug_assert_eq!(self.shape().bytes, 8);
        // SAFETY: the op's definition requires int64, and the Python code passes a scalar.
        unsafe { self.data().cast::<i64>().read_unaligned() }
    }
}

impl Drop for InputTensor {
    fn drop(&mut self) {
        // SAFETY: this value owns the reference.
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
    /// Unsupported element types: strings, resources, variants.
    pub(crate) fn dtype(&self) -> Result<DType, String> {
        let known = TYPES.iter().find(|(kind, _)| *kind == self.kind);
        known.map(|(_, dtype)| *dtype).ok_or_else(|| {
            format!("tensors of TensorFlow's type number {} cannot be sent: cast them first", self.kind)
        })
    }

    /// Returns an output tensor of this shape in the bucket's memory at `offset`.
    pub(crate) fn output_in(&self, bucket: &Arc<Bucket>, offset: usize) -> OutputTensor {
        let held = Arc::into_raw(bucket.clone());
        // SAFETY: the bucket contains the bytes of type and dimensions with TensorFlow's alignment. The reference `held`
        // keeps it alive until TensorFlow calls `release_bucket`, on any thread.
        OutputTensor(unsafe {
            (get().TF_NewTensor)(
                self.kind,
                self.dims.as_ptr(),
                self.dims.len() as c_int,
                bucket.at(offset).cast(),
                self.bytes,
                release_bucket,
                held.cast_mut().cast(),
            )
        })
    }
}

unsafe extern "C" fn release_bucket(_: *mut c_void, _: usize, held: *mut c_void) {
    // SAFETY: created by `Arc::into_raw` in `Shape::output_in`, and TensorFlow calls this once.
    drop(unsafe { Arc::from_raw(held.cast::<Bucket>()) });
}

/// An output of a kernel.
pub(crate) struct OutputTensor(Opaque);

impl OutputTensor {
    /// Returns an int64 scalar.
    pub(crate) fn number(value: i64) -> Self {
        let bucket = Bucket::of(8);
        // SAFETY: eight aligned bytes with no other reference.
        unsafe { bucket.at(0).cast::<i64>().write(value) };
        Shape { kind: INT64, dims: Vec::new(), bytes: 8 }.output_in(&bucket, 0)
    }

    /// Sets the tensor as output `index` of a kernel call.
    pub(crate) fn output(self, context: Opaque, index: usize) -> Result<(), String> {
        let status = Status::new();
        // SAFETY: the context of the current call, which takes its own reference.
        unsafe { (get().TF_SetOutput)(context, index as c_int, self.0, status.raw()) };
        status.ok()
    }
}

impl Drop for OutputTensor {
    fn drop(&mut self) {
        // SAFETY: this value owns the reference.
        unsafe { (get().TF_DeleteTensor)(self.0) };
    }
}
