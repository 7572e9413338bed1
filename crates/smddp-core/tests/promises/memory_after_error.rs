//! A call that has raised never accesses its caller's memory again, whatever ended it and whatever the peers still
//! send.

use std::cell::Cell;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use smddp_core::{
    Blocks, Call, Collective, Communicator, DType, Error, Options, RedOp, Result, set_interrupt,
};

use crate::common::job::Job;
use crate::common::{Gate, PROMPT_LIMIT, TIMEOUT, Wire, over, value};

/// Elements of a block, large enough for zero-copy transfers between nodes.
const COUNT: usize = 70_000;
/// The caller's value of every output element after the call has raised.
const SENTINEL: u32 = 0x5a5a_5a5a;

/// Event that ends a call.
#[derive(Clone, Copy, Debug, PartialEq)]
enum End {
    /// Another thread of the rank aborts the group.
    Abort,
    /// Another thread of the rank closes the group.
    Close,
    /// One rank never calls.
    Deadline,
    /// One rank makes another call.
    Mismatch,
    /// One rank dies after a few messages.
    Death,
}

const COLLECTIVES: [Collective; 5] = [
    Collective::AllGather,
    Collective::AllToAll,
    Collective::ReduceScatter,
    Collective::AllReduce,
    Collective::Broadcast,
];

thread_local! {
    /// Set while a signal is pending for this thread.
    static SIGNAL: Cell<bool> = const { Cell::new(false) };
    /// Runs once, at the next check for a signal.
    static HANDLER: Cell<Option<Box<dyn FnOnce()>>> = const { Cell::new(None) };
}

/// Checks for a signal as a host language does: its handlers run in the check.
fn check() -> bool {
    if let Some(handler) = HANDLER.take() {
        handler();
    }
    SIGNAL.get()
}

/// Buffers of one call with the value of every element.
struct Buffers {
    collective: Collective,
    dtype: DType,
    input: Vec<f32>,
    output: Vec<f32>,
    want: Vec<f32>,
}

impl Buffers {
    fn new(comm: &Communicator, collective: Collective) -> Self {
        let (me, n) = (comm.rank(), comm.size());
        let data = |rank: usize, count: usize| (0..count).map(|i| value(rank, i)).collect::<Vec<_>>();
        let sum = |i: usize| (0..n).map(|rank| value(rank, i)).sum::<f32>();
        let (input, want) = match collective {
            Collective::AllGather => (data(me, COUNT), (0..n).flat_map(|rank| data(rank, COUNT)).collect()),
            Collective::AllToAll => (
                data(me, n * COUNT),
                (0..n).flat_map(|rank| (0..COUNT).map(move |i| value(rank, me * COUNT + i))).collect(),
            ),
            Collective::ReduceScatter => {
                (data(me, n * COUNT), (0..COUNT).map(|i| sum(me * COUNT + i)).collect())
            }
            Collective::AllReduce => (data(me, COUNT), (0..COUNT).map(sum).collect()),
            // The root is the last rank, which the first one receives from.
            _ => (data(me, COUNT), data(n - 1, COUNT)),
        };
        let want: Vec<f32> = want;
        Self { collective, dtype: DType::F32, input, output: vec![f32::NAN; want.len()], want }
    }

    fn call(&mut self, size: usize) -> Call<'static> {
        let flat = |data: &mut Vec<f32>| Blocks::Flat { ptr: data.as_mut_ptr().cast(), count: data.len() };
        let root = size - 1;
        let input = flat(&mut self.input);
        let output = flat(&mut self.output);
        Call { collective: self.collective, dtype: self.dtype, redop: RedOp::Sum, root, input, output }
    }

    fn run(&mut self, comm: &Communicator, asynchronous: bool) -> Result<()> {
        let mut call = self.call(comm.size());
        if call.collective == Collective::Broadcast && comm.rank() != call.root {
            call.input = Blocks::None;
        }
        // SAFETY: the vectors outlive the call. A failed call must not access them any more, which this test checks.
        unsafe {
            match asynchronous {
                true => comm.start(&call, Options::default()).and_then(|work| work.wait(None)),
                false => comm.run(&call, Options::default()),
            }
        }
    }

    /// The caller writes to the memory of a call that has raised.
    fn reuse(&mut self) {
        self.output.fill(f32::from_bits(SENTINEL));
        self.input.fill(-1.0);
    }

    /// Elements that the library has changed since.
    fn changed(&self) -> usize {
        self.output.iter().filter(|value| value.to_bits() != SENTINEL).count()
    }

    fn is_correct(&self) -> bool {
        self.output.iter().zip(&self.want).all(|(got, want)| got.to_bits() == want.to_bits())
    }
}

