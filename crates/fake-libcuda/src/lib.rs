//! The shared object that `build.rs` makes of `fake/`: a CUDA driver for machines without a GPU.
//!
//! Device memory is host memory from `memfd_create`, so that other processes of the same user can map it (legacy
//! handles through /proc/PID/fd, allocations of the virtual-memory calls through descriptors). Streams are threads.
//! Waits for words compare as CUDA does. What a real driver refuses is refused, and what breaks a context there
//! (memory that is gone when a copy comes to it) breaks it here. Calls that free or unmap memory wait for all streams first.
//! New memory holds bytes of 0xA5. It cannot tell how fast anything is, nor what a GPU's memory order would allow.
//!
//! In a *checked world* (`fake/check.rs`) threads of one process are processes of their own, and every access that no wait orders
//! is reported, whatever the delays were; so are uses of memory that nothing orders before its end, waits that are never let
//! through, and what is left over. There a call that frees memory waits only until the streams are empty or stand at a wait.
//!
//! | variable | what it sets | else |
//! |---|---|---|
//! | `FAKE_CUDA_DEVICES` | devices; `CUDA_VISIBLE_DEVICES` (numbers) hides some and orders them | 1 |
//! | `FAKE_CUDA_VERSION` | the driver's version; functions newer than it are not found | 13000 |
//! | `FAKE_CUDA_SEED` | not 0: operations are delayed at random, by this seed | 0 |
//! | `FAKE_CUDA_MEMORY` | bytes of each device, for one process | 16 GiB |
//! | `FAKE_CUDA_NO_MEMOPS=1` | stream memory operations are not supported | |
//! | `FAKE_CUDA_NO_IPC=1` | no memory can be exported | |
//! | `FAKE_CUDA_LEAST_EXPORT` | handles of smaller allocations are refused, whatever is said of them | 0 |
//! | `FAKE_CUDA_NO_PEER=1` | devices do not reach each other; `0-2`: device 0 does not reach device 2 | |
//! | `FAKE_CUDA_NO_BATCH=1` | batched copies are there and not supported; 2: invalid | |
//! | `FAKE_CUDA_BAD_JIT=1` | no module compiles | |
//! | `FAKE_CUDA_WAITS=1` | calls that make, map, register or load wait for all streams, too | |
//! | `FAKE_CUDA_GRANULARITY` | bytes of the smallest physical memory | 2 MiB |
//! | `FAKE_CUDA_DROP` | "process.stream.number" of a wait of a checked world that is left out | |
//! | `FAKE_CUDA_PATIENCE` | milliseconds that a checked world waits for its streams | 20000 |
//! | `CUDA_DEVICE_MAX_CONNECTIONS=1` | all streams of a device share one queue | |
//!
//! Beside the driver's functions there are some for tests: `fake_calls(name)`, how often a function was called; `fake_open()`, how
//! many things are allocated, mapped, reserved, held or created; `fake_host`, by which `smddp-cuda` tells what the host does; and
//! those of a checked world (`fake/tell.rs`).

#[cfg(test)]
#[expect(dead_code, reason = "the driver uses the rest")]
#[path = "fake/clock.rs"]
mod clock;
#[cfg(test)]
#[expect(dead_code, reason = "the driver uses the rest")]
#[path = "fake/history.rs"]
mod history;
#[cfg(test)]
#[expect(dead_code, reason = "the driver uses the rest")]
#[path = "fake/shadow.rs"]
mod shadow;

/// Its file.
pub const PATH: &str = env!("FAKE_LIBCUDA");

/// The file of a driver too old to have most functions.
pub const ANCIENT: &str = env!("FAKE_LIBCUDA_ANCIENT");
