//! Patterns of messages between the ranks of a team, as one call: sendrecv, hypercube.

use smddp_core::{DType, Options};

use super::{Side, Team};
use crate::error::Result;

/// Tag of the messages.
const TAG: u64 = 0;

impl Team {
    /// Every rank sends to the next and receives from the one before.
    pub(super) fn neighbours(&self, input: Side, output: Side, dtype: DType) -> Result<()> {
        let (rank, size) = (self.rank(), self.size());
        self.exchange((input, (rank + 1) % size), (output, (rank + size - 1) % size), dtype)
    }

    /// An all_gather in which a rank gives all that it has to the rank whose number differs in one bit, a step a bit.
    pub(super) fn hypercube(&self, own: Side, all: Side, dtype: DType) -> Result<()> {
        let (rank, (ptr, block)) = (self.rank(), own);
        let bytes = block * dtype.size();
        assert!(all.1 == block * self.size(), "{} elements of {} ranks' {block}", all.1, self.size());
        let at = |rank: usize| all.0.wrapping_add(rank * bytes);
        if ptr != at(rank) {
            // SAFETY: both lie in buffers that the bound call borrows, of these lengths (just checked), and where they are one
            // buffer the input is that very block.
            unsafe { std::ptr::copy_nonoverlapping(ptr, at(rank), bytes) };
        }
        for bit in (0..).map(|bit| 1 << bit).take_while(|bit| *bit < self.size()) {
            let mine = rank & !(bit - 1);
            let peer = rank ^ bit;
            self.exchange(((at(mine), block * bit), peer), ((at(mine ^ bit), block * bit), peer), dtype)?;
        }
        Ok(())
    }

    /// Sends one side to a rank and fills the other from a rank, at the same time.
    fn exchange(&self, (out, to): (Side, usize), (into, from): (Side, usize), dtype: DType) -> Result<()> {
        let comm = &self.comm;
        // SAFETY: as for `Team::run`; both works are waited for before this returns, or the communicator is aborted.
        let done = unsafe {
            comm.recv(into.0, into.1, dtype, Some(from), TAG, Options::default()).and_then(|receive| {
                let send = comm.send(out.0, out.1, dtype, to, TAG, Options::default())?;
                send.wait(None)?;
                receive.wait(None)
            })
        };
        self.given_up(done)
    }
}
