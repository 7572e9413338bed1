//! Overlapping input and output: the results equal those of separate buffers, for every collective, form, size and
//! wire.

use std::collections::BTreeSet;
use std::sync::Mutex;

use smddp_core::{Blocks, Call, Collective, Communicator, DType, Error, Options, RedOp, SymmetricBuffer};

use crate::common::group::world;
use crate::common::procs::{RankProcess, start};
use crate::common::{TIMEOUT, Wire, over};

/// Layout of the side that has one block for each rank.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Many {
    Flat,
    /// Blocks of different sizes where the collective allows it.
    Cut,
    /// The same as a list, in reverse order and with gaps.
    List,
    /// Inputs that are all the same block.
    Same,
}

/// Position of the other side relative to the side with many blocks.
#[derive(Clone, Copy, Debug, PartialEq)]
enum At {
    Apart,
    /// This rank's own block; the whole buffer where there is only one block, and in all_to_all.
    Own,
    /// The block of another rank. all_to_all: every block in the place of the next one.
    Other,
    /// Half a block after the first one, before it, and at the end.
    Middle,
    Before,
    After,
}

const EACH_AT: [At; 6] = [At::Apart, At::Own, At::Other, At::Middle, At::Before, At::After];

#[derive(Clone, Copy, Debug)]
struct Cell {
    collective: Collective,
    many: Many,
    at: At,
    /// Elements of a block.
    count: usize,
    redop: RedOp,
    root: usize,
    asynchronous: bool,
    /// Only ranks with an odd number have the overlap.
    odd_only: bool,
}

/// Position and elements.
type Span = (usize, usize);

const GAP: usize = 5;

impl Cell {
    fn all(counts: &[usize], n: usize) -> Vec<Self> {
        let mut cells = Vec::new();
        for collective in Collective::ALL {
            let forms: &[Many] = match collective {
                Collective::Barrier => &[],
                Collective::AllReduce | Collective::Broadcast | Collective::Reduce => &[Many::Flat],
                Collective::AllGather | Collective::Gather => &[Many::Flat, Many::Cut, Many::List],
                _ => &[Many::Flat, Many::Cut, Many::List, Many::Same],
            };
            for &many in forms {
                for (&count, at) in counts.iter().flat_map(|count| EACH_AT.map(|at| (count, at))) {
                    let number = cells.len();
                    let redop = match number % 3 {
                        _ if !collective.reduces() => RedOp::Sum,
                        0 => RedOp::Sum,
                        1 => RedOp::Avg,
                        _ => RedOp::PremulSum(2.0),
                    };
                    let (root, asynchronous, odd_only) = (number % n, number % 2 == 1, number % 5 == 4);
                    cells.push(Cell { collective, many, at, count, redop, root, asynchronous, odd_only });
                }
            }
        }
        cells
    }

    fn at_root(&self, rank: usize) -> bool {
        !self.collective.has_root() || self.root == rank
    }

    /// Elements that `from` gives to `to`.
    fn length(&self, from: usize, to: usize) -> usize {
        let uneven = matches!(self.many, Many::Cut | Many::List);
        match self.collective {
            Collective::AllGather if uneven => self.count + from,
            Collective::ReduceScatter if uneven => self.count + to,
            Collective::AllToAll if uneven => self.count + (from + 2 * to) % 3,
            _ => self.count,
        }
    }

