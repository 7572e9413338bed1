//! Server of the rendezvous store: one thread, with bounds on connections and memory.
//!
//! A connection counts as a member once its first request is complete, which [`crate::store::Client`] sends when it
//! connects. Connections without a request are limited in number and time. The oldest is closed to accept a new connection,
//! so a flood of silent connections cannot block a rank.

mod connection;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod serving;
#[cfg(test)]
mod tests;
mod values;

use std::collections::HashMap;
use std::io;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::thread;
use std::time::Duration;

use serving::Serving;
use values::{Shared, Value};

/// The serving side. It stops when dropped.
pub struct Server {
    shared: Arc<Shared>,
    addr: SocketAddr,
}

impl Server {
    /// Listens at `addr` for `ranks` ranks. Port 0 selects a free port.
    ///
    /// # Errors
    /// A system call that creates a socket or the thread fails.
    pub fn bind(addr: impl ToSocketAddrs, ranks: usize) -> io::Result<Server> {
        let listener = TcpListener::bind(addr)?;
        listener.set_nonblocking(true)?;
        let addr = listener.local_addr()?;
        let shared = Arc::new(Shared::new(ranks)?);
        let mut serving = Serving::new(listener, Arc::clone(&shared))?;
        thread::Builder::new().name("smddp-store".into()).spawn(move || serving.run())?;
        Ok(Server { shared, addr })
    }

    /// Returns the address of the listener.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Raises the bounds to those of a group of `ranks` ranks.
    pub(crate) fn expect(&self, ranks: usize) {
        self.shared.expect(ranks);
    }

    /// Returns access to the values within the serving process. It does not keep the server alive.
    pub(crate) fn waiting_client(&self) -> WaitingClient {
        WaitingClient(Arc::clone(&self.shared))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::Release);
        let _ = rustix::io::write(&self.shared.wake, &1_u64.to_ne_bytes());
    }
}

/// Access to the server's values from its own process.
pub(crate) struct WaitingClient(Arc<Shared>);

impl WaitingClient {
    /// Waits for the value of `key` for at most `wait`.
    pub(crate) fn get(&self, key: &str, wait: Duration) -> Option<Vec<u8>> {
        let missing = |values: &mut HashMap<Vec<u8>, Arc<Value>>| !values.contains_key(key.as_bytes());
        let (values, _) = self
            .0
            .changed
            .wait_timeout_while(self.0.values(), wait, missing)
            .unwrap_or_else(PoisonError::into_inner);
        values.get(key.as_bytes()).map(|value| value.bytes.clone())
    }
}
