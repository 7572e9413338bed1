//! Copies: single and batched.

use crate::api;
use crate::memory::read;
use crate::operation::{Copy, Operation};
use crate::state::*;
use crate::streams;
use crate::types::*;
use crate::{os, views};

fn enqueue_copies(stream: CUstream, wanted: impl Iterator<Item = (u64, u64, usize)>) -> Answer {
    let handle = streams::stream(stream)?;
    let mut host = false;
    let mut copies = Vec::new();
    for (to, from, bytes) in wanted {
        let memory = read();
        let known = |at| memory.find(at).is_some();
        let to_known = known(to);
        if (to_known && !memory.covers(to, bytes)) || (known(from) && !memory.covers(from, bytes)) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let read_before = if known(from) {
            None
        } else {
            let mut bytes = vec![0; bytes];
            if views::belongs_to_other_process(from) || !os::peek(from, &mut bytes) {
                return Err(CUDA_ERROR_INVALID_VALUE);
            }
            Some(bytes)
        };
        host |= !to_known;
        copies.push(Copy { to, from, bytes, to_known, read_before });
    }
    handle.submit(Operation::Copy(copies));
    if host {
        // A copy to pageable memory returns after completion, as in the real driver.
        handle.wait();
    }
    Ok(())
}

unsafe fn batch(
    to: *mut CUdeviceptr,
    from: *mut CUdeviceptr,
    bytes: *mut usize,
    count: usize,
    attributes: *mut CUmemcpyAttributes,
    first: *mut usize,
    attribute_count: usize,
    stream: CUstream,
) -> Answer {
    match settings().no_batch {
        0 => {}
        1 => return Err(CUDA_ERROR_NOT_SUPPORTED),
        _ => return Err(CUDA_ERROR_INVALID_VALUE),
    }
    let invalid = Err(CUDA_ERROR_INVALID_VALUE);
    if count == 0 || attribute_count == 0 || attribute_count > count || *first != 0 {
        return invalid;
    }
    for i in 0..attribute_count {
        let set = &*attributes.add(i);
        if !(1..=3).contains(&set.src_access_order) || set.flags > 1 {
            return invalid;
        }
    }
    let all = |i: usize| (*to.add(i), *from.add(i), *bytes.add(i));
    if (0..count).map(all).any(|(to, from, bytes)| to == 0 || from == 0 || bytes == 0) {
        return invalid;
    }
    // Default streams reject batches.
    if matches!(stream, 0 | STREAM_LEGACY | STREAM_PER_THREAD) {
        return invalid;
    }
    enqueue_copies(stream, (0..count).map(all))
}

/// cuMemcpyBatchAsync of CUDA 12.8.
pub(crate) unsafe extern "C" fn memcpy_batch_12(
    to: *mut CUdeviceptr,
    from: *mut CUdeviceptr,
    bytes: *mut usize,
    count: usize,
    attributes: *mut CUmemcpyAttributes,
    first: *mut usize,
    attribute_count: usize,
    failed: *mut usize,
    stream: CUstream,
) -> CUresult {
    run_call("cuMemcpyBatchAsync", || {
        let done = batch(to, from, bytes, count, attributes, first, attribute_count, stream);
        if done.is_err() {
            failed.write(usize::MAX);
        }
        done
    })
}

/// cuMemcpyBatchAsync of CUDA 13.0.
pub(crate) unsafe extern "C" fn memcpy_batch_13(
    to: *mut CUdeviceptr,
    from: *mut CUdeviceptr,
    bytes: *mut usize,
    count: usize,
    attributes: *mut CUmemcpyAttributes,
    first: *mut usize,
    attribute_count: usize,
    stream: CUstream,
) -> CUresult {
    run_call("cuMemcpyBatchAsync_v2", || batch(to, from, bytes, count, attributes, first, attribute_count, stream))
}

api! {
    fn cuMemcpyAsync(to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: CUstream) {
        if bytes == 0 {
            return streams::stream(stream).map(drop);
        }
        enqueue_copies(stream, std::iter::once((to, from, bytes)))
    }
}