    /// Input and output blocks of a rank in its arena.
    fn spans(&self, rank: usize, n: usize) -> (Vec<Span>, Vec<Span>) {
        let stride = self.count + n + 3 + GAP;
        let base = stride;
        let apart = base + (n + 2) * stride;
        let at = if self.odd_only && rank.is_multiple_of(2) { At::Apart } else { self.at };
        // Contiguous, or as a list.
        let place = |lengths: Vec<usize>| -> Vec<Span> {
            let mut next = base;
            let position = |(block, length): (usize, usize)| {
                let here = match self.many {
                    Many::Flat | Many::Cut => next,
                    Many::List => base + (n - 1 - block) * stride,
                    Many::Same => base,
                };
                next += length;
                (here, length)
            };
            lengths.into_iter().enumerate().map(position).collect()
        };
        let one = |many: &[Span], index: usize, length: usize| -> Vec<Span> {
            let last = many.iter().map(|span| span.0).max().unwrap();
            let first = many.iter().map(|span| span.0).min().unwrap();
            let position = match at {
                At::Apart => apart,
                At::Own => many[index].0,
                At::Other => many[(index + 1) % many.len()].0,
                At::Middle => first + length / 2 + 1,
                At::Before => first - length / 2,
                At::After => last + length / 2,
            };
            vec![(position, length)]
        };
        let sent = || (0..n).map(|to| self.length(rank, to)).collect();
        let received = || (0..n).map(|from| self.length(from, rank)).collect();
        match self.collective {
            Collective::AllReduce | Collective::Broadcast | Collective::Reduce => {
                let input = vec![(base, self.count)];
                let output = one(&input, 0, self.count);
                (input, output)
            }
            Collective::AllGather | Collective::Gather => {
                let output = place(received());
                (one(&output, rank, self.length(rank, rank)), output)
            }
            Collective::ReduceScatter | Collective::Scatter => {
                let input = place(sent());
                let output = one(&input, rank, self.length(rank, rank));
                (input, output)
            }
            _ => {
                let input = place(sent());
                let lengths: Vec<usize> = received();
                if matches!(self.many, Many::List) {
                    let block = |i: usize| match at {
                        At::Own => input[i].0,
                        At::Other => input[(i + 1) % n].0,
                        At::Middle => input[i].0 + self.count / 2,
                        At::Before => input[i].0 - self.count / 2,
                        At::After if i == 0 => input[n - 1].0,
                        At::Apart | At::After => apart + i * stride,
                    };
                    return (input.clone(), (0..n).map(|i| (block(i), lengths[i])).collect());
                }
                let mut next = match at {
                    At::Apart => apart,
                    At::Own => base,
                    At::Other => base + self.count,
                    At::Middle => base + self.count / 2,
                    At::Before => base - self.count / 2,
                    At::After => base + (n - 1) * self.count + 1,
                };
                let position = |length: usize| {
                    next += length;
                    (next - length, length)
                };
                (input, lengths.into_iter().map(position).collect())
            }
        }
    }

    /// Values of `from` for its block number `block`: small integers, exact in every sum and in bfloat16.
    fn given<'a>(&self, numbers: &'a [f32], from: usize, block: usize, length: usize) -> &'a [f32] {
        let block = if self.many == Many::Same { 0 } else { block };
        &numbers[8 * from + block..][..length]
    }

    /// Contents of output block `block` on `rank`.
    fn want(&self, numbers: &[f32], (rank, n): (usize, usize), block: usize, length: usize) -> Vec<f32> {
        let whole = matches!(self.collective, Collective::AllReduce | Collective::Reduce);
        match self.collective {
            Collective::AllGather | Collective::Gather => self.given(numbers, block, 0, length).to_vec(),
            Collective::Broadcast => self.given(numbers, self.root, 0, length).to_vec(),
            Collective::Scatter => self.given(numbers, self.root, rank, length).to_vec(),
            Collective::AllToAll => self.given(numbers, block, rank, length).to_vec(),
            _ => {
                let mut sums = vec![0f32; length];
                for from in 0..n {
                    let given = self.given(numbers, from, if whole { 0 } else { rank }, length);
                    sums.iter_mut().zip(given).for_each(|(sum, x)| *sum += x);
                }
                match self.redop {
                    RedOp::Avg => sums.iter_mut().for_each(|sum| *sum /= n as f32),
                    RedOp::PremulSum(factor) => sums.iter_mut().for_each(|sum| *sum *= factor as f32),
                    _ => {}
                }
                sums
            }
        }
    }

    /// Makes the call. Returns true if the result is correct and no other element has changed.
    fn run(&self, comm: &Communicator, arena: &mut [f32], numbers: &[f32]) -> bool {
        let (rank, n) = (comm.rank(), comm.size());
        let (inputs, outputs) = self.spans(rank, n);
        let end = inputs.iter().chain(&outputs).map(|span| span.0 + span.1).max().unwrap();
        let arena = &mut arena[..end];
        arena.fill(-1.0);
        let single = matches!(self.collective, Collective::AllGather | Collective::Gather);
        let reads =
            self.at_root(rank) || !matches!(self.collective, Collective::Broadcast | Collective::Scatter);
        let writes =
            self.at_root(rank) || !matches!(self.collective, Collective::Gather | Collective::Reduce);
        for (block, &(at, length)) in inputs.iter().enumerate().filter(|_| reads) {
            let block = if single { 0 } else { block };
            arena[at..at + length].copy_from_slice(self.given(numbers, rank, block, length));
        }
        let mut want = arena.to_vec();
        for (block, &(at, length)) in outputs.iter().enumerate().filter(|_| writes) {
            want[at..at + length].copy_from_slice(&self.want(numbers, (rank, n), block, length));
        }
        let first = arena.as_mut_ptr();
        let parts = |spans: &[Span]| -> Vec<(*mut u8, usize)> {
            spans.iter().map(|&(at, length)| (first.wrapping_add(at).cast(), length)).collect()
        };
        let counts = |spans: &[Span]| -> Vec<usize> { spans.iter().map(|span| span.1).collect() };
        let lists = [parts(&inputs), parts(&outputs)];
        let lengths = [counts(&inputs), counts(&outputs)];
        let side = |index: usize, there: bool, is_one: bool| match self.many {
            _ if !there => Blocks::None,
            Many::Cut if !is_one => Blocks::Cut { ptr: lists[index][0].0, counts: &lengths[index] },
            // Only inputs are the same block; the outputs are contiguous.
            Many::List if !is_one => Blocks::List { parts: &lists[index] },
            Many::Same if !is_one && index == 0 => Blocks::List { parts: &lists[index] },
            _ => Blocks::Flat { ptr: lists[index][0].0, count: lengths[index].iter().sum() },
        };
        let is_one = |blocks: &[Span]| blocks.len() == 1;
        let input = side(0, reads, is_one(&inputs));
        let output = side(1, writes, is_one(&outputs));
        let Self { collective, redop, root, .. } = *self;
        let call = Call { collective, dtype: DType::F32, redop, root, input, output };
        // SAFETY: the arena outlives the call, which is awaited.
        let outcome = unsafe {
            match self.asynchronous {
                true => comm.start(&call, Options::default()).and_then(|work| work.wait(None)),
                false => comm.run(&call, Options::default()),
            }
        };
        outcome.unwrap();
        arena == want
    }
}

