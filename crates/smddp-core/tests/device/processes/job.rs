//! One collective on a process's device memory, compared with the same collective on host memory.

use std::time::Duration;

use smddp_core::{Blocks, Call, Collective, Communicator, DType, Options, RedOp, Result, Work};
use smddp_cuda::Address;

use super::gpu::{Gpu, Kind, Memory};
use crate::common::shape;
use crate::rank::{host_result, numbers};

const SUM: (DType, RedOp) = (DType::F32, RedOp::Sum);

pub(crate) struct Job<'a> {
    gpu: &'a Gpu,
    comm: &'a Communicator,
    collective: Collective,
    root: usize,
    input: Option<Memory>,
    output: Option<Memory>,
    /// Address and elements of the input and of the output.
    given: Option<(Address, usize)>,
    taken: Option<(Address, usize)>,
    want: Vec<u8>,
    in_place: bool,
}

impl<'a> Job<'a> {
    /// Creates a job of `count` elements per block (whole buffer for all_reduce, broadcast, reduce).
    pub(crate) fn new(
        (gpu, comm): (&'a Gpu, &'a Communicator),
        collective: Collective,
        count: usize,
        root: usize,
        (kind, in_place): (Kind, bool),
    ) -> Self {
        let (n, me, size) = (comm.size(), comm.rank(), DType::F32.size());
        let (given, taken) = shape(collective, me == root, n, count);
        let data = given.map(|count| numbers(DType::F32, me, count));
        let want = host_result(comm, collective, SUM, root, data.as_deref(), taken);
        let memory = |count: usize| gpu.allocate(kind, count * size);
        let output = taken.map(memory);
        // Overwrites the output, as earlier work of the caller's stream would.
        output.iter().for_each(Memory::overwrite);
        // In place: equal shapes use the same address; otherwise the input is this rank's block of the output.
        let place = output.as_ref().filter(|_| in_place).and_then(|output| match collective {
            Collective::AllGather | Collective::Gather => Some(output.at + (me * count * size) as u64),
            _ if given == taken => Some(output.at),
            _ => None,
        });
        let (mut input, mut found) = (None, None);
        if let (Some(count), Some(data)) = (given, data) {
            let at = place.unwrap_or_else(|| input.insert(memory(count)).at);
            gpu.write(at, &data);
            found = Some((at, count));
        }
        let taken = output.as_ref().map(|output| output.at).zip(taken);
        let in_place = found.is_some() && input.is_none();
        Self { gpu, comm, collective, root, input, output, given: found, taken, want, in_place }
    }

    pub(crate) fn start(&self) -> Result<Work> {
        self.start_within(None)
    }

    /// Starts the collective with a separate timeout.
    pub(crate) fn start_within(&self, timeout: Option<Duration>) -> Result<Work> {
        let flat = |place: Option<(Address, usize)>| match place {
            Some((at, count)) => Blocks::Flat { ptr: at as *mut u8, count },
            None => Blocks::None,
        };
        let Self { collective, root, .. } = *self;
        let (dtype, redop) = SUM;
        let call = Call { collective, dtype, redop, root, input: flat(self.given), output: flat(self.taken) };
        // SAFETY: the memory lives as long as the job. Its drop first waits for the caller's stream, which waits for
        // the call.
        unsafe { self.comm.start(&call, Options { timeout, ..self.gpu.on() }) }
    }

    /// Makes the caller's stream wait for the work, and then overwrites the input.
    pub(crate) fn finish(&self, work: &Work) -> Result<()> {
        work.wait_stream(self.gpu.stream)?;
        self.input.iter().for_each(Memory::overwrite);
        Ok(())
    }

    pub(crate) fn check(&self) {
        self.compare(&self.read());
    }

    /// Reads the output on the caller's stream.
    fn read(&self) -> Vec<u8> {
        self.output.as_ref().map_or(Vec::new(), Memory::read)
    }

    fn compare(&self, found: &[u8]) {
        if let Some(at) = (0..found.len()).find(|&i| found[i] != self.want[i]) {
            panic!(
                "{:?}, rank {} of {}, root {}, in place {}: byte {at} of {} is {}, expected {}",
                self.collective,
                self.comm.rank(),
                self.comm.size(),
                self.root,
                self.in_place,
                found.len(),
                found[at],
                self.want[at]
            );
        }
    }

    pub(crate) fn run(&self) -> Result<()> {
        let work = self.start()?;
        self.finish(&work)?;
        let found = self.read();
        // Reports a failure of the call before the comparison.
        work.wait(None)?;
        self.compare(&found);
        Ok(())
    }

    /// Runs again in new physical memory at the same addresses, if it is mapped.
    pub(crate) fn run_remapped(&self) -> Result<()> {
        self.output.iter().chain(&self.input).for_each(Memory::remap);
        self.run_again()
    }

    /// Runs again.
    pub(crate) fn run_again(&self) -> Result<()> {
        self.output.iter().for_each(Memory::overwrite);
        if let Some((at, count)) = self.given {
            self.gpu.write(at, &numbers(DType::F32, self.comm.rank(), count));
        }
        self.run()
    }
}
