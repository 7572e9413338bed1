//! Operations enqueued on streams.

use std::fmt;
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};

use crate::clock::Clock;
use crate::memory::read;
use crate::modules::Launch;
use crate::os;
use crate::state::*;
use crate::types::*;

pub(crate) enum Operation {
    Copy(Vec<Copy>),
    Wait { word: u64, value: u64 },
    Write { word: u64, value: u64 },
    Tick(Arc<Ticket>),
    Await(Arc<Ticket>),
    Launch(Launch),
}

impl Operation {
    /// Returns the ranges that a checked world checks: address, bytes, and true for a write.
    pub(crate) fn parts(&self) -> Vec<(u64, usize, bool)> {
        match self {
            Self::Copy(copies) => copies
                .iter()
                .flat_map(|copy| {
                    let from = copy.read_before.is_none().then_some((copy.from, copy.bytes, false));
                    from.into_iter().chain(copy.to_known.then_some((copy.to, copy.bytes, true)))
                })
                .collect(),
            Self::Launch(launch) => launch.parts(),
            _ => Vec::new(),
        }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Copy(copies) => copies.iter().try_for_each(|Copy { to, from, bytes, .. }| {
                write!(f, "copy of {bytes} bytes from {from:#x} to {to:#x}; ")
            }),
            Self::Wait { word, value } => write!(f, "wait until the word at {word:#x} has reached {value}"),
            Self::Write { word, value } => write!(f, "write of {value} to the word at {word:#x}"),
            Self::Tick(_) => f.write_str("record of an event"),
            Self::Await(_) => f.write_str("wait for an event"),
            Self::Launch(launch) => launch.fmt(f),
        }
    }
}

/// A copy. A side that is unknown to the driver is pageable memory of the process.
pub(crate) struct Copy {
    pub(crate) to: u64,
    pub(crate) from: u64,
    pub(crate) bytes: usize,
    pub(crate) to_known: bool,
    /// Pageable memory is read at the enqueue, as in the real driver.
    pub(crate) read_before: Option<Vec<u8>>,
}

/// One record of an event in a stream.
#[derive(Default)]
pub(crate) struct Ticket {
    passed: Mutex<bool>,
    changed: Condvar,
    /// Clock of the recording stream in a checked world.
    pub(crate) clock: OnceLock<Clock>,
}

impl Ticket {
    pub(crate) fn has_passed(&self) -> bool {
        *lock(&self.passed)
    }

    pub(crate) fn wait(&self) {
        let mut passed = lock(&self.passed);
        while !*passed {
            passed = self.changed.wait(passed).unwrap_or_else(PoisonError::into_inner);
        }
    }

    pub(crate) fn tick(&self) {
        *lock(&self.passed) = true;
        self.changed.notify_all();
    }
}

pub(crate) fn transfer(copy: &Copy) {
    // Holds the lock during the transfer, so that the memory remains mapped.
    let memory = read();
    let &Copy { to, from, bytes, .. } = copy;
    if copy.read_before.is_none() && !memory.covers(from, bytes) {
        return break_context(
            CUDA_ERROR_ILLEGAL_ADDRESS,
            &format!("a copy reads {bytes} bytes at {from:#x}, which are not mapped"),
        );
    }
    if copy.to_known && !memory.covers(to, bytes) {
        return break_context(
            CUDA_ERROR_ILLEGAL_ADDRESS,
            &format!("a copy writes {bytes} bytes at {to:#x}, which are not mapped"),
        );
    }
    let from = copy.read_before.as_ref().map_or(from, |bytes| bytes.as_ptr() as u64);
    if copy.to_known {
        unsafe { std::ptr::copy(from as *const u8, to as *mut u8, bytes) };
    } else if !os::poke(to, from, bytes) {
        break_context(
            CUDA_ERROR_ILLEGAL_ADDRESS,
            &format!("a copy writes {bytes} bytes at {to:#x}, which are not mapped"),
        );
    }
}