/// Elements of a block: an inline message, several slots, 264 KB that move zero-copy between nodes, and more than a
/// MiB.
const COUNTS: [usize; 4] = [3, 16_384, 66_001, 270_011];
const SHORT_AND_LONG: [usize; 2] = [COUNTS[0], COUNTS[2]];

/// Runs all cells of a rank. Returns their number and the descriptions of the wrong ones.
fn run_all(comm: &Communicator, counts: &[usize], symmetric: bool) -> (usize, Vec<String>) {
    let n = comm.size();
    let most = counts.iter().max().unwrap();
    let numbers: Vec<f32> = (0..most + 64).map(|i| (i * 7 % 31) as f32).collect();
    let floats = (2 * n + 5) * (most + n + 3 + GAP);
    let mut plain = vec![0f32; if symmetric { 0 } else { floats }];
    let mut shared = symmetric.then(|| SymmetricBuffer::new(256 << 20, 4 * floats).unwrap());
    let arena = match &mut shared {
        // SAFETY: page-aligned memory of that many floats, valid for every bit pattern; only this function uses it.
        Some(shared) => unsafe { std::slice::from_raw_parts_mut(shared.as_mut_ptr().cast(), floats) },
        None => &mut plain[..],
    };
    let cells = Cell::all(counts, n);
    let wrong = cells.iter().filter(|cell| !cell.run(comm, arena, &numbers));
    (cells.len(), wrong.map(|cell| format!("{cell:?}")).collect())
}

/// Runs ranks as threads over each wire.
fn over_wires(wires: &[(Wire, usize, &[usize], bool)]) -> (usize, Vec<String>) {
    let (mut made, mut wrong) = (0, Vec::new());
    for &(wire, n, counts, symmetric) in wires {
        let found = Mutex::new(BTreeSet::new());
        let cells = over(wire.links(n), TIMEOUT, |comm| {
            let (cells, wrong) = run_all(comm, counts, symmetric);
            found.lock().unwrap().extend(wrong);
            cells
        });
        made += cells[0];
        let found = found.into_inner().unwrap();
        println!("{wire:?}, {n} ranks, symmetric={symmetric}: {} of {} cells wrong", found.len(), cells[0]);
        wrong.extend(found.into_iter().map(|cell| format!("{wire:?}, {n} ranks: {cell}")));
    }
    (made, wrong)
}

fn assert_all_correct((made, wrong): (usize, Vec<String>)) {
    let listed = wrong.iter().take(40).cloned().collect::<Vec<_>>().join("\n");
    assert!(wrong.is_empty(), "{} of {made} cells wrong:\n{listed}", wrong.len());
}

