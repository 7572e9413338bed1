//! Calls of the engine on borrowed memory: the only place that hands it pointers.

mod exchange;
mod stream;

use std::marker::PhantomData;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use smddp_core::{Blocks, Call, Collective, Communicator, DType, Options, RedOp, Work};

use crate::buffers::Buffer;
use crate::error::Result;
use crate::op::{Op, uneven};

pub(crate) use stream::Stream;

/// Address and elements.
type Side = (*mut u8, usize);

/// Ranks that make calls together, and what a benchmark needs of them.
pub(crate) struct Team {
    comm: Communicator,
}

/// Where the two sides of a call lie, as (first byte, elements). `None`: this rank has no such side.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sides {
    pub input: Option<(usize, usize)>,
    pub output: Option<(usize, usize)>,
}

/// What is called.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Case {
    pub op: Op,
    pub dtype: DType,
    pub redop: RedOp,
    pub root: usize,
}

/// One collective of the engine.
struct Asked {
    call: Call<'static>,
    /// Both sides lie in blocks of these counts, if they are not all the same.
    cut: Option<Vec<usize>>,
}

impl Asked {
    fn call(&self) -> Call<'_> {
        let blocks = |side| match (side, &self.cut) {
            (Blocks::Flat { ptr, .. }, Some(counts)) => Blocks::Cut { ptr, counts },
            (side, _) => side,
        };
        Call { input: blocks(self.call.input), output: blocks(self.call.output), ..self.call }
    }
}

enum Target {
    Collective(Asked),
    Neighbours { input: Side, output: Side, dtype: DType },
    Hypercube { own: Side, all: Side, dtype: DType },
}

/// A call bound to buffers, which stay borrowed for as long as it can be run.
pub(crate) struct Bound<'a> {
    team: &'a Team,
    target: Target,
    buffers: PhantomData<&'a mut Buffer>,
}

impl Team {
    pub(crate) fn new(comm: Communicator) -> Team {
        Team { comm }
    }

    /// The ranks of one color, in the order of their ranks here; all ranks ask for theirs.
    pub(crate) fn part(&self, color: i64) -> Result<Team> {
        // A rank that has a color is in a group.
        Ok(Team { comm: self.comm.split(Some(color), 0)?.unwrap_or_else(|| self.comm.clone()) })
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
        sides: Sides,
        input: &'a mut Buffer,
        output: &'a mut Buffer,
    ) -> Bound<'a> {
        let from = side(case.dtype, sides.input, input);
        let to = side(case.dtype, sides.output, output);
        self.bound(case, from, to)
    }

    /// Binds `case` to one buffer that holds both sides.
    pub(crate) fn bind_in_place<'a>(&'a self, case: Case, sides: Sides, both: &'a mut Buffer) -> Bound<'a> {
        let from = side(case.dtype, sides.input, both);
        let to = side(case.dtype, sides.output, both);
        self.bound(case, from, to)
    }

    fn bound(&self, case: Case, from: Option<Side>, to: Option<Side>) -> Bound<'_> {
        let blocks = |side| match side {
            Some((ptr, count)) => Blocks::Flat { ptr, count },
            None => Blocks::None,
        };
        let (dtype, nowhere) = (case.dtype, (std::ptr::NonNull::dangling().as_ptr(), 0));
        let (one, other) = (from.unwrap_or(nowhere), to.unwrap_or(nowhere));
        let collective = |collective, cut| {
            let (input, output) = (blocks(from), blocks(to));
            let call = Call { collective, dtype, redop: case.redop, root: case.root, input, output };
            Target::Collective(Asked { call, cut })
        };
        let target = match (case.op, case.op.collective()) {
            (_, Some(plain)) => collective(plain, None),
            (Op::AllToAllV, _) => {
                collective(Collective::AllToAll, Some(uneven(one.1, self.size(), self.rank())))
            }
            (Op::Hypercube, _) => Target::Hypercube { own: one, all: other, dtype },
            _ => Target::Neighbours { input: one, output: other, dtype },
        };
        Bound { team: self, target, buffers: PhantomData }
    }

    pub(crate) fn barrier(&self) -> Result<()> {
        Ok(self.comm.barrier(Options::default())?)
    }

    /// The sum (or minimum, maximum) of every rank's `value`.
    pub(crate) fn reduce_f64(&self, value: f64, redop: RedOp) -> Result<f64> {
        let mut bytes = value.to_ne_bytes();
        self.reduce_one(&mut bytes, DType::F64, redop)?;
        Ok(f64::from_ne_bytes(bytes))
    }

    /// The ranks' times as one, as nccl-tests' `-a` says.
    pub(crate) fn average(&self, seconds: f64, how: u8) -> Result<f64> {
        match how {
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

    /// Every rank's `mine`, all of the same length, in rank order.
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

    /// The blocks of `call` point into memory that the caller borrows mutably.
    fn run(&self, call: &Call<'_>) -> Result<()> {
        // SAFETY: all callers are in this module and pass pointers into memory that they hold borrowed, of the
        // lengths given, until this returns. When it fails, `given_up` aborts the communicator, after which
        // nobody touches that memory.
        let done = unsafe { self.comm.run(call, smddp_core::Options::default()) };
        self.given_up(done)
    }

    /// After a failed call the engine may still own the buffers: an abort gives them back.
    fn given_up<T>(&self, done: smddp_core::Result<T>) -> Result<T> {
        done.map_err(|error| {
            self.comm.abort(&error.to_string());
            error.into()
        })
    }
}

impl Bound<'_> {
    pub(crate) fn run(&mut self) -> Result<()> {
        match &self.target {
            Target::Collective(asked) => self.team.run(&asked.call()),
            Target::Neighbours { input, output, dtype } => self.team.neighbours(*input, *output, *dtype),
            Target::Hypercube { own, all, dtype } => self.team.hypercube(*own, *all, *dtype),
        }
    }

    /// The time of `iters` calls in a row, this rank's own.
    pub(crate) fn time(&mut self, iters: usize) -> Result<Duration> {
        self.iterate(iters, Pace::default(), None)
    }

    /// The same of iterations at a pace; `each` gets the seconds of one after the other.
    pub(crate) fn iterate(
        &mut self,
        iters: usize,
        pace: Pace,
        mut each: Option<&mut Vec<f64>>,
    ) -> Result<Duration> {
        let begun = Instant::now();
        let mut before = begun;
        for _ in 0..iters {
            if pace.calls > 1 {
                self.run_together(pace.calls)?
            } else {
                self.run()?
            }
            if pace.barrier {
                self.team.barrier()?;
            }
            if let Some(each) = &mut each {
                let now = Instant::now();
                each.push((now - before).as_secs_f64());
                before = now;
            }
        }
        Ok(begun.elapsed())
    }

    /// Starts it, does something else, and waits for it.
    pub(crate) fn beside(&mut self, something: &mut dyn FnMut()) -> Result<()> {
        let Target::Collective(asked) = &self.target else {
            something();
            return self.run();
        };
        // SAFETY: as for `Team::run`; the work is waited for before this returns, or the communicator is aborted.
        let started = unsafe { self.team.comm.start(&asked.call(), Options::default()) };
        let waited = started.and_then(|work| {
            something();
            work.wait(None)
        });
        self.team.given_up(waited)
    }

    /// Starts `calls` of them, then waits for all.
    fn run_together(&mut self, calls: usize) -> Result<()> {
        let Target::Collective(asked) = &self.target else {
            return (0..calls).try_for_each(|_| self.run());
        };
        let (comm, call) = (&self.team.comm, asked.call());
        // SAFETY: as for `Team::run`; all works are waited for before this returns, or the communicator is aborted.
        let all = (0..calls)
            .map(|_| unsafe { comm.start(&call, Options::default()) })
            .collect::<smddp_core::Result<Vec<_>>>();
        let waited = all.and_then(|works| works.iter().try_for_each(|work| work.wait(None)));
        self.team.given_up(waited)
    }
}

