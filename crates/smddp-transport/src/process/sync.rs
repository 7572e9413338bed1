//! What orders memory. `models/` gives the files that use it others, which try every order there is.

pub(super) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
