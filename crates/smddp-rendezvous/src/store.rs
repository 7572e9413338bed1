//! Client of the rendezvous store ([`crate::Server`]). Each rank sets its keys once and waits for the keys of other ranks
//! until a deadline.

use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::thread;
use std::time::{Duration, Instant};

use smddp_core::interrupted;

use crate::error::{Error, Result};
use crate::protocol::{DELETE, GET, GREETING, MAX_KEY, MAX_VALUE, REQUEST_TIMEOUT, SET};

/// Time limit of one connection attempt. Each attempt resolves the host name again.
const ATTEMPT: Duration = Duration::from_secs(1);
/// Pause between two attempts.
const RETRY: Duration = Duration::from_millis(20);
/// Number of connections that the server may close without a reply. An overloaded server closes some of them, another
/// program closes all.
const MAX_CLOSED: u32 = 50;

/// Returns true if all addresses of `host:port` are loopback addresses.
fn is_loopback(addr: &str) -> bool {
    addr.to_socket_addrs().is_ok_and(|mut found| found.all(|one| one.ip().is_loopback()))
}

/// The connection of one rank.
pub(crate) struct Client {
    stream: TcpStream,
    addr: String,
    /// Bytes sent and received.
    traffic: u64,
}

impl Client {
    /// Connects to `host:port`. Retries until `deadline`, because the server may start later than this rank.
    pub(crate) fn connect(addr: &str, deadline: Instant) -> Result<Client> {
        let mut closed = 0;
        loop {
            if interrupted() {
                return Err(smddp_core::Error::Interrupted.into());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            match Self::attempt(addr, left) {
                Ok(client) => return Ok(client),
                Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                    return Err(Error::Rendezvous(format!("no rendezvous at {addr}: {error}")));
                }
                Err(error) if error.kind() == io::ErrorKind::NetworkUnreachable && is_loopback(addr) => {
                    return Err(Error::Rendezvous(format!(
                        "no rendezvous at {addr}: {error}: the loopback interface is down (`ip link set lo up`)"
                    )));
                }
                Err(error) => {
                    closed += u32::from(error.kind() == io::ErrorKind::UnexpectedEof);
                    if closed > MAX_CLOSED {
                        return Err(Error::Rendezvous(format!(
                            "no rendezvous at {addr}: {}",
                            other_program()
                        )));
                    }
                    if Instant::now() + RETRY >= deadline {
                        return Err(Error::Rendezvous(format!(
                            "rank 0 does not answer at {addr} ({error}); is it running, and is the address right?"
                        )));
                    }
                    thread::sleep(RETRY);
                }
            }
        }
    }

    fn attempt(addr: &str, left: Duration) -> io::Result<Client> {
        let stream = Self::reach(addr, left)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(REQUEST_TIMEOUT))?;
        stream.set_write_timeout(Some(left + REQUEST_TIMEOUT))?;
        let mut client = Client { stream, addr: addr.into(), traffic: 0 };
        // After the first request the server counts this connection as a member.
        client.greet().and_then(|()| client.ask("", 0)).map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => other_program(),
            io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => io::ErrorKind::UnexpectedEof.into(),
            _ => error,
        })?;
        client.traffic = 0;
        Ok(client)
    }

    fn greet(&mut self) -> io::Result<()> {
        self.stream.write_all(GREETING)?;
        let mut greeting = [0; GREETING.len()];
        self.stream.read_exact(&mut greeting)?;
        if greeting == *GREETING { Ok(()) } else { Err(other_program()) }
    }

    /// Connects to the first reachable address of the host. An address that drops packets takes the time of one attempt.
    fn reach(addr: &str, left: Duration) -> io::Result<TcpStream> {
        let mut last = io::Error::new(io::ErrorKind::NotFound, "the host name has no address");
        for socket in addr.to_socket_addrs()? {
            match TcpStream::connect_timeout(&socket, left.clamp(RETRY, ATTEMPT)) {
                Ok(stream) => return Ok(stream),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    pub(crate) fn set(&mut self, key: &str, value: &[u8]) -> Result<()> {
        if key.len() > MAX_KEY || value.len() > MAX_VALUE {
            return Err(Error::Rendezvous(format!(
                "the value of {key} has {} bytes: expected at most {MAX_VALUE}",
                value.len()
            )));
        }
        let mut message = request(SET, key, value.len() as u32);
        message.extend_from_slice(value);
        self.traffic += message.len() as u64;
        let sent = self.stream.write_all(&message);
        sent.map_err(|e| self.lost(e))
    }

    /// Returns the value of `key`, or `None` if it is not set before `deadline`.
    pub(crate) fn get(&mut self, key: &str, deadline: Instant) -> Result<Option<Vec<u8>>> {
        let wait = deadline.saturating_duration_since(Instant::now());
        let millis = u32::try_from(wait.as_millis()).unwrap_or(u32::MAX);
        self.ask(key, millis).map_err(|e| self.lost(e))
    }

    pub(crate) fn delete(&mut self, key: &str) -> Result<()> {
        let sent = self.stream.write_all(&request(DELETE, key, 0));
        sent.map_err(|e| self.lost(e))
    }

    fn ask(&mut self, key: &str, millis: u32) -> io::Result<Option<Vec<u8>>> {
        self.stream.set_read_timeout(Some(Duration::from_millis(millis.into()) + REQUEST_TIMEOUT))?;
        let message = request(GET, key, millis);
        self.stream.write_all(&message)?;
        let mut head = [0; 5];
        self.stream.read_exact(&mut head)?;
        let len = u32::from_le_bytes([head[1], head[2], head[3], head[4]]) as usize;
        if len > MAX_VALUE {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "the reply is longer than the largest value",
            ));
        }
        let mut value = vec![0; len];
        self.stream.read_exact(&mut value)?;
        self.traffic += (message.len() + head.len() + value.len()) as u64;
        Ok((head[0] == 1).then_some(value))
    }

    /// Returns the number of bytes sent and received.
    pub(crate) fn traffic(&self) -> u64 {
        self.traffic
    }

    fn lost(&self, error: io::Error) -> Error {
        Error::Rendezvous(format!("lost the rendezvous at {}: {error}", self.addr))
    }
}

