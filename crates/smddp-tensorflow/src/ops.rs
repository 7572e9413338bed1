//! The ops: definitions and kernels.

use std::ffi::{CStr, CString};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use smddp_core::{Blocks, Call, Collective, Communicator, DType, Options, PerProcess, RedOp, lock};

use crate::bucket::Bucket;
use crate::group::group;
use crate::interface::{Compute, Create, Opaque, Status, get, load};
use crate::kernel::{Attributes, Failure, Kernel, compute, create, delete, refuse};
use crate::pack::{PackedRange, copy, packed_ranges};
use crate::tensor::{InputTensor, OutputTensor, Shape};
use crate::ticket::{self, PendingOp};

/// Packs the tensors of a bucket and starts their all_reduce.
struct Start;
/// Waits for a started all_reduce. The results are in the bucket.
struct Wait;
/// Broadcasts the root's tensors to all ranks.
struct Broadcast;
/// Gathers all ranks' rows in rank order. The numbers of rows may differ.
struct Gather;

struct Definition {
    name: &'static CStr,
    attributes: &'static [&'static CStr],
    inputs: &'static [&'static CStr],
    outputs: &'static [&'static CStr],
    /// Names of inputs and outputs.
    arguments: &'static [&'static CStr],
    create: Create,
    compute: Compute,
}

const DEFINITIONS: [Definition; 4] = [
    Definition {
        name: c"SmddpStart",
        attributes: &[c"N: int >= 1", c"T: type", c"op: int"],
        inputs: &[c"tensors: N * T"],
        outputs: &[c"ticket: int64"],
        arguments: &[c"tensors", c"ticket"],
        create: create::<Start>,
        compute: compute::<Start>,
    },
    Definition {
        name: c"SmddpWait",
        attributes: &[c"N: int >= 1", c"T: type"],
        inputs: &[c"ticket: int64"],
        outputs: &[c"results: N * T"],
        arguments: &[c"ticket", c"results"],
        create: create::<Wait>,
        compute: compute::<Wait>,
    },
    Definition {
        name: c"SmddpBroadcast",
        attributes: &[c"N: int >= 1", c"T: type", c"root: int"],
        inputs: &[c"tensors: N * T"],
        outputs: &[c"results: N * T"],
        arguments: &[c"tensors", c"results"],
        create: create::<Broadcast>,
        compute: compute::<Broadcast>,
    },
    Definition {
        name: c"SmddpGather",
        attributes: &[c"T: type"],
        inputs: &[c"tensor: T"],
        outputs: &[c"result: T"],
        arguments: &[c"tensor", c"result"],
        create: create::<Gather>,
        compute: compute::<Gather>,
    },
];

/// Registers the ops with the loaded TensorFlow, once.
///
/// # Errors
/// No TensorFlow is loaded, it lacks a required function, or it rejects an op.
pub fn register() -> Result<(), String> {
    // A forked child inherits TensorFlow's registry, but not the thread that holds the parent's lock.
    static REGISTERED: AtomicBool = AtomicBool::new(false);
    static REGISTERING: PerProcess<Mutex<()>> = PerProcess::new();
    let _registering = lock(REGISTERING.get());
    if REGISTERED.load(Ordering::Acquire) {
        return Ok(());
    }
    load()?;
    for definition in &DEFINITIONS {
        definition.register()?;
    }
    REGISTERED.store(true, Ordering::Release);
    Ok(())
}

impl Definition {
    fn register(&self) -> Result<(), String> {
        let (tf, status) = (get(), Status::new());
        // SAFETY: TensorFlow creates the builders and takes ownership of them on registration; strings and functions
        // are static.
        unsafe {
            let builder = (tf.TF_NewOpDefinitionBuilder)(self.name.as_ptr());
            for attribute in self.attributes {
                (tf.TF_OpDefinitionBuilderAddAttr)(builder, attribute.as_ptr());
            }
            for input in self.inputs {
                (tf.TF_OpDefinitionBuilderAddInput)(builder, input.as_ptr());
            }
            for output in self.outputs {
                (tf.TF_OpDefinitionBuilderAddOutput)(builder, output.as_ptr());
            }
            // Stateful ops are ordered and never eliminated.
            (tf.TF_OpDefinitionBuilderSetIsStateful)(builder, true);
            (tf.TF_OpDefinitionBuilderSetShapeInferenceFunction)(builder, unknown_shape);
            (tf.TF_RegisterOpDefinition)(builder, status.raw());
        }
        status.ok()?;
        self.kernel(c"CPU", self.create)?;
        // With host-memory arguments TensorFlow copies to the host and back.
        self.kernel(c"GPU", self.create)?;
        self.kernel(c"XLA_CPU_JIT", refuse)?;
        self.kernel(c"XLA_GPU_JIT", refuse)
    }

    fn kernel(&self, device: &CStr, create: Create) -> Result<(), String> {
        let (tf, status) = (get(), Status::new());
        let name = format!("{}{}", self.name.to_string_lossy(), device.to_string_lossy());
        let name = CString::new(name).map_err(|error| error.to_string())?;
        // SAFETY: as above.
        unsafe {
            let builder =
                (tf.TF_NewKernelBuilder)(self.name.as_ptr(), device.as_ptr(), create, self.compute, delete);
            if device != c"CPU" {
                for argument in self.arguments {
                    (tf.TF_KernelBuilder_HostMemory)(builder, argument.as_ptr());
                }
            }
            (tf.TF_RegisterKernelBuilder)(name.as_ptr(), builder, status.raw());
        }
        status.ok()
    }
}

