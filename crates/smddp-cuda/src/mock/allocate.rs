//! Allocating and freeing.

use std::collections::HashMap;

use super::device::MockDevice;
use super::report::Fault;
use super::shadow::Shadow;
use super::space::{Allocation, Had};
use super::state::{State, failed, invalid_value};
use super::world::Memory;
use crate::{Address, Kind, Result};

impl MockDevice {
    /// Device memory of any kind; given back by [`Device::free`].
    ///
    /// # Errors
    /// As [`Device::allocate`].
    pub fn allocate_as(&self, memory: Memory, bytes: usize) -> Result<Address> {
        let call = "cuMemAlloc";
        let mut state = self.calls()?;
        state.may_stall(self.process, self.ordinal, call);
        let device = self.ordinal as usize;
        let used = state.used[device].saturating_add(bytes);
        if bytes == 0 {
            return Err(invalid_value(call));
        }
        if state.script.memory.is_some_and(|most| used > most) {
            return Err(failed(call, 2, "CUDA_ERROR_OUT_OF_MEMORY"));
        }
        let base = state.space.reserve(bytes, true).ok_or(failed(call, 2, "CUDA_ERROR_OUT_OF_MEMORY"))?;
        state.used[device] = used;
        let (kind, chunk) = match memory {
            Memory::Legacy => (Kind::Legacy, bytes),
            Memory::Private => (Kind::Private, bytes),
            Memory::Mapped { chunk } => (Kind::Mapped, chunk.clamp(1, bytes)),
        };
        for offset in (0..bytes).step_by(chunk) {
            self.add(&mut state, kind, base, offset, chunk.min(bytes - offset));
        }
        Ok(base)
    }

    /// [`crate::Device::allocate_host`].
    pub(super) fn pin(&self, bytes: usize) -> Result<*mut u8> {
        let call = "cuMemHostAlloc";
        let mut state = self.calls()?;
        state.may_stall(self.process, self.ordinal, call);
        let pinned = state.pinned.saturating_add(bytes);
        if bytes == 0 {
            return Err(invalid_value(call));
        }
        if state.script.pinned.is_some_and(|most| pinned > most) {
            return Err(failed(call, 2, "CUDA_ERROR_OUT_OF_MEMORY"));
        }
        let base = state.space.reserve(bytes, true).ok_or(failed(call, 2, "CUDA_ERROR_OUT_OF_MEMORY"))?;
        state.pinned = pinned;
        self.add(&mut state, Kind::Host, base, 0, bytes);
        Ok(base as *mut u8)
    }

    /// An allocation of this process, at `offset` of what it frees at once.
    fn add(&self, state: &mut State, kind: Kind, base: Address, offset: usize, bytes: usize) {
        let generation = state.space.number();
        let address = base + offset as u64;
        let allocation = Allocation {
            owner: Some((self.process, self.ordinal)),
            kind,
            bytes,
            backing: address as usize,
            identity: None,
            live: true,
            // What the processor writes to its own memory is not seen.
            shadow: Shadow::new(bytes, kind == Kind::Host),
            words: HashMap::new(),
        };
        state.space.allocations.insert(generation, allocation);
        let view = state.space.add_view(self.process, address, bytes, (generation, 0), Had::Own);
        state.segments.entry((self.process, base)).or_default().push(view);
    }

    /// What `address` is the start of is given back by `how`.
    pub(super) fn give_back(&self, address: Address, kinds: &[Kind], how: &str) {
        let mut state = self.shared().lock();
        state.may_stall(self.process, self.ordinal, how);
        let key = (self.process, address);
        let found = state.segments.get(&key).and_then(|views| {
            let view = state.space.views.get(views.first()?)?;
            let allocation = state.space.allocations.get(&view.allocation)?;
            Some((allocation.kind, allocation.owner?.1))
        });
        let operation = state.host_operation(self.process, format!("{how} {address:#x}"));
        let Some((kind, device)) = found.filter(|(kind, _)| kinds.contains(kind)) else {
            let text = "this is not the start of such memory of this process, or was freed before".into();
            state.report(Fault::Misuse, text, vec![operation]);
            return;
        };
        let views = state.segments.remove(&key).unwrap_or_default();
        let clock = state.processes[self.process].clock.clone();
        let mut bytes = 0;
        let mut late = Vec::new();
        for number in views {
            let Some(view) = state.space.views.get(&number) else { continue };
            let allocation = view.allocation;
            late.extend(state.space.unfinished(allocation, &clock));
            state.space.close_view(number, &clock);
            if let Some(allocation) = state.space.allocations.get_mut(&allocation) {
                allocation.live = false;
                bytes += allocation.bytes;
            }
        }
        for used in late {
            let text = "nothing orders this use before the freeing".into();
            state.report(Fault::Freed, text, vec![used, operation.clone()]);
        }
        let again = state.script.reuse && kind != Kind::Host;
        state.space.retire(address, again);
        match kind {
            Kind::Host => state.pinned -= bytes,
            _ => state.used[device as usize] -= bytes,
        }
        state.wake_ready();
    }
}
