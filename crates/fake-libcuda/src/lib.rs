//! A CUDA driver for machines without a GPU: the shared library that `build.rs` builds from `fake/`.
//!
//! Device memory is host memory from `memfd_create`, so other processes of the same user can map it: legacy handles
//! through /proc/PID/fd, allocations of the virtual memory API through descriptors. Streams are threads. Waits on
//! words compare as in CUDA. The fake rejects the calls that a real driver rejects. Work that breaks a real context
//! (for example a copy of unmapped memory) breaks it here too. Calls that free or unmap memory first wait for all
//! streams. New memory contains 0xA5 bytes. The fake models neither performance nor a GPU's memory order.
//!
//! In a *checked world* (`fake/check.rs`) threads of one process represent processes. The world reports every access
//! that no wait orders, for all delays. It also reports uses of memory that are not ordered before its end,
//! waits that are never satisfied, and leaks. There a call that frees memory waits only until the streams are empty
//! or blocked in a wait.
//!
//! | variable | meaning | default |
//! |---|---|---|
//! | `FAKE_CUDA_DEVICES` | number of devices; `CUDA_VISIBLE_DEVICES` (numbers) hides and orders them | 1 |
//! | `FAKE_CUDA_VERSION` | the driver's version; newer functions are missing | 13000 |
//! | `FAKE_CUDA_SEED` | if not 0: the seed of random delays of operations | 0 |
//! | `FAKE_CUDA_MEMORY` | bytes of each device, for one process | 16 GiB |
//! | `FAKE_CUDA_NO_MEMOPS=1` | stream memory operations are not supported | |
//! | `FAKE_CUDA_NO_IPC=1` | no memory can be exported | |
//! | `FAKE_CUDA_LEAST_EXPORT` | the export of smaller allocations fails, whatever their attributes say | 0 |
//! | `FAKE_CUDA_NO_PEER=1` | no peer access between devices; `0-2`: device 0 has no access to device 2 | |
//! | `FAKE_CUDA_NO_BATCH=1` | batched copies exist and return "not supported"; 2: "invalid value" | |
//! | `FAKE_CUDA_BAD_JIT=1` | no module compiles | |
//! | `FAKE_CUDA_WAITS=1` | calls that create, map, register or load also wait for all streams | |
//! | `FAKE_CUDA_GRANULARITY` | granularity of physical memory in bytes | 2 MiB |
//! | `FAKE_CUDA_DROP` | "process.stream.number" of the wait that a checked world leaves out | |
//! | `FAKE_CUDA_PATIENCE` | time limit of a checked world for its streams, in milliseconds | 20000 |
//! | `CUDA_DEVICE_MAX_CONNECTIONS=1` | all streams of a device share one queue | |
//!
//! The library exports additional functions for tests. `fake_calls(name)` returns the number of calls of a function.
//! `fake_open()` returns the number of open objects (allocated, mapped, reserved, retained or created). `smddp-cuda`
//! reports host accesses with `fake_host`. `fake/query.rs` contains the functions of a checked world.

#![warn(missing_docs, clippy::missing_errors_doc, clippy::missing_panics_doc)]

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

/// Path of the fake driver.
pub const PATH: &str = env!("FAKE_LIBCUDA");

/// Path of a driver that is too old and lacks most functions.
pub const ANCIENT: &str = env!("FAKE_LIBCUDA_ANCIENT");
