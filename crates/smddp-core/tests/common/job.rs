//! One collective with its buffers, which a test starts, waits for and checks.

use smddp_core::{Blocks, Call, Collective, Communicator, DType, Options, RedOp, Result, Work};

use super::value;

pub(crate) struct Job {
    pub(crate) collective: Collective,
    root: usize,
    rank: usize,
    input: Option<Vec<f32>>,
    output: Option<Vec<f32>>,
    want: Vec<f32>,
}

impl Job {
    /// Creates a job of `count` elements per block (whole buffer for all_reduce, broadcast, reduce).
    ///
    /// `salt` varies the data between calls. All ranks must pass the same value.
    pub(crate) fn new(
        rank: usize,
        n: usize,
        collective: Collective,
        count: usize,
        root: usize,
        salt: usize,
    ) -> Self {
        let one = |r: usize, i: usize| value(r + salt, i);
        let data = |r: usize, len: usize| (0..len).map(|i| one(r, i)).collect::<Vec<f32>>();
        let sum = |i: usize| (0..n).map(|r| one(r, i)).sum::<f32>();
        let at_root = rank == root;
        let there = |yes: bool, data: Vec<f32>| yes.then_some(data);
        let (input, want) = match collective {
            Collective::AllGather => {
                (Some(data(rank, count)), Some((0..n).flat_map(|r| data(r, count)).collect::<Vec<f32>>()))
            }
            Collective::ReduceScatter => {
                (Some(data(rank, n * count)), Some((0..count).map(|i| sum(rank * count + i)).collect()))
            }
            Collective::AllReduce => (Some(data(rank, count)), Some((0..count).map(sum).collect())),
            Collective::Broadcast => (there(at_root, data(root, count)), Some(data(root, count))),
            Collective::Reduce => (Some(data(rank, count)), there(at_root, (0..count).map(sum).collect())),
            Collective::Gather => {
                (Some(data(rank, count)), there(at_root, (0..n).flat_map(|r| data(r, count)).collect()))
            }
            Collective::Scatter => (
                there(at_root, data(root, n * count)),
                Some((0..count).map(|i| one(root, rank * count + i)).collect()),
            ),
            Collective::AllToAll => (
                Some(data(rank, n * count)),
                Some(
                    (0..n).flat_map(|r| (0..count).map(move |i| value(r + salt, rank * count + i))).collect(),
                ),
            ),
            Collective::Barrier => (None, None),
        };
        let output = want.as_ref().map(|want| vec![f32::NAN; want.len()]);
        Self { collective, root, rank, input, output, want: want.unwrap_or_default() }
    }

    fn call(&mut self) -> Call<'static> {
        fn flat(data: &mut Option<Vec<f32>>) -> Blocks<'static> {
            match data {
                Some(data) => Blocks::Flat { ptr: data.as_mut_ptr().cast(), count: data.len() },
                None => Blocks::None,
            }
        }
        Call {
            collective: self.collective,
            dtype: DType::F32,
            redop: RedOp::Sum,
            root: self.root,
            input: flat(&mut self.input),
            output: flat(&mut self.output),
        }
    }

    /// Starts the collective asynchronously. The job must live until the work is complete.
    pub(crate) fn start(&mut self, comm: &Communicator) -> Result<Work> {
        let call = self.call();
        // SAFETY: every caller keeps the job, and so the vectors, until the work is complete.
        unsafe { comm.start(&call, Options::default()) }
    }

    /// Runs the collective synchronously.
    pub(crate) fn run(&mut self, comm: &Communicator) -> Result<()> {
        let call = self.call();
        // SAFETY: the vectors outlive the synchronous call.
        unsafe { comm.run(&call, Options::default()) }
    }

    pub(crate) fn check(&self) {
        let output = self.output.as_deref().unwrap_or_default();
        assert_eq!(output.len(), self.want.len());
        if let Some(at) = (0..output.len()).find(|&i| output[i].to_bits() != self.want[i].to_bits()) {
            panic!(
                "{:?} on rank {}, root {}: element {at} of {} is {}, expected {}",
                self.collective,
                self.rank,
                self.root,
                output.len(),
                output[at],
                self.want[at]
            );
        }
    }
}
