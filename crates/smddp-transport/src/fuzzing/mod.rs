//! Fuzz targets: one function per interface that receives external bytes.
//!
//! Each function returns for all inputs. Otherwise it has found a bug: a panic, a hang or an access to foreign
//! memory. `fuzz/` defines a libFuzzer target for each. The tests here run them over the stored corpus and over
//! random bytes. Compiled for tests and under `cfg(fuzzing)`, which cargo-fuzz sets.

mod device;
mod fabric;
pub(crate) mod feed;
mod handshake;
mod headers;
pub(crate) mod line;
mod rank;
mod rank_infos;
mod script;
mod shm;
mod sink;
mod tcp;

pub use crate::bootstrap::fuzzing::bootstrap;
pub use fabric::fabric;
pub use handshake::handshake;
pub use headers::{frame, straggler_query};
pub(crate) use rank::endpoint;
pub use rank_infos::rank_info;
pub(crate) use script::Script;
pub use shm::shm;
pub use sink::{messages, sink};
pub use tcp::tcp;

#[cfg(test)]
#[path = "../../../../fuzz/over.rs"]
mod over;

#[cfg(test)]
mod tests {
    use super::over::{MANY, over};

    macro_rules! targets {
        ($($name:ident),*) => {$(
            #[test]
            fn $name() {
                over(stringify!($name), super::$name, MANY);
            }
        )*};
    }

    // Arbitrary bytes in arbitrary order.
    targets!(bootstrap, rank_info, fabric, frame, handshake, messages, shm, sink, straggler_query);

    #[test]
    fn tcp() {
        // Each input creates a group with threads and sockets.
        over("tcp", super::tcp, 100);
    }
}
