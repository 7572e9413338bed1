//! Memory that the ranks of a node read where it lies: the same results as from any other, and it is the caller's again when the
//! call is over.

use smddp_core::{Blocks, Call, Collective, Communicator, DType, Options, RedOp, SymmetricBuffer};

use crate::common::{ALL, PATIENCE, Wire, over, shape, value};

const CAP: usize = 64 << 20;

/// `count` floats of it, from its `skip`-th on.
struct Floats {
    buffer: SymmetricBuffer,
    skip: usize,
    count: usize,
}

impl Floats {
    fn new(count: usize, skip: usize) -> Self {
        Self { buffer: SymmetricBuffer::new(CAP, 4 * (count + skip)).unwrap(), skip, count }
    }

    fn all(&mut self) -> &mut [f32] {
        let first = self.buffer.as_mut_ptr().cast::<f32>().wrapping_add(self.skip);
        // SAFETY: page-aligned memory of that many floats, of which every bit pattern is one; no call is under way on it.
        unsafe { std::slice::from_raw_parts_mut(first, self.count) }
    }

    fn blocks(&mut self, first: usize, count: usize) -> Blocks<'static> {
        Blocks::Flat { ptr: self.all()[first..first + count].as_mut_ptr().cast(), count }
    }
}

fn make(comm: &Communicator, collective: Collective, root: usize, input: Blocks<'_>, output: Blocks<'_>) {
    let call = Call { collective, dtype: DType::F32, redop: RedOp::Sum, root, input, output };
    // SAFETY: the callers' buffers outlive the call, which is synchronous.
    unsafe { comm.run(&call, Options::default()) }.unwrap();
}

/// The collective from and into such memory and from and into any other, again and again; what was given is overwritten as soon
/// as the call is over.
fn compare(comm: &Communicator, collective: Collective, count: usize, skip: usize) {
    let (me, n) = (comm.rank(), comm.size());
    let root = n - 1;
    let (given, taken) = shape(collective, me == root, n, count);
    let mut input = Floats::new(given.unwrap_or(0), skip);
    let mut output = Floats::new(taken.unwrap_or(0), 0);
    for turn in 0..4 {
        let mut plain: Vec<f32> = (0..given.unwrap_or(0)).map(|i| value(me + turn, i)).collect();
        let mut want = vec![f32::NAN; taken.unwrap_or(0)];
        let flat = |data: &mut [f32], there: Option<usize>| match there {
            Some(_) => Blocks::Flat { ptr: data.as_mut_ptr().cast(), count: data.len() },
            None => Blocks::None,
        };
        make(comm, collective, root, flat(&mut plain, given), flat(&mut want, taken));

        input.all().copy_from_slice(&plain);
        output.all().fill(f32::NAN);
        let from = flat(input.all(), given);
        make(comm, collective, root, from, flat(output.all(), taken));
        input.all().fill(-1.0);
        let what = format!("{collective:?} of {count} on rank {me} of {n}, turn {turn}");
        assert!(output.all() == want, "{what}");

        // In place, where that is a call.
        let own = match collective {
            Collective::AllReduce => Some((0, count)),
            Collective::AllGather => Some((me * count, count)),
            _ => None,
        };
        if let Some((first, length)) = own {
            output.all()[first..first + length].copy_from_slice(&plain);
            let (from, to) = (output.blocks(first, length), output.blocks(0, want.len()));
            make(comm, collective, root, from, to);
            assert!(output.all() == want, "{what}, in place");
            output.all().fill(-2.0);
        }
    }
}

#[test]
fn every_collective_reads_it_where_it_lies_and_gives_it_back() {
    for (n, wire) in [
        (2, Wire::Shm),
        (3, Wire::Shm),
        (4, Wire::Far),
        (4, Wire::Nodes(2)),
        (5, Wire::Nodes(3)),
        (3, Wire::Srd(7)),
    ] {
        over(wire.links(n), PATIENCE, |comm| {
            for collective in ALL {
                for (count, skip) in [(1, 0), (9_000, 0), (9_000, 2), (9_001, 1), (150_000, 0)] {
                    compare(comm, collective, count, skip);
                }
            }
        });
    }
}

/// Large enough, and where words may lie: then no message was copied into a cell.
#[test]
fn messages_that_stay_are_counted() {
    // The process keeps its memory, and the count, as long as somebody has some.
    let _held = SymmetricBuffer::new(CAP, 1).unwrap();
    let before = SymmetricBuffer::usage().messages;
    over(Wire::Shm.links(2), PATIENCE, |comm| {
        let (mut input, mut output) = (Floats::new(50_000, 0), Floats::new(100_000, 0));
        make(comm, Collective::AllGather, 0, input.blocks(0, 50_000), output.blocks(0, 100_000));
    });
    assert!(SymmetricBuffer::usage().messages > before);
}
