//! Engine calls on borrowed memory. Only this module passes pointers to the engine.

mod exchange;
mod stream;

use std::marker::PhantomData;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use smddp_core::{Blocks, Call, Collective, Communicator, DType, Options, RedOp, Work, lock};

use crate::buffers::Buffer;
use crate::error::Result;
use crate::op::{Op, uneven};

pub(crate) use stream::Stream;

/// Address and number of elements.
type RawBuffer = (*mut u8, usize);

/// The communicator of a group, with the operations of the benchmark.
pub(crate) struct BenchGroup {
    comm: Communicator,
}

/// Input and output of a call as (first byte, elements). `None`: this rank has no input or output.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BufferPair {
    pub input: Option<(usize, usize)>,
    pub output: Option<(usize, usize)>,
}

/// Operation, type, reduction and root of a call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Case {
    pub op: Op,
    pub dtype: DType,
    pub redop: RedOp,
    pub root: usize,
}

/// A collective of the engine with its buffers.
struct BoundCollective {
    call: Call<'static>,
    /// Element counts of the blocks of input and output, if they differ.
    cut: Option<Vec<usize>>,
}

impl BoundCollective {
    fn call(&self) -> Call<'_> {
        let blocks = |side| match (side, &self.cut) {
            (Blocks::Flat { ptr, .. }, Some(counts)) => Blocks::Cut { ptr, counts },
            (side, _) => side,
        };
        Call { input: blocks(self.call.input), output: blocks(self.call.output), ..self.call }
    }
}

enum Target {
    Collective(BoundCollective),
    RingExchange { input: RawBuffer, output: RawBuffer, dtype: DType },
    Hypercube { own: RawBuffer, all: RawBuffer, dtype: DType },
}

/// A call bound to buffers, which are borrowed as long as this value exists.
pub(crate) struct Bound<'a> {
    group: &'a BenchGroup,
    target: Target,
    buffers: PhantomData<&'a mut Buffer>,
}

impl BenchGroup {
    pub(crate) fn new(comm: Communicator) -> BenchGroup {
        BenchGroup { comm }
    }

    /// Returns the group of the ranks with this color, in rank order. Collective.
    pub(crate) fn split(&self, color: i64) -> Result<BenchGroup> {
        // A rank with a color is in a group.
        Ok(BenchGroup { comm: self.comm.split(Some(color), 0)?.unwrap_or_else(|| self.comm.clone()) })
    }

    pub(crate) fn rank(&self) -> usize {
        self.comm.rank()
    }

    pub(crate) fn size(&self) -> usize {
        self.comm.size()
    }

    pub(crate) fn comm(&self) -> &Communicator {
        &self.comm
    }

