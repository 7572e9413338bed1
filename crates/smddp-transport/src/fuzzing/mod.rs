//! What comes from outside of this process, made of arbitrary bytes: a function for each border.
//!
//! Each of them returns whatever the bytes are, or it has found a bug: a panic, a hang, or memory that is not its own.
//! `fuzz/` makes a libFuzzer target of each; here they go over the corpus that is kept there and over random bytes.
//! Built for tests and under `cfg(fuzzing)`, which cargo-fuzz sets.

mod device;
mod fabric;
pub(crate) mod feed;
mod headers;
pub(crate) mod line;
mod rank;
mod rank_infos;
mod script;
mod shm;
mod sink;
mod tcp;
mod unix;

pub use crate::bootstrap::fuzzing::bootstrap;
pub use fabric::fabric;
pub use headers::{frame, hello, straggler_query};
pub(crate) use rank::endpoint;
pub use rank_infos::rank_info;
pub(crate) use script::Script;
pub use shm::shm;
pub use sink::{messages, sink};
pub use tcp::tcp;
pub use unix::unix;

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

    // Whatever bytes arrive there, in whatever order.
    targets!(bootstrap, rank_info, fabric, frame, hello, messages, shm, sink, straggler_query, unix);

    #[test]
    fn tcp() {
        // Each makes a group, with its threads and sockets.
        over("tcp", super::tcp, 100);
    }
}
