//! Stream-ordered waits and writes of words in memory.

use std::ffi::c_uint;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::api;
use crate::check::has_ended;
use crate::history::reached;
use crate::memory::{Kind, Range, read};
use crate::numbers::STREAM_MEM_OP_WRITE_VALUE_64;
use crate::operation::Operation;
use crate::state::*;
use crate::streams::{Handle, stream};
use crate::types::*;

/// Passes the word to `f` if a range covers it. Otherwise breaks the context and returns `None`.
fn with<T>(word: u64, f: impl FnOnce(&AtomicU64) -> T) -> Option<T> {
    // Holds the lock during the access, so that the memory remains mapped.
    let memory = read();
    if !memory.covers(word, 8) {
        break_context(
            CUDA_ERROR_ILLEGAL_ADDRESS,
            &format!("a stream accesses the word at {word:#x}, which is not mapped"),
        );
        return None;
    }
    Some(f(unsafe { AtomicU64::from_ptr(word as *mut u64) }))
}

/// Waits in the stream's thread until the word has reached the value and `passes` returns true. Also ends when the
/// context breaks or the world ends.
pub(crate) fn wait(word: u64, value: u64, passes: impl Fn() -> bool) {
    let mut polls = 0u32;
    while let Some(found) = with(word, |word| word.load(Ordering::Acquire)) {
        if broken() != CUDA_SUCCESS || has_ended(process()) || reached(found, value) && passes() {
            return;
        }
        polls = polls.saturating_add(1);
        if polls < 64 {
            std::thread::yield_now();
        } else {
            std::thread::sleep(Duration::from_micros(if polls < 1000 { 20 } else { 200 }));
        }
    }
}

pub(crate) fn write(word: u64, value: u64) {
    with(word, |word| {
        std::sync::atomic::fence(Ordering::SeqCst);
        word.store(value, Ordering::Release);
    });
}

fn enqueue(handle: &Handle, word: u64, operation: Operation) -> Answer {
    // A stream cannot write words in another process's device memory.
    let theirs = matches!(read().find(word), Some((_, Range { kind: Kind::Imported, .. })));
    if theirs && matches!(operation, Operation::Write { .. }) {
        return Err(CUDA_ERROR_NOT_SUPPORTED);
    }
    if !word.is_multiple_of(8) || !read().covers(word, 8) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    handle.submit(operation);
    Ok(())
}

fn handle(number: CUstream) -> Answer<Handle> {
    if !settings().memops {
        return Err(CUDA_ERROR_NOT_SUPPORTED);
    }
    stream(number)
}

api! {
    fn cuStreamWaitValue64_v2(stream: CUstream, word: CUdeviceptr, value: u64, flags: c_uint) {
        let handle = handle(stream)?;
        if flags != STREAM_WAIT_VALUE_GEQ {
            // The fake supports no other comparison.
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        enqueue(&handle, word, Operation::Wait { word, value })
    }

    fn cuStreamWriteValue64_v2(stream: CUstream, word: CUdeviceptr, value: u64, flags: c_uint) {
        let handle = handle(stream)?;
        if flags != STREAM_WRITE_VALUE_DEFAULT {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        enqueue(&handle, word, Operation::Write { word, value })
    }

    fn cuStreamBatchMemOp_v2(stream: CUstream, count: c_uint, operations: *mut CUstreamBatchMemOpParams, flags: c_uint) {
        let handle = handle(stream)?;
        if flags != 0 || count == 0 || count >= 256 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let operations = std::slice::from_raw_parts(operations, count as usize);
        let made = |operation: &CUstreamBatchMemOpParams| {
            let (word, value) = (operation.address, operation.value);
            match (operation.operation, operation.flags) {
                (STREAM_MEM_OP_WAIT_VALUE_64, STREAM_WAIT_VALUE_GEQ) => Ok((word, Operation::Wait { word, value })),
                (STREAM_MEM_OP_WRITE_VALUE_64, STREAM_WRITE_VALUE_DEFAULT) => Ok((word, Operation::Write { word, value })),
                _ => Err(CUDA_ERROR_INVALID_VALUE),
            }
        };
        for (word, operation) in operations.iter().map(made).collect::<Answer<Vec<_>>>()? {
            enqueue(&handle, word, operation)?;
        }
        Ok(())
    }
}
