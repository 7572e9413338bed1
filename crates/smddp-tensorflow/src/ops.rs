//! The ops: their definitions, and what each does.

use std::ffi::{CStr, CString};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use smddp_core::{Blocks, Call, Collective, Communicator, DType, Options, PerProcess, RedOp};

use crate::bucket::Bucket;
use crate::group::group;
use crate::interface::{Compute, Create, Opaque, Status, get, load};
use crate::kernel::{Attributes, Failure, Kernel, compute, create, delete, refuse};
use crate::pack::{Place, copy, places};
use crate::tensor::{Given, Made, Shape};
use crate::ticket::{self, Pending};

/// Packs the tensors of a bucket and starts their all_reduce.
struct Start;
/// Waits for what was started; the results lie in the bucket.
struct Wait;
/// The root's tensors, on all ranks.
struct Broadcast;
/// All ranks' rows, in rank order; as many of each as it has.
struct Gather;

struct Definition {
    name: &'static CStr,
    attributes: &'static [&'static CStr],
    inputs: &'static [&'static CStr],
    outputs: &'static [&'static CStr],
    /// Of inputs and outputs.
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

/// Tells the TensorFlow that is loaded of the ops; once.
///
/// # Errors
/// No TensorFlow is loaded, or one without a function that is needed, or it refuses one.
pub fn register() -> Result<(), String> {
    // A forked child inherits TensorFlow's registry, but not a thread that holds the parent's lock.
    static REGISTERED: AtomicBool = AtomicBool::new(false);
    static REGISTERING: PerProcess<Mutex<()>> = PerProcess::new();
    let _registering = REGISTERING.get().lock().unwrap_or_else(PoisonError::into_inner);
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
        // SAFETY: builders are TensorFlow's, and it takes them back when they are registered; strings and functions are
        // static.
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
            // Its order among other calls counts, and it is never left out.
            (tf.TF_OpDefinitionBuilderSetIsStateful)(builder, true);
            (tf.TF_OpDefinitionBuilderSetShapeInferenceFunction)(builder, unknown_shape);
            (tf.TF_RegisterOpDefinition)(builder, status.raw());
        }
        status.ok()?;
        self.kernel(c"CPU", self.create)?;
        // TensorFlow copies to the host and back.
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

/// Python says the shapes, which it knows: outputs have those of inputs.
unsafe extern "C" fn unknown_shape(context: Opaque, status: Opaque) {
    // SAFETY: TensorFlow's own two.
    unsafe { (get().TF_ShapeInferenceContextSetUnknownShape)(context, status) };
}

impl Kernel for Start {
    const ATTRIBUTES: &'static [&'static CStr] = &[c"op"];

    fn compute(attributes: &Attributes, context: Opaque) -> Result<(), Failure> {
        let group = group()?;
        let redop = RedOp::from_code(attributes.op, 1.0)
            .ok_or_else(|| Failure::invalid(format!("no reduction has number {}", attributes.op)))?;
        let tensors = Given::inputs(context)?;
        let (places, bytes, dtype) = places(tensors.iter().map(Given::shape).collect())?;
        if (redop, dtype) == (RedOp::Avg, DType::Bool) {
            return Err(Failure::invalid(
                "the average of bool is not defined: cast first, or choose another op",
            ));
        }
        let bucket = Bucket::of(bytes);
        let output = Blocks::Flat { ptr: bucket.at(0), count: bytes / dtype.size() };
        let input = match tensors.as_slice() {
            // One alone is read where it lies.
            [tensor] => Blocks::Flat { ptr: tensor.data(), count: bytes / dtype.size() },
            _ => {
                copy(&tensors, &places, &bucket);
                output
            }
        };
        let call = Call { collective: Collective::AllReduce, dtype, redop, root: 0, input, output };
        let options = Options { keep: Some(Box::new((bucket.clone(), tensors))), ..Options::default() };
        // SAFETY: bucket and tensors are kept until the call is over; of the bucket nobody else knows before.
        let work = unsafe { group.start(&call, options) }?;
        let ticket = ticket::issue(Pending { work, bucket, places });
        Ok(Made::number(ticket).output(context, 0)?)
    }
}

impl Kernel for Wait {
    const ATTRIBUTES: &'static [&'static CStr] = &[];

    fn compute(_: &Attributes, context: Opaque) -> Result<(), Failure> {
        let number = Given::input(context, 0)?.number();
        let Some(Pending { work, bucket, places }) = ticket::redeem(number) else {
            return Err(Failure::precondition(
                "what is waited for is not under way: the group it was started over has been shut down",
            ));
        };
        work.wait(None)?;
        for (index, Place { offset, shape }) in places.iter().enumerate() {
            shape.over(&bucket, *offset).output(context, index)?;
        }
        Ok(())
    }
}

/// Makes a call whose sides are kept by `keep`.
fn run(group: &Communicator, call: &Call<'_>, keep: impl Send + Sync + 'static) -> Result<(), Failure> {
    let options = Options { keep: Some(Box::new(keep)), ..Options::default() };
    // SAFETY: each caller's `keep` holds both sides; where a signal ends the wait, the group holds it until the call is over.
    Ok(unsafe { group.run(call, options) }?)
}

impl Kernel for Broadcast {
    const ATTRIBUTES: &'static [&'static CStr] = &[c"root"];

    fn compute(attributes: &Attributes, context: Opaque) -> Result<(), Failure> {
        let group = group()?;
        for (index, tensor) in Given::inputs(context)?.into_iter().enumerate() {
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
            shape.over(&bucket, 0).output(context, index)?;
        }
        Ok(())
    }
}

impl Kernel for Gather {
    const ATTRIBUTES: &'static [&'static CStr] = &[];

    fn compute(_: &Attributes, context: Opaque) -> Result<(), Failure> {
        let group = group()?;
        let tensor = Given::input(context, 0)?;
        let shape = tensor.shape();
        let dtype = shape.dtype().map_err(Failure::invalid)?;
        let (&mine, row) = shape
            .dims
            .split_first()
            .ok_or_else(|| Failure::invalid("a scalar has no rows to gather: give it a first dimension"))?;
        let rows: Vec<i64> = group
            .bytes_of_all(mine.to_ne_bytes().to_vec())?
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
        Shape { dims, bytes: total, ..shape }.over(&bucket, 0).output(context, 0).map_err(Failure::from)
    }
}
