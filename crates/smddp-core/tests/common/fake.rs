//! A link to nobody, which does what a test says.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use smddp_core::Communicator;
use smddp_transport::{Fault, Head, Link, Mail, Mismatch, Sleeper, Stream, Wiring};

/// One of two ranks, of which the other never comes.
#[derive(Clone, Default)]
pub(crate) struct Fake {
    /// Every operation begins with a panic, on threads whose names contain this.
    pub(crate) panics: Option<&'static str>,
    /// Something moves at every look.
    pub(crate) busy: bool,
    /// The other rank is gone.
    pub(crate) lost: bool,
    pub(crate) panicked: Arc<AtomicU64>,
    pub(crate) poisoned: Arc<AtomicU64>,
}

impl Fake {
    pub(crate) fn comm(&self, timeout: Duration) -> Communicator {
        Communicator::over(Box::new(self.clone()), &[0, 0], "fake", timeout)
    }
}

impl Link for Fake {
    fn rank(&self) -> usize {
        0
    }
    fn size(&self) -> usize {
        2
    }
    fn slot_bytes(&self) -> usize {
        0
    }
    fn turn(&mut self) -> bool {
        self.busy
    }
    fn begin(&mut self, _: u64, _: Head, _: &Wiring) -> bool {
        let thread = std::thread::current();
        if self.panics.is_some_and(|which| thread.name().unwrap_or_default().contains(which)) {
            self.panicked.fetch_add(1, Ordering::SeqCst);
            panic!("offset {} outside of memory", 77);
        }
        false
    }
    fn cell(&mut self, _: usize) -> Option<*mut u8> {
        None
    }
    fn publish(&mut self, _: usize, _: usize) {}
    fn message(&mut self, _: usize) -> Result<Option<*const u8>, Mismatch> {
        Ok(None)
    }
    fn release(&mut self, _: usize) {}
    fn settle(&mut self) -> Result<bool, Mismatch> {
        Ok(true)
    }
    fn end(&mut self) {}
    fn far(&self) -> bool {
        false
    }
    fn flush(&mut self) {}
    fn arrived(&self, _: usize, _: u64) -> Option<bool> {
        Some(false)
    }
    fn head_of(&self, _: usize, _: u64) -> Option<Head> {
        None
    }
    fn mail_open(&mut self, _: usize, _: Mail) -> Option<Stream> {
        None
    }
    fn mail_cell(&mut self, _: Stream) -> Option<(*mut u8, usize)> {
        None
    }
    fn mail_publish(&mut self, _: Stream, _: usize) {}
    fn mail_close(&mut self, _: Stream) {}
    fn mail_next(&mut self, _: usize) -> Option<(Mail, Stream)> {
        None
    }
    fn mail_piece(&mut self, _: usize, _: Stream) -> Option<(*const u8, usize)> {
        None
    }
    fn mail_release(&mut self, _: usize, _: Stream) {}
    fn faults(&mut self) -> Vec<Fault> {
        self.lost.then(|| Fault::Lost { rank: 1, how: "died".to_owned() }).into_iter().collect()
    }
    fn poison(&mut self, _: &str) {
        self.poisoned.fetch_add(1, Ordering::SeqCst);
    }
    fn leave(&mut self) {}
    fn describe(&self, rank: usize) -> String {
        format!("rank {rank} (nobody)")
    }
    fn sleeper(&self) -> Box<dyn Sleeper> {
        Box::new(Never)
    }
}

struct Never;

impl Sleeper for Never {
    fn ring(&self) {}
    fn drowse(&self) -> u32 {
        0
    }
    fn rise(&self) {}
    fn sleep(&self, _: u32, _: &[(std::os::fd::RawFd, i16)], _: Duration) {
        std::thread::yield_now();
    }
}
