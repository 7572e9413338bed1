//! From a call to an operation: the binding, kept and used again, and the addresses.

use std::sync::Arc;
use std::time::Duration;

use smddp_plan::Counts;

use super::Inner;
use crate::bind::{self, bind};
use crate::call::{self, Blocks, Call, name_of};
use crate::device::DeviceOp;
use crate::driver::Driver;
use crate::error::Result;
use crate::key::Key;
use crate::op::{Operation, Repeat};
use crate::reduce;
use crate::steps::Cursor;
use crate::sync::lock;
use crate::types::RedOp;

impl Inner {
    /// The operation of a call that the caller waits for. One that came before costs a look at what is kept of it.
    pub(super) fn made(
        &self,
        driver: &mut Driver,
        call: &Call<'_>,
        timeout: Duration,
    ) -> Result<Box<Operation>> {
        let repeat = Repeat::of(call);
        if let Some(mut op) = repeat.as_ref().and_then(|repeat| driver.again(repeat)) {
            self.point(&mut op, (base(&call.input), base(&call.output)), timeout);
            return Ok(op);
        }
        let counts = call::check(call, self.rank, self.size)?;
        let mut op = self.prepare(driver.spare.take(), call, counts, timeout, None)?;
        op.repeat = repeat;
        Ok(op)
    }

    /// `spare`: a finished operation, to be filled again.
    pub(crate) fn prepare(
        &self,
        spare: Option<Box<Operation>>,
        call: &Call<'_>,
        counts: Counts,
        timeout: Duration,
        device: Option<Box<DeviceOp>>,
    ) -> Result<Box<Operation>> {
        let place = device.as_ref().map(|device| (device.handle.memory, device.handle.site));
        let key = Key::of(call, counts, place.unwrap_or_default());
        let mut cache = lock(&self.cache);
        let bound = cache.get_or_bind(key, |key| {
            let bound = bind(key, &self.facts, self.config)?;
            bind::check(&bound, &self.facts, name_of(call.collective), self.config.staging)?;
            Ok(bound)
        })?;
        let mut op = spare.unwrap_or_else(|| Box::new(Operation::new(bound.clone())));
        // An operation of the same call has it already.
        if !Arc::ptr_eq(&op.bound, bound) {
            op.bound = bound.clone();
        }
        drop(cache);
        self.fill(&mut op, call, timeout, device);
        Ok(op)
    }

    /// An operation whose call comes again meets the addresses of this one.
    pub(crate) fn point(&self, op: &mut Operation, (input, output): (usize, usize), timeout: Duration) {
        op.begun = false;
        op.timeout = timeout;
        op.submitted = None;
        let bound = &op.bound;
        let run = &mut op.execution;
        run.bases = [input, output, op.scratch.as_ptr() as usize];
        run.stream = bound.bytes >= self.config.stream && !(input == output && self.size == 2);
        run.lanes.clear();
        run.lanes.resize(bound.lanes.len(), Cursor::default());
    }

    fn fill(&self, op: &mut Operation, call: &Call<'_>, timeout: Duration, device: Option<Box<DeviceOp>>) {
        let reducing = call.collective.reduces();
        let scale = (reducing && call.redop == RedOp::Avg).then_some(self.size as u32);
        let (in_base, in_list) = place(&call.input);
        let (out_base, out_list) = place(&call.output);
        op.collective = call.collective;
        op.repeat = None;
        op.scratch.clear();
        op.scratch.resize(if device.is_none() { op.bound.scratch.div_ceil(16) } else { 0 }, 0);
        op.execution.dtype = call.dtype;
        op.execution.scale = scale;
        op.execution.lists = [in_list, out_list];
        self.point(op, (in_base, out_base), timeout);
        if let RedOp::PremulSum(factor) = call.redop
            && reducing
            && device.is_none()
        {
            premultiply(op, factor);
        }
        op.device = device;
    }
}

/// Base address of blocks in a row.
fn base(blocks: &Blocks<'_>) -> usize {
    match blocks {
        Blocks::Flat { ptr, .. } | Blocks::Cut { ptr, .. } => *ptr as usize,
        Blocks::None | Blocks::List { .. } => 0,
    }
}

/// Base address, and the blocks' addresses where they do not lie in a row.
fn place(blocks: &Blocks<'_>) -> (usize, Option<Vec<usize>>) {
    let list = match blocks {
        Blocks::List { parts } => Some(parts.iter().map(|part| part.0 as usize).collect()),
        _ => None,
    };
    (base(blocks), list)
}

/// The input times the caller's factor, in memory of the operation's own.
fn premultiply(op: &mut Operation, factor: f64) {
    let bound = op.bound.clone();
    let total: usize = bound.lengths[0].iter().sum();
    op.scaled.clear();
    op.scaled.resize(total.div_ceil(16), 0);
    let base = op.scaled.as_mut_ptr() as usize;
    for (block, (&offset, &length)) in bound.offsets[0].iter().zip(&bound.lengths[0]).enumerate() {
        let from = op.execution.bases[0] + op.execution.lists[0].as_ref().map_or(offset, |list| list[block]);
        let (dtype, from, to) = (op.execution.dtype, from as *const u8, (base + offset) as *mut u8);
        // SAFETY: the input block is valid (the caller's promise); `scaled` has room for all blocks in a row.
        unsafe { reduce::premultiply(dtype, to, from, length / dtype.size(), factor) };
    }
    op.execution.bases[0] = base;
    op.execution.lists[0] = None;
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use crate::for_tests::group;
    use crate::sync::lock;
    use crate::{Blocks, Call, Communicator, DType, Options, RedOp};
    use smddp_plan::Collective;

    #[test]
    fn a_call_is_planned_once_though_another_thread_drives() {
        let comm = Communicator::over(group(2), &[0, 0], "test", Duration::from_secs(60));
        let mut data = vec![0f32; 1000];
        let place = Blocks::Flat { ptr: data.as_mut_ptr().cast(), count: data.len() };
        let (collective, dtype, redop) = (Collective::AllReduce, DType::F32, RedOp::Sum);
        let call = Call { collective, dtype, redop, root: 0, input: place, output: place };
        let start = |comm: &Communicator| {
            // SAFETY: the data outlives the group, which ends before this function does.
            drop(unsafe { comm.start(&call, Options::default()) }.unwrap());
        };
        for _ in 0..20 {
            comm.driving(|| start(&comm));
            start(&comm);
        }
        assert_eq!(lock(comm.cache()).made, 1, "one call, made forty times");
        comm.close();
    }
}