    /// Binds `case` to an input and an output buffer.
    pub(crate) fn bind<'a>(
        &'a self,
        case: Case,
        sides: BufferPair,
        input: &'a mut Buffer,
        output: &'a mut Buffer,
    ) -> Bound<'a> {
        let from = side(case.dtype, sides.input, input);
        let to = side(case.dtype, sides.output, output);
        self.bound(case, from, to)
    }

    /// Binds `case` to one buffer that contains input and output.
    pub(crate) fn bind_in_place<'a>(
        &'a self,
        case: Case,
        sides: BufferPair,
        both: &'a mut Buffer,
    ) -> Bound<'a> {
        let from = side(case.dtype, sides.input, both);
        let to = side(case.dtype, sides.output, both);
        self.bound(case, from, to)
    }

    fn bound(&self, case: Case, from: Option<RawBuffer>, to: Option<RawBuffer>) -> Bound<'_> {
        let blocks = |side| match side {
            Some((ptr, count)) => Blocks::Flat { ptr, count },
            None => Blocks::None,
        };
        let (dtype, nowhere) = (case.dtype, (std::ptr::NonNull::dangling().as_ptr(), 0));
        let (one, other) = (from.unwrap_or(nowhere), to.unwrap_or(nowhere));
        let collective = |collective, cut| {
            let (input, output) = (blocks(from), blocks(to));
            let call = Call { collective, dtype, redop: case.redop, root: case.root, input, output };
            Target::Collective(BoundCollective { call, cut })
        };
        let target = match (case.op, case.op.collective()) {
            (_, Some(plain)) => collective(plain, None),
            (Op::AllToAllV, _) => {
                collective(Collective::AllToAll, Some(uneven(one.1, self.size(), self.rank())))
            }
            (Op::Hypercube, _) => Target::Hypercube { own: one, all: other, dtype },
            _ => Target::RingExchange { input: one, output: other, dtype },
        };
        Bound { group: self, target, buffers: PhantomData }
    }

    pub(crate) fn barrier(&self) -> Result<()> {
        Ok(self.comm.barrier(Options::default())?)
    }

    /// Returns the reduction of the ranks' values.
    pub(crate) fn reduce_f64(&self, value: f64, redop: RedOp) -> Result<f64> {
        let mut bytes = value.to_ne_bytes();
        self.reduce_one(&mut bytes, DType::F64, redop)?;
        Ok(f64::from_ne_bytes(bytes))
    }

    /// Combines the ranks' times by `mode`, the value of nccl-tests' `-a`.
    pub(crate) fn average(&self, seconds: f64, mode: u8) -> Result<f64> {
        match mode {
            0 => self.reduce_f64(if self.rank() == 0 { seconds } else { 0.0 }, RedOp::Sum),
            2 => self.reduce_f64(seconds, RedOp::Min),
            3 => self.reduce_f64(seconds, RedOp::Max),
            _ => Ok(self.reduce_f64(seconds, RedOp::Sum)? / self.size() as f64),
        }
    }

    pub(crate) fn sum_u64(&self, value: u64) -> Result<u64> {
        let mut bytes = value.to_ne_bytes();
        self.reduce_one(&mut bytes, DType::U64, RedOp::Sum)?;
        Ok(u64::from_ne_bytes(bytes))
    }

    fn reduce_one(&self, bytes: &mut [u8; 8], dtype: DType, redop: RedOp) -> Result<()> {
        let both = Blocks::Flat { ptr: bytes.as_mut_ptr(), count: 1 };
        self.run(&Call {
            collective: Collective::AllReduce,
            dtype,
            redop,
            root: 0,
            input: both,
            output: both,
        })
    }

    /// Returns the bytes of all ranks in rank order. All have the same length.
    pub(crate) fn gather_bytes(&self, mine: &mut [u8]) -> Result<Vec<u8>> {
        let mut all = vec![0; mine.len() * self.size()];
        self.run(&Call {
            collective: Collective::AllGather,
            dtype: DType::U8,
            redop: RedOp::Sum,
            root: 0,
            input: Blocks::Flat { ptr: mine.as_mut_ptr(), count: mine.len() },
            output: Blocks::Flat { ptr: all.as_mut_ptr(), count: all.len() },
        })?;
        Ok(all)
    }

    /// Runs `call`, whose blocks point to memory that the caller borrows mutably.
    fn run(&self, call: &Call<'_>) -> Result<()> {
        // SAFETY: all callers are in this module. They pass pointers to memory of the given lengths that they borrow until
        // this returns. On failure `abort_on_error` aborts the communicator, after which the memory is not accessed.
        let done = unsafe { self.comm.run(call, smddp_core::Options::default()) };
        self.abort_on_error(done)
    }

    /// Aborts the communicator after a failed call, because only an abort makes the engine release the buffers.
    fn abort_on_error<T>(&self, done: smddp_core::Result<T>) -> Result<T> {
        done.map_err(|error| {
            self.comm.abort(&error.to_string());
            error.into()
        })
    }
}

impl Bound<'_> {
    pub(crate) fn run(&mut self) -> Result<()> {
        match &self.target {
            Target::Collective(collective) => self.group.run(&collective.call()),
            Target::RingExchange { input, output, dtype } => {
                self.group.ring_exchange(*input, *output, *dtype)
            }
            Target::Hypercube { own, all, dtype } => self.group.hypercube(*own, *all, *dtype),
        }
    }

    /// Returns this rank's time of `iters` consecutive calls.
    pub(crate) fn time(&mut self, iters: usize) -> Result<Duration> {
        self.iterate(iters, Iteration::default(), None)
    }

    /// Returns the time of `iters` iterations, and appends the seconds of each to `each`.
    pub(crate) fn iterate(
        &mut self,
        iters: usize,
        iteration: Iteration,
        mut each: Option<&mut Vec<f64>>,
    ) -> Result<Duration> {
        let begun = Instant::now();
        let mut before = begun;
        for _ in 0..iters {
            if iteration.calls > 1 {
                self.run_aggregated(iteration.calls)?
            } else {
                self.run()?
            }
            if iteration.barrier {
                self.group.barrier()?;
            }
            if let Some(each) = &mut each {
                let now = Instant::now();
                each.push((now - before).as_secs_f64());
                before = now;
            }
        }
        Ok(begun.elapsed())
    }

    /// Starts the call, runs `computation`, and waits for the call.
    pub(crate) fn run_overlapped(&mut self, computation: &mut dyn FnMut()) -> Result<()> {
        let Target::Collective(collective) = &self.target else {
            computation();
            return self.run();
        };
        // SAFETY: as for `BenchGroup::run`; this function waits for the work, or aborts the communicator.
        let started = unsafe { self.group.comm.start(&collective.call(), Options::default()) };
        let waited = started.and_then(|work| {
            computation();
            work.wait(None)
        });
        self.group.abort_on_error(waited)
    }

    /// Starts `calls` calls, then waits for all.
    fn run_aggregated(&mut self, calls: usize) -> Result<()> {
        let Target::Collective(collective) = &self.target else {
            return (0..calls).try_for_each(|_| self.run());
        };
        let (comm, call) = (&self.group.comm, collective.call());
        // SAFETY: as for `BenchGroup::run`; this function waits for all works, or aborts the communicator.
        let all = (0..calls)
            .map(|_| unsafe { comm.start(&call, Options::default()) })
            .collect::<smddp_core::Result<Vec<_>>>();
        let waited = all.and_then(|works| works.iter().try_for_each(|work| work.wait(None)));
        self.group.abort_on_error(waited)
    }
}

