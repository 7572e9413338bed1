//! loom's atomic types, with the requested memory orders or weaker ones.

/// Defines the module `sync` for the included source files, with these orders in place of the requested ones.
macro_rules! atomics {
    (store: $store:expr, load: $load:expr, fence: $fence:expr) => {
        pub(crate) mod sync {
            pub(crate) use loom::sync::atomic::{AtomicI64, Ordering};
            pub(crate) use loom::sync::{Condvar, Mutex, MutexGuard};

            pub(crate) fn fence(order: Ordering) {
                let fence: fn(Ordering) -> Option<Ordering> = $fence;
                if let Some(order) = fence(order) {
                    loom::sync::atomic::fence(order);
                }
            }

            macro_rules! atomic {
                ($name:ident, $value:ty) => {
                    #[derive(Default)]
                    pub(crate) struct $name(loom::sync::atomic::$name);

                    impl $name {
                        pub(crate) fn new(value: $value) -> Self {
                            Self(loom::sync::atomic::$name::new(value))
                        }
                        pub(crate) fn load(&self, order: Ordering) -> $value {
                            let load: fn(Ordering) -> Ordering = $load;
                            self.0.load(load(order))
                        }
                        pub(crate) fn store(&self, value: $value, order: Ordering) {
                            let store: fn(Ordering) -> Ordering = $store;
                            self.0.store(value, store(order));
                        }
                    }
                };
            }
            atomic!(AtomicBool, bool);
            atomic!(AtomicU32, u32);
            atomic!(AtomicU64, u64);

            impl AtomicU32 {
                pub(crate) fn fetch_add(&self, value: u32, order: Ordering) -> u32 {
                    let store: fn(Ordering) -> Ordering = $store;
                    self.0.fetch_add(value, store(order))
                }
                pub(crate) fn fetch_sub(&self, value: u32, order: Ordering) -> u32 {
                    let store: fn(Ordering) -> Ordering = $store;
                    self.0.fetch_sub(value, store(order))
                }
                pub(crate) fn fetch_or(&self, value: u32, order: Ordering) -> u32 {
                    let store: fn(Ordering) -> Ordering = $store;
                    self.0.fetch_or(value, store(order))
                }
                pub(crate) fn fetch_and(&self, value: u32, order: Ordering) -> u32 {
                    let store: fn(Ordering) -> Ordering = $store;
                    self.0.fetch_and(value, store(order))
                }
                pub(crate) fn compare_exchange(
                    &self,
                    current: u32,
                    new: u32,
                    success: Ordering,
                    failure: Ordering,
                ) -> Result<u32, u32> {
                    let load: fn(Ordering) -> Ordering = $load;
                    self.0.compare_exchange(current, new, load(success), load(failure))
                }
            }
        }
    };
}

pub(crate) use atomics;

pub(crate) mod error {
    #[derive(Clone, Debug)]
    pub struct Error;
    pub type Result<T> = std::result::Result<T, Error>;
}