#[test]
fn overlapping_input_and_output_give_the_results_of_separate_buffers() {
    assert_all_correct(over_wires(&[
        (Wire::Shm, 1, &SHORT_AND_LONG, false),
        (Wire::Shm, 3, &COUNTS[..3], false),
        (Wire::Shm, 3, &SHORT_AND_LONG, true),
        (Wire::Nodes(1), 2, &COUNTS, false),
        (Wire::Nodes(2), 4, &SHORT_AND_LONG, false),
        (Wire::Nodes(2), 3, &SHORT_AND_LONG, true),
        (Wire::Encrypted(1), 2, &SHORT_AND_LONG, false),
        (Wire::Efa(7), 2, &SHORT_AND_LONG, false),
    ]));
}

/// A process with its own settings: ranks as threads between nodes, or as processes on one node.
pub(crate) fn rank(me: &RankProcess) {
    let (made, wrong) = if me.size == 1 {
        over_wires(&[
            (Wire::Nodes(1), 2, &SHORT_AND_LONG, false),
            (Wire::Nodes(2), 4, &SHORT_AND_LONG, false),
        ])
    } else {
        let comm = world(me, TIMEOUT);
        let found = run_all(&comm, &[3, 140_003], false);
        comm.close();
        found
    };
    println!("{} of {made} cells wrong", wrong.len());
    assert_all_correct((made, wrong));
    me.report("correct");
}

#[test]
fn overlapping_buffers_are_correct_with_every_transfer_setting() {
    for (size, name, value) in [
        (2, "SMDDP_SINGLE_COPY", "1"),
        (3, "SMDDP_SINGLE_COPY", "1"),
        (1, "SMDDP_WIRE_FORMAT", "bf16"),
        (1, "SMDDP_CANONICAL_ORDER", "1"),
    ] {
        let mut ranks = start("overlap", size, &[(name, value)], 4 * TIMEOUT);
        (0..size).for_each(|rank| drop(ranks.wait_for(rank, "correct")));
        ranks.finish(0..size);
    }
}

/// Calls of one group run in order, so the input must be copied only after the call that writes it has completed.
#[test]
fn overlapping_call_reads_the_results_of_earlier_calls() {
    for wire in [Wire::Shm, Wire::Nodes(1)] {
        over(wire.links(2), TIMEOUT, |comm| {
            for count in [4, 200_000] {
                let mut data = vec![1f32; count];
                let place = Blocks::Flat { ptr: data.as_mut_ptr().cast(), count };
                let call = |collective, redop| Call {
                    collective,
                    dtype: DType::F32,
                    redop,
                    root: 0,
                    input: place,
                    output: place,
                };
                let calls = [
                    call(Collective::AllReduce, RedOp::Sum),
                    call(Collective::AllToAll, RedOp::Sum),
                    call(Collective::AllReduce, RedOp::PremulSum(5.0)),
                ];
                // SAFETY: the data outlives the calls, which are awaited.
                let works = calls.map(|call| unsafe { comm.start(&call, Options::default()) }.unwrap());
                works.iter().for_each(|work| work.wait(None).unwrap());
                assert!(data.iter().all(|&x| x == 20.0), "{wire:?}, {count}: {}", data[0]);
            }
        });
    }
}

#[test]
fn overlapping_outputs_are_rejected_with_both_entries() {
    over(Wire::Shm.links(2), TIMEOUT, |comm| {
        let (mut input, mut output) = (vec![1f32; 20], vec![0f32; 25]);
        let at = |index: usize| (output.as_ptr().wrapping_add(index) as *mut u8, 10);
        let flat = |count| Blocks::Flat { ptr: input.as_ptr() as *mut u8, count };
        for collective in [Collective::AllGather, Collective::AllToAll, Collective::Gather] {
            let input = flat(if collective == Collective::AllToAll { 20 } else { 10 });
            let make = |parts: &[(*mut u8, usize)]| {
                let output = match collective {
                    Collective::Gather if comm.rank() > 0 => Blocks::None,
                    _ => Blocks::List { parts },
                };
                let call = Call { collective, dtype: DType::F32, redop: RedOp::Sum, root: 0, input, output };
                // SAFETY: both buffers outlive the call.
                unsafe { comm.run(&call, Options::default()) }
            };
            for parts in [[at(0), at(0)], [at(9), at(0)]] {
                if collective != Collective::Gather || comm.rank() == 0 {
                    let error = make(&parts).unwrap_err();
                    assert!(matches!(error, Error::Invalid(_)), "{error:?}");
                    assert!(error.to_string().contains("entries 0 and 1"), "{error}");
                }
            }
            // Adjacent outputs do not overlap, and the group remains usable.
            make(&[at(10), at(0)]).unwrap();
        }
        input.fill(0.0);
        assert!(comm.rank() > 0 || output[..20].iter().all(|&x| x == 1.0));
        output.clear();
    });
}
