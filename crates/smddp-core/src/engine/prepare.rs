//! Preparation of operations: binding of calls, which is cached, and buffer addresses.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use smddp_plan::{Collective, Counts};

use crate::bind::{self, bind};
use crate::call::key::Key;
use crate::call::types::RedOp;
use crate::call::{self, Blocks, Call, name_of};
use crate::engine::Engine;
use crate::engine::operation::{CallShape, Operation};
use crate::engine::shared::SharedState;
use crate::error::{Error, Result};
use crate::exec::device::DeviceOp;
use crate::exec::walk::{InputCopy, PipelineCursor};
use crate::log::{self, Level};
use crate::sync::lock;

impl SharedState {
    /// Prepares the operation of a call that the caller waits for. A repeated call takes over its completed
    /// operation.
    pub(crate) fn prepare_repeated(
        &self,
        engine: &mut Engine,
        call: &Call<'_>,
        timeout: Duration,
    ) -> Result<Box<Operation>> {
        let shape = CallShape::of(call);
        if let Some(mut op) = shape.as_ref().and_then(|shape| engine.reuse(shape)) {
            self.set_addresses(&mut op, call, timeout)?;
            return Ok(op);
        }
        let counts = call::check(call, self.rank, self.size)?;
        let mut op = self.prepare(engine.spare.take(), call, counts, timeout, None)?;
        op.shape = shape;
        Ok(op)
    }

    /// Prepares an operation. `spare`: a completed operation whose memory is reused.
    pub(crate) fn prepare(
        &self,
        spare: Option<Box<Operation>>,
        call: &Call<'_>,
        counts: Counts,
        timeout: Duration,
        device: Option<Box<DeviceOp>>,
    ) -> Result<Box<Operation>> {
        let location = device.as_ref().map(|device| (device.handle.memory, device.handle.site));
        let key = Key::of(call, counts, location.unwrap_or_default());
        let mut cache = lock(&self.cache);
        let bound = cache.get_or_bind(key, |key| {
            let bound = bind(key, &self.facts, self.config)?;
            bind::check(&bound, &self.facts, name_of(call.collective), self.config.staging)?;
            Ok(bound)
        })?;
        let mut op = spare.unwrap_or_else(|| Box::new(Operation::new(bound.clone())));
        // An operation of the same call already has this binding.
        if !Arc::ptr_eq(&op.bound, bound) {
            op.bound = bound.clone();
        }
        drop(cache);
        self.fill(&mut op, call, timeout, device)?;
        Ok(op)
    }

    /// Sets the addresses, deadline and progress of this call, also in a reused operation.
    fn set_addresses(&self, op: &mut Operation, call: &Call<'_>, timeout: Duration) -> Result<()> {
        let (input, output) = (base(&call.input), base(&call.output));
        op.begun = false;
        op.timeout = timeout;
        op.submitted = None;
        let bound = &op.bound;
        let run = &mut op.execution;
        run.bases = [input, output, op.scratch.as_ptr() as usize];
        run.stream = bound.bytes >= self.config.stream && !(input == output && self.size == 2);
        run.pipelines.clear();
        run.pipelines.resize(bound.pipelines.len(), PipelineCursor::default());
        run.input_copy = None;
        op.overlaps = call.needs_input_copy(self.rank, self.size);
        match call.redop {
            RedOp::PremulSum(factor) if call.collective.reduces() => {
                self.reserve_input_copy(op, call, Some(factor))
            }
            _ if op.overlaps => self.reserve_input_copy(op, call, None),
            _ => Ok(()),
        }
    }

    fn fill(
        &self,
        op: &mut Operation,
        call: &Call<'_>,
        timeout: Duration,
        device: Option<Box<DeviceOp>>,
    ) -> Result<()> {
        let reducing = call.collective.reduces();
        let scale = (reducing && call.redop == RedOp::Avg).then_some(self.size as u32);
        op.audit = self.audit_of(call.collective, device.is_some())?;
        op.collective = call.collective;
        op.shape = None;
        op.scratch.clear();
        op.scratch.resize(if device.is_none() { op.bound.scratch.div_ceil(16) } else { 0 }, 0);
        op.execution.dtype = call.dtype;
        op.execution.scale = scale;
        op.execution.lists = [list(&call.input), list(&call.output)];
        op.device = device;
        self.set_addresses(op, call, timeout)
    }

    /// Reserves memory for a copy of the input. The operation copies when it begins, and reads the copy.
    #[cold]
    fn reserve_input_copy(&self, op: &mut Operation, call: &Call<'_>, factor: Option<f64>) -> Result<()> {
        let pieces = call.input_pieces();
        let bytes: usize = pieces.iter().map(|piece| piece.1).sum();
        if op.overlaps {
            self.report_overlap(call.collective, bytes);
        }
        if let Some(device) = &mut op.device {
            // The device's stream copies the input.
            device.overlaps = op.overlaps;
            return Ok(());
        }
        op.input_copy.try_reserve_exact(bytes.div_ceil(size_of::<u128>())).map_err(|error| {
            Error::System {
                operation: format!("{} on group `{}`", name_of(call.collective), self.name),
                reason: format!("cannot allocate {bytes} bytes for a copy of the input: {error}"),
            }
        })?;
        let run = &mut op.execution;
        run.bases[0] = op.input_copy.as_mut_ptr() as usize;
        run.lists[0] = None;
        run.input_copy = Some(InputCopy { pieces, factor });
        Ok(())
    }

    /// Logs the first copied input of each collective.
    fn report_overlap(&self, collective: Collective, bytes: usize) {
        let bit = 1 << collective as u16;
        if self.overlaps.fetch_or(bit, Ordering::Relaxed) & bit == 0 {
            log::say(
                Level::Info,
                &format!(
                    "group `{}`: {} copies its input first, because it overlaps the output: bytes={bytes}",
                    self.name,
                    name_of(collective)
                ),
            );
        }
    }
}

/// Returns the base address of contiguous blocks, else 0.
fn base(blocks: &Blocks<'_>) -> usize {
    match blocks {
        Blocks::Flat { ptr, .. } | Blocks::Cut { ptr, .. } => *ptr as usize,
        Blocks::None | Blocks::List { .. } => 0,
    }
}

/// Returns the addresses of blocks given as a list.
fn list(blocks: &Blocks<'_>) -> Option<Vec<usize>> {
    match blocks {
        Blocks::List { parts } => Some(parts.iter().map(|part| part.0 as usize).collect()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use crate::for_tests::group;
    use crate::sync::lock;
    use crate::{Blocks, Call, Communicator, DType, Options, RedOp};
    use smddp_plan::Collective;

    #[test]
    fn repeated_call_is_planned_once() {
        let comm = Communicator::from_group(group(2), &[0, 0], "test", Duration::from_secs(60));
        let mut data = vec![0f32; 1000];
        let buffer = Blocks::Flat { ptr: data.as_mut_ptr().cast(), count: data.len() };
        let (collective, dtype, redop) = (Collective::AllReduce, DType::F32, RedOp::Sum);
        let call = Call { collective, dtype, redop, root: 0, input: buffer, output: buffer };
        let start = |comm: &Communicator| {
            // SAFETY: the data outlives the group, which is closed before this function returns.
            drop(unsafe { comm.start(&call, Options::default()) }.unwrap());
        };
        for _ in 0..20 {
            comm.while_owned(|| start(&comm));
            start(&comm);
        }
        assert_eq!(lock(comm.cache()).made, 1, "one binding for forty calls");
        comm.close();
    }
}
