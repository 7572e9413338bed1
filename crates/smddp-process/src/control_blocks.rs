//! Allocator of control blocks in a process's shared memory.
//!
//! Slower peers may still read a released block. It is reused only after its [`ReleaseCondition`] is met.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use smddp_base::lock;

use super::layout::{CONTROL, CONTROL_BYTES, PAGE};
use super::memory::SharedMemory;
use super::pool::ReleaseCondition;

/// Control block of a group, or ring of its messages. Only `ControlBlocks` creates blocks, and a block cannot be copied, so it has
/// one owner and is given back at most once. A dropped block is never used again.
#[derive(Debug, PartialEq, Eq)]
#[must_use]
pub struct ControlBlock {
    offset: usize,
    bytes: usize,
}

impl ControlBlock {
    /// Returns the offset in the shared memory of the process, in bytes.
    pub fn offset(&self) -> usize {
        self.offset
    }
}

#[derive(Default)]
struct Blocks {
    /// Free blocks by size.
    free: BTreeMap<usize, Vec<usize>>,
    /// (block, condition of reuse)
    releasing: Vec<(ControlBlock, Arc<dyn ReleaseCondition>)>,
    next: usize,
}

/// Allocator of control blocks. A block is reused when its readers are finished.
#[derive(Default)]
pub struct ControlBlocks {
    state: Mutex<Blocks>,
}

impl ControlBlocks {
    /// Allocates a zeroed block; `None` if [`CONTROL_BYTES`] are in use.
    pub fn take(&self, memory: &SharedMemory, bytes: usize) -> Option<ControlBlock> {
        let bytes = bytes.next_multiple_of(PAGE);
        let mut state = lock(&self.state);
        let state = &mut *state;
        state.releasing.retain(|(block, release)| {
            let keep = !release.released();
            if !keep {
                state.free.entry(block.bytes).or_default().push(block.offset);
            }
            keep
        });
        if let Some(offset) = state.free.get_mut(&bytes).and_then(Vec::pop) {
            memory.clear(offset, bytes);
            return Some(ControlBlock { offset, bytes });
        }
        if state.next + bytes > CONTROL_BYTES {
            return None;
        }
        state.next += bytes;
        Some(ControlBlock { offset: CONTROL + state.next - bytes, bytes })
    }

    /// Returns a block; it is reused once `condition` is met. A block is given back once, after its owner's last access, and only to
    /// the allocator that it is from. `condition` must not be met while another process may access the block.
    pub fn give(&self, block: ControlBlock, condition: Arc<dyn ReleaseCondition>) {
        lock(&self.state).releasing.push((block, condition));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;

    struct Now;
    impl ReleaseCondition for Now {
        fn released(&self) -> bool {
            true
        }
    }

    #[test]
    fn reused_block_is_zeroed() {
        let (memory, _fd) = SharedMemory::create(CONTROL + 4 * PAGE).unwrap();
        let control = ControlBlocks::default();
        let (block, words) =
            (control.take(&memory, PAGE + 1).unwrap(), (PAGE + 1).next_multiple_of(PAGE) / 8);
        let offset = block.offset();
        let word = |index: usize| memory.flag64(offset + 8 * index);
        (0..words).for_each(|index| word(index).store(7, Ordering::Relaxed));
        control.give(block, Arc::new(Now));
        assert_eq!(control.take(&memory, PAGE + 1).map(|block| block.offset()), Some(offset));
        assert!((0..words).all(|index| word(index).load(Ordering::Relaxed) == 0));
    }
}