fn other_program() -> io::Error {
    let text = "another program, or another version of smddp, listens there; choose another port";
    io::Error::new(io::ErrorKind::InvalidData, text)
}

fn request(op: u8, key: &str, number: u32) -> Vec<u8> {
    let mut message = vec![op];
    message.extend_from_slice(&(key.len() as u16).to_le_bytes());
    message.extend_from_slice(&number.to_le_bytes());
    message.extend_from_slice(key.as_bytes());
    message
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;
    use crate::Server;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    #[test]
    fn get_waits_for_the_set() {
        let server = Server::bind("127.0.0.1:0", 2).unwrap();
        let addr = server.addr().to_string();
        let other = addr.clone();
        let waiting =
            thread::spawn(move || Client::connect(&other, soon()).unwrap().get("key/1", soon()).unwrap());
        let mut client = Client::connect(&addr, soon()).unwrap();
        client.set("key/0", b"").unwrap();
        client.set("key/1", b"hello").unwrap();
        assert_eq!(waiting.join().unwrap().as_deref(), Some(&b"hello"[..]));
        assert_eq!(client.get("key/0", soon()).unwrap().as_deref(), Some(&b""[..]));
        assert_eq!(server.waiting_client().get("key/1", Duration::ZERO).as_deref(), Some(&b"hello"[..]));
    }

    #[test]
    fn get_ends_at_its_deadline() {
        let server = Server::bind("127.0.0.1:0", 2).unwrap();
        let mut client = Client::connect(&server.addr().to_string(), soon()).unwrap();
        assert_eq!(client.get("key/7", Instant::now() + Duration::from_millis(30)).unwrap(), None);
        client.set("key/7", b"late").unwrap();
        assert_eq!(client.get("key/7", soon()).unwrap().as_deref(), Some(&b"late"[..]));
    }

    #[test]
    fn deleted_key_has_no_value() {
        let server = Server::bind("127.0.0.1:0", 2).unwrap();
        let mut client = Client::connect(&server.addr().to_string(), soon()).unwrap();
        client.set("key/0", b"x").unwrap();
        client.delete("key/0").unwrap();
        assert_eq!(client.get("key/0", Instant::now()).unwrap(), None);
    }

    #[test]
    fn client_may_start_before_the_server() {
        // A port that was free a moment ago: no server listens there yet.
        let addr = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let early = thread::spawn(move || Client::connect(&addr.to_string(), soon()));
        let _server = Server::bind(addr, 2).unwrap();
        assert!(early.join().unwrap().is_ok());
    }

    #[test]
    fn other_program_on_the_port_is_reported() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = listener.local_addr().unwrap().to_string();
        let other_program_thread =
            thread::spawn(move || listener.accept().unwrap().0.write_all(b"HTTP/1.1 400 Bad Request"));
        let error = Client::connect(&addr, soon()).err().unwrap().to_string();
        assert!(error.contains("another program") && error.contains(&addr), "{error}");
        other_program_thread.join().unwrap().unwrap();
    }

    #[test]
    fn unused_port_is_an_error_at_the_deadline() {
        let addr = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
        let error = Client::connect(&addr, Instant::now()).err().unwrap().to_string();
        assert!(error.contains(&addr), "{error}");
    }

    #[test]
    fn host_that_drops_packets_is_an_error_at_the_deadline() {
        // A documentation address without a host: no reply arrives, or a router reports that it is unreachable.
        let begun = Instant::now();
        let error = Client::connect("192.0.2.1:29500", begun + Duration::from_millis(300)).err().unwrap();
        assert!(error.to_string().contains("does not answer at 192.0.2.1:29500"), "{error}");
        assert!(begun.elapsed() < Duration::from_secs(3), "{:?}", begun.elapsed());
    }

    #[test]
    fn value_size_is_bounded() {
        let server = Server::bind("127.0.0.1:0", 2).unwrap();
        let mut client = Client::connect(&server.addr().to_string(), soon()).unwrap();
        assert!(client.set("key/0", &vec![0; MAX_VALUE + 1]).is_err());
        assert!(client.set("key/0", &vec![0; MAX_VALUE]).is_ok());
    }
}