/// Makes the call on three ranks and ends it; returns (calls that raised, elements written afterwards).
fn ended(wire: Wire, collective: Collective, end: End, asynchronous: bool, iteration: u64) -> (usize, usize) {
    let deadline = match end {
        End::Deadline => Duration::from_millis(40),
        _ => TIMEOUT,
    };
    let (raised_all, begun) = (Gate::new(3), Gate::new(2));
    let found = over(wire.links(3), TIMEOUT, |comm| {
        let me = comm.rank();
        // Between nodes an abort is announced to ranks that have exchanged something.
        if end != End::Death {
            Job::new(me, 3, Collective::AllToAll, 10, 0, 0).run(comm).unwrap();
        }
        comm.set_timeout(deadline);
        let mut buffers = Buffers::new(comm, collective);
        if end == End::Mismatch && me == 2 {
            buffers.dtype = DType::I32;
        }
        let outcome = std::thread::scope(|scope| {
            if me == 0 && matches!(end, End::Abort | End::Close) {
                let (comm, begun) = (comm.clone(), &begun);
                scope.spawn(move || {
                    begun.wait();
                    // Varies the moment of the abort.
                    std::thread::park_timeout(Duration::from_micros(300 * iteration));
                    match end {
                        End::Abort => comm.abort("enough"),
                        _ => comm.close(),
                    }
                });
            }
            if me == 0 && matches!(end, End::Abort | End::Close) {
                begun.wait();
            }
            if end == End::Deadline && me == 2 {
                return Err(Error::Interrupted);
            }
            buffers.run(comm, asynchronous)
        });
        let raised = outcome.is_err();
        if raised {
            buffers.reuse();
        }
        raised_all.wait();
        comm.close();
        (usize::from(raised), if raised { buffers.changed() } else { 0 })
    });
    found.into_iter().fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1))
}

#[test]
fn failed_call_does_not_access_its_memory() {
    let mut cells = 0;
    for wire in [Wire::Nodes(1), Wire::Encrypted(1), Wire::Shm, Wire::Efa(7)] {
        for end in [End::Abort, End::Close, End::Deadline, End::Mismatch] {
            for (at, collective) in COLLECTIVES.into_iter().enumerate() {
                // An abort ends the call at a different moment each time.
                let iterations = if matches!(end, End::Abort | End::Close) { 3 } else { 1 };
                let mut raised = 0;
                for iteration in 0..iterations {
                    let asynchronous = (at + iteration) % 2 == 1;
                    let (calls, written) = ended(wire, collective, end, asynchronous, iteration as u64);
                    raised += calls;
                    assert_eq!(
                        written, 0,
                        "{wire:?}, {end:?}, {collective:?}, iteration {iteration}: elements written after the error"
                    );
                }
                assert!(raised > 0 || iterations > 1, "{wire:?}, {end:?}, {collective:?}: no call raised");
                cells += 1;
            }
        }
    }
    for collective in COLLECTIVES {
        for at in [1, 5, 9] {
            let (_, written) = ended(Wire::Dying(2, at), collective, End::Death, false, 0);
            assert_eq!(written, 0, "{collective:?}: elements written after a death at message {at}");
            cells += 1;
        }
    }
    println!("{cells} cells");
}

/// Waits until `done` returns true, at most [`PROMPT_LIMIT`].
fn until(what: &str, done: impl Fn() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < PROMPT_LIMIT, "{what}");
        std::thread::yield_now();
    }
}

