//! What the ranks of a node share besides messages: a page of words each, and things that are handed over on request.
//!
//! Devices signal each other through the words and learn of each other's memory through what is lent. What the words
//! and the things mean is the core's.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};

/// Bytes of a rank's page.
pub const PAGE: usize = 4096;

/// What is handed over: bytes, and descriptors.
#[derive(Debug, Default)]
pub struct Lent {
    pub bytes: Vec<u8>,
    pub fds: Vec<OwnedFd>,
}

impl Lent {
    /// The most of each that one request hands over.
    pub const MOST_BYTES: usize = 32 << 10;
    pub const MOST_FDS: usize = 250;
}

/// Makes what is handed over, each time somebody asks for it, on a thread of the library.
pub type Maker = Box<dyn Fn() -> io::Result<Lent> + Send + Sync>;

/// One rank's view of what its node shares.
pub trait Board: Send + Sync {
    /// The page of `rank`: aligned to its size, zero at first, to be reached as atomics of eight bytes; `None` for a rank of
    /// another node. It lives as long as this board.
    fn page(&self, rank: usize) -> Option<*mut u8>;
    /// Devices know the pages from now on: they are not used for anything else, though the group may end.
    fn keep(&self);
    /// What ranks of this node may ask for under the number that comes back.
    fn lend(&self, maker: Maker) -> u64;
    fn withdraw(&self, token: u64);
    /// Asks `rank` for what it lends. Waits for its process, a few seconds at most.
    fn borrow(&self, rank: usize, token: u64) -> io::Result<Lent>;
}

/// What a process lends, by number.
#[derive(Default)]
pub(crate) struct Lending {
    state: Mutex<(u64, HashMap<u64, Arc<Maker>>)>,
}

impl Lending {
    pub(crate) fn lend(&self, maker: Maker) -> u64 {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.0 += 1;
        let token = state.0;
        state.1.insert(token, Arc::new(maker));
        token
    }

    pub(crate) fn withdraw(&self, token: u64) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).1.remove(&token);
    }

    pub(crate) fn make(&self, token: u64) -> io::Result<Lent> {
        let maker = self.state.lock().unwrap_or_else(PoisonError::into_inner).1.get(&token).cloned();
        let maker = maker.ok_or_else(|| io::Error::other(format!("nothing is lent under number {token}")))?;
        let lent = maker()?;
        if lent.bytes.len() > Lent::MOST_BYTES || lent.fds.len() > Lent::MOST_FDS {
            return Err(io::Error::other(format!(
                "{} bytes and {} descriptors are more than one answer holds",
                lent.bytes.len(),
                lent.fds.len()
            )));
        }
        Ok(lent)
    }
}