/// What one iteration is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    /// Calls that are started together and then waited for.
    pub calls: usize,
    /// A barrier after them.
    pub barrier: bool,
}

impl Default for Pace {
    fn default() -> Pace {
        Pace { calls: 1, barrier: false }
    }
}

/// One side of a call, by its elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    None,
    Flat(usize),
    Cut(Vec<usize>),
}

impl Part {
    pub(crate) fn elements(&self) -> usize {
        match self {
            Part::None => 0,
            Part::Flat(count) => *count,
            Part::Cut(counts) => counts.iter().sum(),
        }
    }

    fn blocks(&self, ptr: *mut u8) -> Blocks<'_> {
        match self {
            Part::None => Blocks::None,
            Part::Flat(count) => Blocks::Flat { ptr, count: *count },
            Part::Cut(counts) => Blocks::Cut { ptr, counts },
        }
    }
}

/// A collective of any sizes. In place: its input is the beginning of its output's memory.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Planned {
    pub collective: Collective,
    pub dtype: DType,
    pub redop: RedOp,
    pub root: usize,
    pub input: Part,
    pub output: Part,
    pub in_place: bool,
}

impl Planned {
    /// Bytes of the longer side.
    pub(crate) fn longest(&self) -> usize {
        self.input.elements().max(self.output.elements()) * self.dtype.size()
    }
}

/// Memory of a call that may go on by itself: its owners hold it, and so does the engine until the call is over.
#[derive(Clone)]
pub(crate) struct Memory {
    sides: Arc<[Mutex<Buffer>; 2]>,
    capacity: usize,
}

impl Memory {
    /// For sides of up to `capacity` bytes.
    pub(crate) fn new(capacity: usize) -> Result<Memory> {
        let sides = [Mutex::new(Buffer::new(capacity)?), Mutex::new(Buffer::new(capacity)?)];
        Ok(Memory { sides: Arc::new(sides), capacity })
    }

    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    fn address(&self, side: usize) -> *mut u8 {
        self.sides[side].lock().unwrap_or_else(PoisonError::into_inner).bytes().as_mut_ptr()
    }
}

/// Makes `planned` in `memory`, in which no other call is under way. `alone`: drives it to its end.
pub(crate) fn make(
    comm: &Communicator,
    planned: &Planned,
    memory: &Memory,
    alone: bool,
) -> smddp_core::Result<Option<Work>> {
    assert!(planned.longest() <= memory.capacity, "{planned:?} in {} bytes", memory.capacity);
    let Planned { collective, dtype, redop, root, ref input, ref output, in_place } = *planned;
    let input = input.blocks(memory.address(usize::from(in_place)));
    let call = Call { collective, dtype, redop, root, input, output: output.blocks(memory.address(1)) };
    let options = Options { keep: Some(Box::new(memory.clone())), ..Options::default() };
    // SAFETY: both sides lie in `memory`, which is long enough (just checked), which the engine holds until the call is over
    // and which nobody else reads or writes: its buffers are lent by `address` alone.
    unsafe {
        match alone {
            true => comm.run(&call, options).map(|()| None),
            false => comm.start(&call, options).map(Some),
        }
    }
}

fn side(dtype: DType, side: Option<(usize, usize)>, buffer: &mut Buffer) -> Option<Side> {
    side.map(|(first, count)| (buffer.bytes()[first..first + count * dtype.size()].as_mut_ptr(), count))
}
