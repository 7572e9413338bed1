//! Asking ranks that do not drive how far they are: their processes' accepting threads answer.

use std::io::Read;
use std::net::TcpStream;
use std::time::{Duration, Instant};

use super::endpoint::TcpAddress;
use super::hello::{Purpose, hello};

/// All answers together are waited for this long.
const PATIENCE: Duration = Duration::from_millis(500);
/// More ranks than this are not asked: every one of them may be asking, too.
const MOST: usize = 256;

/// (rank, operations begun) of the ranks that answer.
pub(super) fn ask(me: usize, peers: Vec<(usize, TcpAddress)>) -> Vec<(usize, u64)> {
    let until = Instant::now() + PATIENCE;
    let left = || until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    let call = |address: &TcpAddress| -> std::io::Result<TcpStream> {
        use std::io::Write;
        let mut stream = TcpStream::connect_timeout(&address.socket, left())?;
        stream.write_all(&hello(&address.token, me, Purpose::Ask))?;
        Ok(stream)
    };
    // First all calls, then all answers, so that the slow ones wait together.
    let calls: Vec<_> = peers
        .into_iter()
        .take(MOST)
        .filter_map(|(peer, address)| Some((peer, call(&address).ok()?)))
        .collect();
    calls
        .into_iter()
        .filter_map(|(peer, mut stream)| {
            let mut begun = [0; 8];
            stream.set_read_timeout(Some(left())).ok()?;
            stream.read_exact(&mut begun).ok()?;
            Some((peer, u64::from_le_bytes(begun)))
        })
        .collect()
}
