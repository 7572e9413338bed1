//! Detection of deadlocks. A thread that waits for longer than about 0.4 s registers its wait. From 0.5 s on, its process
//! sends probes along the edges of the wait-for graph. A probe that returns has found a cycle; a second one confirms it.
//!
//! A process forwards a probe only while all of its threads that have ever made a call wait for the same rank. A rank in user
//! code therefore ends a probe. Each process checks by its own numbers that it has not made the awaited call, so a late
//! observation of another process cannot form a cycle. A cycle that a probe finds is stable: each of its ranks still waited
//! after the next one had been checked.
//!
//! Other code of this process may still make the awaited call: a thread without earlier calls, the callback of a future, or a
//! signal handler. A cycle is therefore only a possible deadlock, and by default its ranks only log it.
//!
//! `smddp status` and the warnings about long waits use the registered waits, too, even if the search is disabled.
//!
//! Without long waits the detection costs one check of a thread-local flag in each call.

mod prober;
mod registry;
mod view;
mod watch;

pub(crate) use self::prober::register_group;
pub(crate) use self::registry::stored_error;
pub(crate) use self::watch::WaitWatch;
