//! What is enqueued on streams.

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
    /// What a checked world sees it read and write: address, bytes, and whether it writes.
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

/// Sides that the driver does not know are ordinary memory of the process.
pub(crate) struct Copy {
    pub(crate) to: u64,
    pub(crate) from: u64,
    pub(crate) bytes: usize,
    pub(crate) to_known: bool,
    /// Ordinary memory is read when the copy is asked for, as the driver does.
    pub(crate) read_before: Option<Vec<u8>>,
}

/// A place in a stream, passed or not.
#[derive(Default)]
pub(crate) struct Ticket {
    passed: Mutex<bool>,
    changed: Condvar,
    /// What came before it, in a checked world.
    pub(crate) knows: OnceLock<Clock>,
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
    // Held while the bytes move, so that nobody takes the memory away meanwhile.
    let memory = read();
    let &Copy { to, from, bytes, .. } = copy;
    if copy.read_before.is_none() && !memory.covers(from, bytes) {
        return break_context(
            CUDA_ERROR_ILLEGAL_ADDRESS,
            &format!("a copy reads {bytes} bytes at {from:#x}, not there"),
        );
    }
    if copy.to_known && !memory.covers(to, bytes) {
        return break_context(
            CUDA_ERROR_ILLEGAL_ADDRESS,
            &format!("a copy writes {bytes} bytes at {to:#x}, not there"),
        );
    }
    let from = copy.read_before.as_ref().map_or(from, |bytes| bytes.as_ptr() as u64);
    if copy.to_known {
        unsafe { std::ptr::copy(from as *const u8, to as *mut u8, bytes) };
    } else if !os::poke(to, from, bytes) {
        break_context(
            CUDA_ERROR_ILLEGAL_ADDRESS,
            &format!("a copy writes {bytes} bytes at {to:#x}, not there"),
        );
    }
}