/// Interrupts rank 0 in a call before rank 2 makes it. Ranks 1 and 2 still get correct results, rank 0 may reuse its
/// buffers, and the group works afterwards.
fn interrupted(wire: Wire, collective: Collective, busy: bool) {
    let interrupted = OnceLock::new();
    let all_done = Gate::new(3);
    over(wire.links(3), TIMEOUT, |comm| {
        let mut buffers = Buffers::new(comm, collective);
        match comm.rank() {
            0 => std::thread::scope(|scope| {
                if busy {
                    // Another thread of this rank drives the group while the call is interrupted.
                    scope.spawn(|| {
                        let mut waiting = Buffers::new(comm, Collective::AllReduce);
                        waiting.run(comm, false).unwrap();
                        assert!(waiting.is_correct());
                    });
                    until("the first call is submitted", || comm.sequence() > 0);
                }
                SIGNAL.set(true);
                let outcome = buffers.run(comm, false);
                SIGNAL.set(false);
                assert_eq!(outcome, Err(Error::Interrupted), "{wire:?}, {collective:?}");
                buffers.reuse();
                interrupted.get_or_init(|| ());
            }),
            rank => {
                if rank == 2 {
                    until("rank 0 was interrupted", || interrupted.get().is_some());
                }
                if busy {
                    Buffers::new(comm, Collective::AllReduce).run(comm, false).unwrap();
                }
                buffers.run(comm, false).unwrap();
                assert!(buffers.is_correct(), "{wire:?}, {collective:?}: rank {rank}");
            }
        }
        all_done.wait();
        // This call follows the interrupted operation, so that operation is complete.
        let mut again = Buffers::new(comm, Collective::AllReduce);
        again.run(comm, false).unwrap();
        assert!(again.is_correct());
        if comm.rank() == 0 {
            assert_eq!(buffers.changed(), 0, "{wire:?}, {collective:?}: written after the interruption");
        }
    });
}

#[test]
fn interrupted_call_releases_its_memory_and_other_ranks_finish() {
    set_interrupt(check);
    for wire in [Wire::Nodes(1), Wire::Encrypted(1), Wire::Shm, Wire::Efa(7)] {
        for collective in COLLECTIVES {
            interrupted(wire, collective, false);
        }
        interrupted(wire, Collective::AllGather, true);
    }
}

/// A signal handler of rank 0 calls the group whose call it interrupts: a barrier without the other rank, then a
/// close.
#[test]
fn signal_handler_may_call_the_interrupted_group() {
    set_interrupt(check);
    for (wire, closes) in
        [Wire::Nodes(1), Wire::Shm].into_iter().flat_map(|wire| [(wire, true), (wire, false)])
    {
        let all_done = Gate::new(2);
        over(wire.links(2), TIMEOUT, |comm| {
            if comm.rank() == 0 {
                comm.set_timeout(Duration::from_millis(500));
                let nested = comm.clone();
                HANDLER.set(Some(Box::new(move || {
                    if closes {
                        return nested.shutdown_checked(TIMEOUT).unwrap();
                    }
                    let outcome = nested.barrier(Options::default());
                    assert!(matches!(outcome, Err(Error::Timeout { .. })), "{outcome:?}");
                })));
                let begun = Instant::now();
                let outcome = Buffers::new(comm, Collective::AllReduce).run(comm, false);
                assert!(HANDLER.take().is_none(), "{wire:?}: the handler has not run");
                assert!(begun.elapsed() < PROMPT_LIMIT, "{wire:?}: {:?}", begun.elapsed());
                match outcome {
                    Err(Error::Closed { .. }) => assert!(closes),
                    Err(Error::Timeout { .. }) => assert!(!closes),
                    other => panic!("{wire:?}: {other:?}"),
                }
            }
            all_done.wait();
        });
    }
}

/// The input of the interrupted call is the output of a pending call, so a copy of it would be stale.
#[test]
fn interrupted_call_with_a_pending_input_ends_the_group() {
    set_interrupt(check);
    for wire in [Wire::Nodes(1), Wire::Shm] {
        let interrupted = Gate::new(2);
        over(wire.links(2), TIMEOUT, |comm| {
            let mut buffers = Buffers::new(comm, Collective::AllReduce);
            let mut second = Buffers::new(comm, Collective::AllReduce);
            let mut call = second.call(2);
            call.input = buffers.call(2).output;
            if comm.rank() == 0 {
                let first = buffers.call(2);
                // SAFETY: the vectors outlive both calls.
                let work = unsafe { comm.start(&first, Options::default()) }.unwrap();
                SIGNAL.set(true);
                // SAFETY: as above.
                let outcome = unsafe { comm.run(&call, Options::default()) };
                SIGNAL.set(false);
                assert_eq!(outcome, Err(Error::Interrupted));
                assert!(work.wait(None).is_err());
                interrupted.wait();
            } else {
                interrupted.wait();
                let outcome = buffers.run(comm, false).and_then(|()| {
                    // SAFETY: as above.
                    unsafe { comm.run(&call, Options::default()) }
                });
                assert!(matches!(outcome, Err(Error::Closed { .. })), "{wire:?}: {outcome:?}");
            }
        });
    }
}
