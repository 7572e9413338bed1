//! What ranks tell each other for the library's own ends, by the group's own collectives.

use smddp_plan::Collective;

use super::{Communicator, Options};
use crate::call::{Blocks, Call};
use crate::error::Result;
use crate::types::{DType, RedOp};

impl Communicator {
    /// Every rank's bytes, as many of each, in rank order.
    pub fn bytes_of_all(&self, mine: Vec<u8>) -> Result<Vec<u8>> {
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
}
