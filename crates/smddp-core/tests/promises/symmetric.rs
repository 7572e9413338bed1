//! Symmetric memory, which the ranks of a node read directly: the results equal those of other memory. The caller
//! owns the memory again after the call.

use smddp_core::{Blocks, Call, Collective, Communicator, DType, Options, RedOp, SymmetricBuffer};

use crate::common::{ALL, TIMEOUT, Wire, over, shape, value};

const CAP: usize = 64 << 20;

/// `count` floats of a symmetric buffer, starting at element `skip`.
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
        // SAFETY: page-aligned memory of that many floats, valid for every bit pattern; no call on it is pending.
        unsafe { std::slice::from_raw_parts_mut(first, self.count) }
    }

    fn blocks(&mut self, first: usize, count: usize) -> Blocks<'static> {
        Blocks::Flat { ptr: self.all()[first..first + count].as_mut_ptr().cast(), count }
    }
}

fn make(comm: &Communicator, collective: Collective, root: usize, input: Blocks<'_>, output: Blocks<'_>) {
    let call = Call { collective, dtype: DType::F32, redop: RedOp::Sum, root, input, output };
    // SAFETY: the callers' buffers outlive the synchronous call.
    unsafe { comm.run(&call, Options::default()) }.unwrap();
}

/// Compares the collective on symmetric memory with the collective on other memory, several times. Overwrites the
/// input immediately after each call.
fn compare(comm: &Communicator, collective: Collective, count: usize, skip: usize) {
    let (me, n) = (comm.rank(), comm.size());
    let root = n - 1;
    let (given, taken) = shape(collective, me == root, n, count);
    let mut input = Floats::new(given.unwrap_or(0), skip);
    let mut output = Floats::new(taken.unwrap_or(0), 0);
    for iteration in 0..4 {
        let mut plain: Vec<f32> = (0..given.unwrap_or(0)).map(|i| value(me + iteration, i)).collect();
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
        let case = format!("{collective:?} of {count} on rank {me} of {n}, iteration {iteration}");
        assert!(output.all() == want, "{case}");

        // In place, for collectives that support it.
        let own = match collective {
            Collective::AllReduce => Some((0, count)),
            Collective::AllGather => Some((me * count, count)),
            _ => None,
        };
        if let Some((first, length)) = own {
            output.all()[first..first + length].copy_from_slice(&plain);
            let (from, to) = (output.blocks(first, length), output.blocks(0, want.len()));
            make(comm, collective, root, from, to);
            assert!(output.all() == want, "{case}, in place");
            output.all().fill(-2.0);
        }
    }
}

#[test]
fn collectives_are_correct_on_symmetric_memory_and_release_it() {
    for (n, wire) in [
        (2, Wire::Shm),
        (3, Wire::Shm),
        (4, Wire::NonTemporal),
        (4, Wire::Nodes(2)),
        (5, Wire::Nodes(3)),
        (3, Wire::Efa(7)),
    ] {
        over(wire.links(n), TIMEOUT, |comm| {
            for collective in ALL {
                for (count, skip) in [(1, 0), (9_000, 0), (9_000, 2), (9_001, 1), (150_000, 0)] {
                    compare(comm, collective, count, skip);
                }
            }
        });
    }
}

/// Large and aligned messages are sent without a copy into a slot.
#[test]
fn zero_copy_messages_are_counted() {
    // The process keeps its symmetric memory and the counter while a buffer exists.
    let _held = SymmetricBuffer::new(CAP, 1).unwrap();
    let before = SymmetricBuffer::usage().messages;
    over(Wire::Shm.links(2), TIMEOUT, |comm| {
        let (mut input, mut output) = (Floats::new(50_000, 0), Floats::new(100_000, 0));
        make(comm, Collective::AllGather, 0, input.blocks(0, 50_000), output.blocks(0, 100_000));
    });
    assert!(SymmetricBuffer::usage().messages > before);
}
