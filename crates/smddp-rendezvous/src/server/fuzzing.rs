//! Requests of arbitrary bytes to the rendezvous store. See `fuzz/`.

use std::net::{TcpListener, TcpStream};
use std::sync::atomic::Ordering;

use super::connection::Connection;
use super::values::Shared;
use crate::protocol::GREETING;

/// A small bound that fuzz inputs can reach.
const MAX_BYTES: usize = 4096;

/// Processes requests of several clients. The first byte of each fragment selects the client, the second is the length.
///
/// # Panics
/// A bound is exceeded, or closed connections are still counted.
pub fn store(bytes: &[u8]) {
    thread_local!(static STREAM: Option<TcpStream> = connected());
    let streams = || STREAM.with(|stream| stream.as_ref()?.try_clone().ok());
    let Ok(shared) = Shared::new(1) else { return };
    shared.max_bytes.store(MAX_BYTES, Ordering::Relaxed);
    let mut clients: [Option<Connection>; 3] = [(); 3].map(|()| streams().map(Connection::new));
    if let Some(Some(greeted)) = clients.first_mut() {
        feed(greeted, &shared, GREETING);
    }
    let mut rest = bytes;
    while let [client, length, behind @ ..] = rest {
        let (piece, behind) = behind.split_at(behind.len().min((*length).into()));
        rest = behind;
        let slot = &mut clients[usize::from(*client) % 3];
        let Some(connection) = slot else { continue };
        if !feed(connection, &shared, piece) {
            close(connection, &shared);
            *slot = None;
        }
        assert!(shared.used.load(Ordering::Relaxed) <= MAX_BYTES, "the bound on bytes is exceeded");
    }
    clients.iter_mut().flatten().for_each(|connection| close(connection, &shared));
    drop(clients);
    shared.values().clear();
    assert_eq!(shared.used.load(Ordering::Relaxed), 0, "bytes of closed connections are counted");
    assert_eq!(shared.members.load(Ordering::Relaxed), 0, "closed connections count as members");
}

/// Processes `bytes` as one read. Returns false if the server closes the connection.
fn feed(connection: &mut Connection, shared: &Shared, bytes: &[u8]) -> bool {
    if shared.reserve(bytes.len()).is_err() {
        return false;
    }
    connection.input.extend_from_slice(bytes);
    loop {
        match connection.process(shared) {
            Ok(Some(_)) => {}
            Ok(None) => return true,
            Err(_) => return false,
        }
        // The reply is sent, or the deadline of the pending get has passed.
        connection.pending = None;
        (connection.output, connection.value) = (Vec::new(), None);
    }
}

fn close(connection: &mut Connection, shared: &Shared) {
    shared.release(connection.input.len());
    shared.members.fetch_sub(usize::from(connection.member), Ordering::Relaxed);
}

/// Returns a connected stream that transfers no bytes.
fn connected() -> Option<TcpStream> {
    let listener = TcpListener::bind("127.0.0.1:0").ok()?;
    TcpStream::connect(listener.local_addr().ok()?).ok()
}

#[cfg(test)]
#[path = "../../../../fuzz/over.rs"]
mod over;

#[test]
fn arbitrary_requests_never_exceed_the_bounds() {
    over::over("store", store, over::MANY);
}
