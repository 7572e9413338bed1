//! Exchange of the library's own bytes between ranks, by the group's collectives.

use smddp_plan::Collective;

use super::{Communicator, Options};
use crate::call::types::{DType, RedOp};
use crate::call::{Blocks, Call};
use crate::error::{Error, Result};

impl Communicator {
    /// Every rank's bytes, as many of each, in rank order.
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
        // SAFETY: both belong to this thread until the call returns, and the input is only read.
        unsafe { self.run(&call, Options::default()) }?;
        Ok(all)
    }

    /// Runs a call that is made of several collectives. An interrupt aborts the group: the other ranks would wait for the
    /// collectives that this rank does not start any more.
    pub(crate) fn one_call<T>(&self, name: &str, call: impl FnOnce() -> Result<T>) -> Result<T> {
        let outcome = call();
        if matches!(outcome, Err(Error::Interrupted)) {
            self.abort(&format!("rank {} left {name} before its end (a signal handler raised)", self.rank()));
        }
        outcome
    }
}
