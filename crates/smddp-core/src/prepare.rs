//! From a call to an operation: the binding, kept and used again, and the addresses.

use std::sync::Arc;
use std::time::Duration;

use smddp_plan::Counts;

use crate::bind::{self, Key, bind};
use crate::call::{Blocks, Call, reduces};
use crate::comm::Inner;
use crate::device::DeviceOp;
use crate::driver::Driver;
use crate::error::Result;
use crate::exec::{Cursor, Op, State};
use crate::reduce;
use crate::types::RedOp;

fn key_of(call: &Call<'_>, counts: Counts, device: Option<&DeviceOp>) -> Key {
    let device = device.map(|device| device.lobby.place);
    let reducing = reduces(call.collective);
    let redop = if reducing { call.redop.code() } else { 0 };
    let factor = match call.redop {
        RedOp::PremulSum(factor) if reducing => factor.to_bits(),
        _ => 0,
    };
    Key { collective: call.collective, dtype: call.dtype, redop, factor, root: call.root, counts, device }
}

impl Inner {
    pub(crate) fn prepare(
        &self,
        driver: &mut Driver,
        call: &Call<'_>,
        counts: Counts,
        timeout: Duration,
        device: Option<Box<DeviceOp>>,
    ) -> Result<Box<Op>> {
        let key = key_of(call, counts, device.as_deref());
        let bound = match driver.cache.get(&key) {
            Some(bound) => bound,
            None => {
                let bound = Arc::new(bind(&key, &self.site, self.config)?);
                driver.cache.put(key, bound.clone());
                bound
            }
        };
        let spare = driver.spare.take();
        Ok(self.fill(spare, bound, call, timeout, device))
    }

    pub(crate) fn prepare_apart(
        &self,
        call: &Call<'_>,
        counts: Counts,
        timeout: Duration,
        device: Option<Box<DeviceOp>>,
    ) -> Result<Box<Op>> {
        let key = key_of(call, counts, device.as_deref());
        let bound = Arc::new(bind(&key, &self.site, self.config)?);
        Ok(self.fill(None, bound, call, timeout, device))
    }

    fn fill(
        &self,
        spare: Option<Box<Op>>,
        bound: Arc<bind::Bound>,
        call: &Call<'_>,
        timeout: Duration,
        device: Option<Box<DeviceOp>>,
    ) -> Box<Op> {
        let reducing = reduces(call.collective);
        let scale = (reducing && call.redop == RedOp::Avg).then_some(self.size as u32);
        let (in_base, in_list) = place(&call.input);
        let (out_base, out_list) = place(&call.output);
        let stream = bound.bytes >= self.config.stream && !(in_base == out_base && self.size == 2);
        let mut op = spare.unwrap_or_else(|| {
            Box::new(Op {
                collective: call.collective,
                seq: 0,
                bound: bound.clone(),
                state: State {
                    dtype: call.dtype,
                    scale,
                    bases: [0; 3],
                    lists: [None, None],
                    stream,
                    lanes: Vec::new(),
                    semaphores: Vec::new(),
                },
                scratch: Vec::new(),
                scaled: Vec::new(),
                begun: false,
                timeout,
                submitted: None,
                work: None,
                device: None,
            })
        });
        op.collective = call.collective;
        op.scratch.clear();
        if device.is_none() {
            op.scratch.resize(bound.scratch.div_ceil(16), 0);
        }
        op.begun = false;
        let state = &mut op.state;
        state.dtype = call.dtype;
        state.scale = scale;
        state.bases = [in_base, out_base, op.scratch.as_ptr() as usize];
        state.lists = [in_list, out_list];
        state.stream = stream;
        state.lanes.clear();
        state.lanes.resize(bound.lanes.len(), Cursor::default());
        state.semaphores.clear();
        state.semaphores.resize(bound.semaphores, 0);
        op.timeout = timeout;
        op.submitted = None;
        op.bound = bound;
        if let RedOp::PremulSum(factor) = call.redop
            && reducing
            && device.is_none()
        {
            premultiply(&mut op, factor);
        }
        op.device = device;
        op
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
fn premultiply(op: &mut Op, factor: f64) {
    let bound = op.bound.clone();
    let total: usize = bound.lengths[0].iter().sum();
    op.scaled.clear();
    op.scaled.resize(total.div_ceil(16), 0);
    let base = op.scaled.as_mut_ptr() as usize;
    for (block, (&offset, &length)) in bound.offsets[0].iter().zip(&bound.lengths[0]).enumerate() {
        let from = op.state.bases[0] + op.state.lists[0].as_ref().map_or(offset, |list| list[block]);
        // SAFETY: the input block is valid (the caller's promise); `scaled` has room for all blocks in a row.
        unsafe {
            let dtype = op.state.dtype;
            reduce::premultiply(
                dtype,
                (base + offset) as *mut u8,
                from as *const u8,
                length / dtype.size(),
                factor,
            );
        }
    }
    op.state.bases[0] = base;
    op.state.lists[0] = None;
}
