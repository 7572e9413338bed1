//! The heap of control blocks inside a process's shared memory.
//!
//! A block that is given back may still be read by slower peers, so it is used again only when its
//! [`ReleaseCondition`] says that they are done.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use super::layout::{CONTROL, CONTROL_BYTES, PAGE};
use super::memory::SharedMemory;
use super::pool::ReleaseCondition;
use crate::lock;

#[derive(Default)]
struct Blocks {
    /// Free blocks by size.
    free: BTreeMap<usize, Vec<usize>>,
    /// (offset, bytes, when)
    leaving: Vec<(usize, usize, Arc<dyn ReleaseCondition>)>,
    next: usize,
}

#[derive(Default)]
pub(crate) struct ControlBlocks {
    state: Mutex<Blocks>,
}

impl ControlBlocks {
    /// A zeroed block. `None` when a quarter of a gigabyte of groups is live at once.
    pub(crate) fn take(&self, memory: &SharedMemory, bytes: usize) -> Option<usize> {
        let bytes = bytes.next_multiple_of(PAGE);
        let mut state = lock(&self.state);
        let state = &mut *state;
        state.leaving.retain(|(offset, bytes, release)| {
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

    pub(crate) fn give(&self, offset: usize, bytes: usize, when: Arc<dyn ReleaseCondition>) {
        let mut state = lock(&self.state);
        state.leaving.push((offset, bytes.next_multiple_of(PAGE), when));
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
    fn a_block_that_is_used_again_is_zero() {
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
