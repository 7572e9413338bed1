//! From a call to an operation: the binding, kept and used again, and the addresses.

use std::sync::Arc;
use std::time::Duration;

use smddp_plan::Counts;

use super::Inner;
use crate::bind::{self, bind};
use crate::call::{Blocks, Call, name_of};
use crate::device::DeviceOp;
use crate::error::Result;
use crate::key::Key;
use crate::op::Operation;
use crate::reduce;
use crate::steps::Cursor;
use crate::sync::lock;
use crate::types::RedOp;

impl Inner {
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

    fn fill(&self, op: &mut Operation, call: &Call<'_>, timeout: Duration, device: Option<Box<DeviceOp>>) {
        let reducing = call.collective.reduces();
        let scale = (reducing && call.redop == RedOp::Avg).then_some(self.size as u32);
        let (in_base, in_list) = place(&call.input);
        let (out_base, out_list) = place(&call.output);
        let bound = &op.bound;
        let stream = bound.bytes >= self.config.stream && !(in_base == out_base && self.size == 2);
        op.collective = call.collective;
        op.scratch.clear();
        op.scratch.resize(if device.is_none() { bound.scratch.div_ceil(16) } else { 0 }, 0);
        op.begun = false;
        let run = &mut op.execution;
        run.dtype = call.dtype;
        run.scale = scale;
        run.bases = [in_base, out_base, op.scratch.as_ptr() as usize];
        run.lists = [in_list, out_list];
        run.stream = stream;
        run.lanes.clear();
        run.lanes.resize(bound.lanes.len(), Cursor::default());
        op.timeout = timeout;
        op.submitted = None;
        if let RedOp::PremulSum(factor) = call.redop
            && reducing
            && device.is_none()
        {
            premultiply(op, factor);
        }
        op.device = device;
    }
}

/// Base address, and the blocks' addresses where they do not lie in a row.
fn place(blocks: &Blocks<'_>) -> (usize, Option<Vec<usize>>) {
    match blocks {
        Blocks::None => (0, None),
        Blocks::Flat { ptr, .. } | Blocks::Cut { ptr, .. } => (*ptr as usize, None),
        Blocks::List { parts } => (0, Some(parts.iter().map(|p| p.0 as usize).collect())),
    }
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
