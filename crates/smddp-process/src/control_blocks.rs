//! Allocator of control blocks in a process's shared memory.
//!
//! Slower peers may still read a released block. It is reused only after its [`ReleaseCondition`] is met.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use smddp_base::lock;

use super::layout::{CONTROL, CONTROL_BYTES, PAGE};
use super::memory::SharedMemory;
use super::pool::ReleaseCondition;

#[derive(Default)]
struct Blocks {
    /// Free blocks by size.
    free: BTreeMap<usize, Vec<usize>>,
    /// (offset, bytes, condition of reuse)
    releasing: Vec<(usize, usize, Arc<dyn ReleaseCondition>)>,
    next: usize,
}

#[derive(Default)]
pub struct ControlBlocks {
    state: Mutex<Blocks>,
}

impl ControlBlocks {
    /// Allocates a zeroed block; `None` if [`CONTROL_BYTES`] are in use.
    pub fn take(&self, memory: &SharedMemory, bytes: usize) -> Option<usize> {
        let bytes = bytes.next_multiple_of(PAGE);
        let mut state = lock(&self.state);
        let state = &mut *state;
        state.releasing.retain(|(offset, bytes, release)| {
            let keep = !release.released();
            if !keep {
                state.free.entry(*bytes).or_default().push(*offset);
            }
            keep
        });
        if let Some(offset) = state.free.get_mut(&bytes).and_then(Vec::pop) {
            memory.clear(offset, bytes);
            return Some(offset);
        }
        if state.next + bytes > CONTROL_BYTES {
            return None;
        }
        state.next += bytes;
        Some(CONTROL + state.next - bytes)
    }

    pub fn give(&self, offset: usize, bytes: usize, condition: Arc<dyn ReleaseCondition>) {
        let mut state = lock(&self.state);
        state.releasing.push((offset, bytes.next_multiple_of(PAGE), condition));
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
        let word = |index: usize| memory.flag64(block + 8 * index);
        (0..words).for_each(|index| word(index).store(7, Ordering::Relaxed));
        control.give(block, PAGE + 1, Arc::new(Now));
        assert_eq!(control.take(&memory, PAGE + 1), Some(block));
        assert!((0..words).all(|index| word(index).load(Ordering::Relaxed) == 0));
    }
}
