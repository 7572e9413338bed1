//! Atomic types and fences of `order.rs`. `models/` substitutes loom's types, which execute every allowed order.

pub(super) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