/// The calls of one iteration.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Iteration {
    /// Calls that are started before the first wait.
    pub calls: usize,
    /// A barrier follows the calls.
    pub barrier: bool,
}

impl Default for Iteration {
    fn default() -> Iteration {
        Iteration { calls: 1, barrier: false }
    }
}

/// Element counts of an input or output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum BlockSizes {
    None,
    Flat(usize),
    Cut(Vec<usize>),
}

impl BlockSizes {
    pub(crate) fn elements(&self) -> usize {
        match self {
            BlockSizes::None => 0,
            BlockSizes::Flat(count) => *count,
            BlockSizes::Cut(counts) => counts.iter().sum(),
        }
    }

    fn blocks(&self, ptr: *mut u8) -> Blocks<'_> {
        match self {
            BlockSizes::None => Blocks::None,
            BlockSizes::Flat(count) => Blocks::Flat { ptr, count: *count },
            BlockSizes::Cut(counts) => Blocks::Cut { ptr, counts },
        }
    }
}

/// A collective with arbitrary sizes. In place, the input begins at the address of the output.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PlannedCall {
    pub collective: Collective,
    pub dtype: DType,
    pub redop: RedOp,
    pub root: usize,
    pub input: BlockSizes,
    pub output: BlockSizes,
    pub in_place: bool,
}

impl PlannedCall {
    /// Returns the bytes of the longer buffer.
    pub(crate) fn longest(&self) -> usize {
        self.input.elements().max(self.output.elements()) * self.dtype.size()
    }
}

/// Memory of an asynchronous call. The engine keeps a reference until the call is done.
#[derive(Clone)]
pub(crate) struct Memory {
    sides: Arc<[Mutex<Buffer>; 2]>,
    capacity: usize,
}

impl Memory {
    /// Allocates two buffers of `capacity` bytes.
    pub(crate) fn new(capacity: usize) -> Result<Memory> {
        let sides = [Mutex::new(Buffer::new(capacity)?), Mutex::new(Buffer::new(capacity)?)];
        Ok(Memory { sides: Arc::new(sides), capacity })
    }

    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    fn address(&self, side: usize) -> *mut u8 {
        lock(&self.sides[side]).bytes().as_mut_ptr()
    }
}

/// Starts `planned` in `memory`, which no other pending call uses. If `synchronous`, runs it to completion.
pub(crate) fn start(
    comm: &Communicator,
    planned: &PlannedCall,
    memory: &Memory,
    synchronous: bool,
) -> smddp_core::Result<Option<Work>> {
    assert!(planned.longest() <= memory.capacity, "{planned:?} in {} bytes", memory.capacity);
    let PlannedCall { collective, dtype, redop, root, ref input, ref output, in_place } = *planned;
    let input = input.blocks(memory.address(usize::from(in_place)));
    let call = Call { collective, dtype, redop, root, input, output: output.blocks(memory.address(1)) };
    let options = Options { keep: Some(Box::new(memory.clone())), ..Options::default() };
    // SAFETY: input and output are in `memory`, which is long enough (just checked). The engine keeps it until the call is
    // done. Only this function accesses the buffers, through `address`.
    unsafe {
        match synchronous {
            true => comm.run(&call, options).map(|()| None),
            false => comm.start(&call, options).map(Some),
        }
    }
}

fn side(dtype: DType, side: Option<(usize, usize)>, buffer: &mut Buffer) -> Option<RawBuffer> {
    side.map(|(first, count)| (buffer.bytes()[first..first + count * dtype.size()].as_mut_ptr(), count))
}
