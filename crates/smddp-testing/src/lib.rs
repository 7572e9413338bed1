//! Fuzz targets: one function per interface that receives external bytes.
//!
//! Each function returns for all inputs. Otherwise it has found a bug: a panic, a hang or an access to foreign
//! memory. `fuzz/` defines a libFuzzer target for each. The tests here run them over the stored corpus and over
//! random bytes. The targets are in the crates that they test, under the feature `testing`.

#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod handshake;

pub use handshake::handshake;
pub use smddp_group::fuzzing::{bootstrap, fabric, messages, rank_info, sink, tcp};
pub use smddp_net::fuzzing::frame;
pub use smddp_shm::fuzzing::shm;
pub use smddp_tcp::fuzzing::straggler_query;

#[cfg(test)]
#[path = "../../../fuzz/over.rs"]
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
