//! Internal collectives: exchange of the library's own data between ranks.

use smddp_plan::Collective;

use super::{Communicator, Options};
use crate::call::types::{DType, RedOp};
use crate::call::{Blocks, Call};
use crate::error::{Error, Result};

impl Communicator {
    /// Gathers the bytes of all ranks in rank order. All ranks pass the same number of bytes.
    ///
    /// # Errors
    /// As for [`Communicator::run`]. [`Error::Mismatch`] if the ranks pass different numbers of bytes.
    pub fn all_gather_bytes(&self, mine: Vec<u8>) -> Result<Vec<u8>> {
        let mut all = vec![0; mine.len() * self.size()];
        let call = Call {
            collective: Collective::AllGather,
            dtype: DType::U8,
            redop: RedOp::Sum,
            root: 0,
            input: Blocks::Flat { ptr: mine.as_ptr().cast_mut(), count: mine.len() },
            output: Blocks::Flat { ptr: all.as_mut_ptr(), count: all.len() },
        };
        // SAFETY: both buffers belong to this thread until the call returns, and the input is only read.
        unsafe { self.run(&call, Options::default()) }?;
        Ok(all)
    }

    /// Runs a call that consists of several collectives. An interrupt aborts the group, because the other ranks
    /// would wait for the remaining collectives.
    pub(crate) fn abort_on_interrupt<T>(&self, name: &str, call: impl FnOnce() -> Result<T>) -> Result<T> {
        let outcome = call();
        if matches!(outcome, Err(Error::Interrupted)) {
            self.abort(&format!(
                "rank {} left {name} before its end because a signal handler raised an exception",
                self.rank()
            ));
        }
        outcome
    }
}