/// Shape inference function without a result: Python sets the shapes.
unsafe extern "C" fn unknown_shape(context: Opaque, status: Opaque) {
    // SAFETY: TensorFlow passes valid objects.
    unsafe { (get().TF_ShapeInferenceContextSetUnknownShape)(context, status) };
}

impl Kernel for Start {
    const ATTRIBUTES: &'static [&'static CStr] = &[c"op"];

    fn compute(attributes: &Attributes, context: Opaque) -> Result<(), Failure> {
        let group = group()?;
        let redop = RedOp::from_code(attributes.op, 1.0)
            .ok_or_else(|| Failure::invalid(format!("invalid reduction number {}", attributes.op)))?;
        let tensors = InputTensor::inputs(context)?;
        let (ranges, bytes, dtype) = packed_ranges(tensors.iter().map(InputTensor::shape).collect())?;
        if (redop, dtype) == (RedOp::Avg, DType::Bool) {
            return Err(Failure::invalid(
                "the average of bool is not defined: cast first, or choose another op",
            ));
        }
        let bucket = Bucket::of(bytes);
        let output = Blocks::Flat { ptr: bucket.at(0), count: bytes / dtype.size() };
        let input = match tensors.as_slice() {
            // A single tensor is read in place.
            [tensor] => Blocks::Flat { ptr: tensor.data(), count: bytes / dtype.size() },
            _ => {
                copy(&tensors, &ranges, &bucket);
                output
            }
        };
        let call = Call { collective: Collective::AllReduce, dtype, redop, root: 0, input, output };
        let options = Options { keep: Some(Box::new((bucket.clone(), tensors))), ..Options::default() };
        // SAFETY: `keep` keeps bucket and tensors until the call is done. The bucket is not used elsewhere before.
        let work = unsafe { group.start(&call, options) }?;
        let ticket = ticket::issue(PendingOp { work, bucket, ranges });
        Ok(OutputTensor::number(ticket).output(context, 0)?)
    }
}

impl Kernel for Wait {
    const ATTRIBUTES: &'static [&'static CStr] = &[];

    fn compute(_: &Attributes, context: Opaque) -> Result<(), Failure> {
        let number = InputTensor::input(context, 0)?.number();
        let Some(PendingOp { work, bucket, ranges }) = ticket::redeem(number) else {
            return Err(Failure::precondition(
                "the all_reduce to wait for does not exist: its group has been shut down",
            ));
        };
        work.wait(None)?;
        for (index, PackedRange { offset, shape }) in ranges.iter().enumerate() {
            shape.output_in(&bucket, *offset).output(context, index)?;
        }
        Ok(())
    }
}

/// Runs a call. `keep` keeps its input and output alive.
fn run(group: &Communicator, call: &Call<'_>, keep: impl Send + Sync + 'static) -> Result<(), Failure> {
    let options = Options { keep: Some(Box::new(keep)), ..Options::default() };
    // SAFETY: each caller's `keep` keeps both buffers alive. If a signal interrupts the wait, the group keeps it until the
    // call is done.
    Ok(unsafe { group.run(call, options) }?)
}

impl Kernel for Broadcast {
    const ATTRIBUTES: &'static [&'static CStr] = &[c"root"];

    fn compute(attributes: &Attributes, context: Opaque) -> Result<(), Failure> {
        let group = group()?;
        for (index, tensor) in InputTensor::inputs(context)?.into_iter().enumerate() {
            let shape = tensor.shape();
            let (dtype, bucket) = (shape.dtype().map_err(Failure::invalid)?, Bucket::of(shape.bytes));
            let count = shape.bytes / dtype.size();
            let output = Blocks::Flat { ptr: bucket.at(0), count };
            let input = if group.rank() == attributes.root {
                Blocks::Flat { ptr: tensor.data(), count }
            } else {
                Blocks::None
            };
            let call = Call {
                collective: Collective::Broadcast,
                dtype,
                redop: RedOp::Sum,
                root: attributes.root,
                input,
                output,
            };
            run(&group, &call, (bucket.clone(), tensor))?;
            shape.output_in(&bucket, 0).output(context, index)?;
        }
        Ok(())
    }
}

impl Kernel for Gather {
    const ATTRIBUTES: &'static [&'static CStr] = &[];

    fn compute(_: &Attributes, context: Opaque) -> Result<(), Failure> {
        let group = group()?;
        let tensor = InputTensor::input(context, 0)?;
        let shape = tensor.shape();
        let dtype = shape.dtype().map_err(Failure::invalid)?;
        let (&mine, row) = shape
            .dims
            .split_first()
            .ok_or_else(|| Failure::invalid("a scalar has no rows to gather: give it a first dimension"))?;
        let rows: Vec<i64> = group
            .all_gather_bytes(mine.to_ne_bytes().to_vec())?
            .as_chunks()
            .0
            .iter()
            .map(|bytes| i64::from_ne_bytes(*bytes))
            .collect();
        let width = row.iter().product::<i64>() as usize;
        let counts: Vec<usize> = rows.iter().map(|rows| *rows as usize * width).collect();
        let total = counts.iter().sum::<usize>() * dtype.size();
        let bucket = Bucket::of(total);
        let call = Call {
            collective: Collective::AllGather,
            dtype,
            redop: RedOp::Sum,
            root: 0,
            input: Blocks::Flat { ptr: tensor.data(), count: shape.bytes / dtype.size() },
            output: Blocks::Cut { ptr: bucket.at(0), counts: &counts },
        };
        run(&group, &call, (bucket.clone(), tensor))?;
        let mut dims = shape.dims.clone();
        dims[0] = rows.iter().sum();
        Shape { dims, bytes: total, ..shape }.output_in(&bucket, 0).output(context, 0).map_err(Failure::from)
    }
}
