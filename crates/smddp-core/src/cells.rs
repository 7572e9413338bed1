//! How cells are written: through the caches, or past them where the readers' caches are far away.
//!
//! Between cores that share a last-level cache an ordinary store is best: the reader finds the cell there. Between
//! cores that do not (another core complex, another socket, or a virtual machine whose processors were moved apart)
//! taking a line from a distant reader's cache costs several times the copy, and streaming stores, which only have
//! to tell it to forget the line, are up to four times quicker. The distance may change while a job runs, so it is
//! not asked for once: the time that ordinary writes take is watched, and looked at anew now and then.

use std::time::Instant;

/// Smaller pieces are not worth a look at the clock.
const LEAST: usize = 16 << 10;
/// An ordinary write that takes longer than this for a byte is slow: about a third of what a near one takes more.
const SLOW_PICOSECONDS: u128 = 80;
/// Slow writes in a row before streaming, and fewer of them to go on with it.
const SLOW: u32 = 4;
const STILL_SLOW: u32 = 2;
/// Cells that are streamed before the next look.
const STREAMED: u32 = 256;

/// What one communicator learnt about its cells.
#[derive(Default)]
pub(crate) struct Cells {
    slow: u32,
    left: u32,
}

impl Cells {
    /// Calls `write` to fill a cell of `bytes`; its argument says whether to stream.
    #[inline]
    pub(crate) fn write(&mut self, bytes: usize, write: impl FnOnce(bool)) {
        if bytes < LEAST {
            return write(false);
        }
        if self.left > 0 {
            self.left -= 1;
            return write(true);
        }
        let begun = Instant::now();
        write(false);
        self.learn(begun.elapsed().as_nanos() * 1000 > bytes as u128 * SLOW_PICOSECONDS);
    }

    fn learn(&mut self, slow: bool) {
        self.slow = if slow { self.slow + 1 } else { 0 };
        if self.slow >= SLOW {
            self.slow = SLOW - STILL_SLOW;
            self.left = STREAMED;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_cells_are_streamed_and_looked_at_again() {
        let mut cells = Cells::default();
        for _ in 0..SLOW - 1 {
            cells.learn(true);
        }
        cells.learn(false);
        assert_eq!(cells.left, 0, "one quick write starts the count anew");
        for _ in 0..SLOW {
            cells.learn(true);
        }
        let mut streamed = 0;
        while cells.left > 0 {
            cells.write(LEAST, |stream| streamed += u32::from(stream));
        }
        assert_eq!(streamed, STREAMED);
        for _ in 0..STILL_SLOW {
            cells.learn(true);
        }
        assert_eq!(cells.left, STREAMED, "still slow: it goes on");
    }

    #[test]
    fn small_cells_are_never_streamed() {
        let mut cells = Cells { slow: 0, left: 5 };
        cells.write(LEAST - 1, |stream| assert!(!stream));
        assert_eq!(cells.left, 5);
    }
}
