//! Message patterns of a group as one call: sendrecv, hypercube.

use smddp_core::{DType, Options};

use super::{BenchGroup, RawBuffer};
use crate::error::Result;

/// Tag of the messages.
const TAG: u64 = 0;

impl BenchGroup {
    /// Sends to the next rank and receives from the previous rank.
    pub(super) fn ring_exchange(&self, input: RawBuffer, output: RawBuffer, dtype: DType) -> Result<()> {
        let (rank, size) = (self.rank(), self.size());
        self.exchange((input, (rank + 1) % size), (output, (rank + size - 1) % size), dtype)
    }

    /// Gathers all blocks in log2(size) steps. In each step a rank exchanges its blocks with the rank that differs in one bit.
    pub(super) fn hypercube(&self, own: RawBuffer, all: RawBuffer, dtype: DType) -> Result<()> {
        let (rank, (ptr, block)) = (self.rank(), own);
        let bytes = block * dtype.size();
        assert!(all.1 == block * self.size(), "{} elements of {} ranks' {block}", all.1, self.size());
        let at = |rank: usize| all.0.wrapping_add(rank * bytes);
        if ptr != at(rank) {
            // SAFETY: both are in buffers that the bound call borrows, with these lengths (just checked). In place, the input is
            // the same block.
            unsafe { std::ptr::copy_nonoverlapping(ptr, at(rank), bytes) };
        }
        for bit in (0..).map(|bit| 1 << bit).take_while(|bit| *bit < self.size()) {
            let mine = rank & !(bit - 1);
            let peer = rank ^ bit;
            self.exchange(((at(mine), block * bit), peer), ((at(mine ^ bit), block * bit), peer), dtype)?;
        }
        Ok(())
    }

    /// Sends one buffer to a rank and receives another from a rank concurrently.
    fn exchange(
        &self,
        (out, to): (RawBuffer, usize),
        (into, from): (RawBuffer, usize),
        dtype: DType,
    ) -> Result<()> {
        let comm = &self.comm;
        // SAFETY: as for `BenchGroup::run`; this function waits for both works, or aborts the communicator.
        let done = unsafe {
            comm.recv(into.0, into.1, dtype, Some(from), TAG, Options::default()).and_then(|receive| {
                let send = comm.send(out.0, out.1, dtype, to, TAG, Options::default())?;
                send.wait(None)?;
                receive.wait(None)
            })
        };
        self.abort_on_error(done)
    }
}
