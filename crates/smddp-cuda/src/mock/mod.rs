//! A mock of devices: host memory, threads as streams, seeded delays, and every order checked.
//!
//! A [`World`] has devices that several *processes* share; a test gives each rank, a thread, a [`Process`] of its own.
//! Memory of one is known to another only by export and import, at another address, as with CUDA IPC.
//!
//! What is checked is not what happened to happen. Each stream, and the host threads of each process together, is an
//! actor with a vector clock, which learns
//!
//! - what the host did before it enqueued an operation (host to stream);
//! - what came before on the stream, or before an event that it waits for;
//! - from a wait for a word, what the *first* write that lets it through came after: a later one may be what it
//!   really saw, but nothing promises that;
//! - from `synchronize`, a passed event, or a word that the host reads (stream to host);
//! - what a test says by [`Process::hand_over`], for messages that the mock does not see.
//!
//! Two operations that touch the same bytes, one of which writes, must be ordered by that, or they are reported as a
//! race whatever the delays were. Lifetimes are held to the same order: every use is ordered before `free`, `close` or
//! `unregister`. Words are atomic: they do not race among themselves.
//!
//! Host threads of one process count as ordered among themselves, by luck or not: locks and channels are not seen.

mod allocate;
mod clock;
mod device;
mod memory;
mod random;
pub mod reduce;
mod report;
mod shadow;
mod share;
mod space;
mod state;
mod stream;
mod words;
mod world;

pub use device::MockDevice;
pub use report::{Fault, Operation, Report, Stall, WaitId, WaitSeen};
pub use world::{Memory, Order, Process, Script, World};
