//! From a call to an operation: the binding, kept and used again, and the addresses.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use smddp_plan::{Collective, Counts};

use super::Inner;
use crate::bind::{self, bind};
use crate::call::{self, Blocks, Call, name_of};
use crate::device::DeviceOp;
use crate::driver::Driver;
use crate::error::{Error, Result};
use crate::key::Key;
use crate::log::{self, Level};
use crate::op::{Operation, Repeat};
use crate::steps::{Cursor, InputCopy};
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
            self.point(&mut op, call, timeout)?;
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
        self.fill(&mut op, call, timeout, device)?;
        Ok(op)
    }

    /// Sets the addresses, deadline and progress of this call, also in a repeated operation.
    fn point(&self, op: &mut Operation, call: &Call<'_>, timeout: Duration) -> Result<()> {
        let (input, output) = (base(&call.input), base(&call.output));
        op.begun = false;
        op.timeout = timeout;
        op.submitted = None;
        let bound = &op.bound;
        let run = &mut op.execution;
        run.bases = [input, output, op.scratch.as_ptr() as usize];
        run.stream = bound.bytes >= self.config.stream && !(input == output && self.size == 2);
        run.lanes.clear();
        run.lanes.resize(bound.lanes.len(), Cursor::default());
        run.input_copy = None;
        op.overlaps = call.needs_input_copy(self.rank, self.size);
        match call.redop {
            RedOp::PremulSum(factor) if call.collective.reduces() => self.own_input(op, call, Some(factor)),
            _ if op.overlaps => self.own_input(op, call, None),
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
        op.collective = call.collective;
        op.repeat = None;
        op.scratch.clear();
        op.scratch.resize(if device.is_none() { op.bound.scratch.div_ceil(16) } else { 0 }, 0);
        op.execution.dtype = call.dtype;
        op.execution.scale = scale;
        op.execution.lists = [list(&call.input), list(&call.output)];
        op.device = device;
        self.point(op, call, timeout)
    }

    /// Reserves memory for a copy of the input; the operation copies when it begins, and reads the copy.
    #[cold]
    fn own_input(&self, op: &mut Operation, call: &Call<'_>, factor: Option<f64>) -> Result<()> {
        let pieces = call.input_pieces();
        let bytes: usize = pieces.iter().map(|piece| piece.1).sum();
        if op.overlaps {
            self.report_overlap(call.collective, bytes);
        }
        if let Some(device) = &mut op.device {
            // The stream copies.
            device.overlaps = op.overlaps;
            return Ok(());
        }
        op.input_copy.try_reserve_exact(bytes.div_ceil(size_of::<u128>())).map_err(|error| {
            Error::System {
                what: format!("{} on group `{}`", name_of(call.collective), self.name),
                why: format!("cannot allocate {bytes} bytes for a copy of the input: {error}"),
            }
        })?;
        let run = &mut op.execution;
        run.bases[0] = op.input_copy.as_mut_ptr() as usize;
        run.lists[0] = None;
        run.input_copy = Some(InputCopy { pieces, factor });
        Ok(())
    }

    /// Logs the first such call of each collective.
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

/// Base address of blocks in a row.
fn base(blocks: &Blocks<'_>) -> usize {
    match blocks {
        Blocks::Flat { ptr, .. } | Blocks::Cut { ptr, .. } => *ptr as usize,
        Blocks::None | Blocks::List { .. } => 0,
    }
}

/// The addresses of blocks that are given as a list.
fn list(blocks: &Blocks<'_>) -> Option<Vec<usize>> {
    match blocks {
        Blocks::List { parts } => Some(parts.iter().map(|part| part.0 as usize).collect()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

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

    #[test]
    fn an_abort_is_announced_although_another_thread_drives_and_nothing_is_pending() {
        let comm = Communicator::over(group(2), &[0, 0], "test", Duration::from_secs(60));
        comm.driving(|| comm.abort("enough"));
        let end = Instant::now() + Duration::from_secs(20);
        while !comm.has_announced() {
            assert!(Instant::now() < end, "the other rank was sent no notice");
            std::thread::sleep(Duration::from_millis(1));
        }

        let closed = Communicator::over(group(2), &[0, 0], "closed", Duration::from_secs(60));
        closed.driving(|| closed.abort("enough"));
        closed.close();
        assert!(closed.has_announced());
    }
}
