//! Client of the rendezvous store ([`crate::Server`]): each rank sets its keys once and waits for the others' keys until a deadline.

use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::thread;
use std::time::{Duration, Instant};

use smddp_core::interrupted;

use crate::error::{Error, Result};
use crate::protocol::{DELETE, GET, GREETING, MAX_KEY, MAX_VALUE, PATIENCE, SET};

/// Time for one attempt to connect; the next one resolves the host's name again.
const ATTEMPT: Duration = Duration::from_secs(1);
/// Pause between two attempts.
const RETRY: Duration = Duration::from_millis(20);
/// Connections that the server may close unanswered. A server under a flood closes some; another program closes all.
const CLOSED: u32 = 50;

/// One rank's connection.
pub(crate) struct Client {
    stream: TcpStream,
    addr: String,
    /// Bytes both ways.
    traffic: u64,
}

impl Client {
    /// Connects to `host:port`, again and again until `deadline`, for the server may start after us.
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
                    return Err(Error::NotMet(format!("no rendezvous at {addr}: {error}")));
                }
                Err(error) => {
                    closed += u32::from(error.kind() == io::ErrorKind::UnexpectedEof);
                    if closed > CLOSED {
                        return Err(Error::NotMet(format!("no rendezvous at {addr}: {}", other_program())));
                    }
                    if Instant::now() + RETRY >= deadline {
                        return Err(Error::NotMet(format!(
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
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(left + PATIENCE))?;
        let mut client = Client { stream, addr: addr.into(), traffic: 0 };
        // With the first request the server counts this connection as a member's.
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

    /// A connection to the first of the host's addresses that has one. One that drops what is sent to it costs an attempt's time.
    fn reach(addr: &str, left: Duration) -> io::Result<TcpStream> {
        let mut last = io::Error::new(io::ErrorKind::NotFound, "its name has no address");
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
            return Err(Error::NotMet(format!("{key}: {} bytes are too many for the store", value.len())));
        }
        let mut message = request(SET, key, value.len() as u32);
        message.extend_from_slice(value);
        self.traffic += message.len() as u64;
        let sent = self.stream.write_all(&message);
        sent.map_err(|e| self.lost(e))
    }

    /// The value of `key`, or `None` when nobody set it before `deadline`.
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
        self.stream.set_read_timeout(Some(Duration::from_millis(millis.into()) + PATIENCE))?;
        let message = request(GET, key, millis);
        self.stream.write_all(&message)?;
        let mut head = [0; 5];
        self.stream.read_exact(&mut head)?;
        let len = u32::from_le_bytes([head[1], head[2], head[3], head[4]]) as usize;
        if len > MAX_VALUE {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "an answer of impossible length"));
        }
        let mut value = vec![0; len];
        self.stream.read_exact(&mut value)?;
        self.traffic += (message.len() + head.len() + value.len()) as u64;
        Ok((head[0] == 1).then_some(value))
    }

    /// Bytes that went to the server and came from it.
    pub(crate) fn traffic(&self) -> u64 {
        self.traffic
    }

    fn lost(&self, error: io::Error) -> Error {
        Error::NotMet(format!("lost the rendezvous at {}: {error}", self.addr))
    }
}

fn other_program() -> io::Error {
    let text = "another program listens there, not smddp of this version (choose another port)";
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
    fn a_get_waits_for_the_set() {
        let server = Server::bind("127.0.0.1:0", 2).unwrap();
        let addr = server.addr().to_string();
        let other = addr.clone();
        let waiting =
            thread::spawn(move || Client::connect(&other, soon()).unwrap().get("card/1", soon()).unwrap());
        let mut client = Client::connect(&addr, soon()).unwrap();
        client.set("card/0", b"").unwrap();
        client.set("card/1", b"hello").unwrap();
        assert_eq!(waiting.join().unwrap().as_deref(), Some(&b"hello"[..]));
        assert_eq!(client.get("card/0", soon()).unwrap().as_deref(), Some(&b""[..]));
        assert_eq!(server.waiter().get("card/1", Duration::ZERO).as_deref(), Some(&b"hello"[..]));
    }

    #[test]
    fn a_get_ends_at_its_deadline() {
        let server = Server::bind("127.0.0.1:0", 2).unwrap();
        let mut client = Client::connect(&server.addr().to_string(), soon()).unwrap();
        assert_eq!(client.get("card/7", Instant::now() + Duration::from_millis(30)).unwrap(), None);
        client.set("card/7", b"late").unwrap();
        assert_eq!(client.get("card/7", soon()).unwrap().as_deref(), Some(&b"late"[..]));
    }

    #[test]
    fn what_is_deleted_is_gone() {
        let server = Server::bind("127.0.0.1:0", 2).unwrap();
        let mut client = Client::connect(&server.addr().to_string(), soon()).unwrap();
        client.set("card/0", b"x").unwrap();
        client.delete("card/0").unwrap();
        assert_eq!(client.get("card/0", Instant::now()).unwrap(), None);
    }

    #[test]
    fn a_client_may_start_before_the_server() {
        // A port that was free a moment ago: nobody listens there yet.
        let addr = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let early = thread::spawn(move || Client::connect(&addr.to_string(), soon()));
        let _server = Server::bind(addr, 2).unwrap();
        assert!(early.join().unwrap().is_ok());
    }

    #[test]
    fn a_stranger_on_the_port_is_named() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = listener.local_addr().unwrap().to_string();
        let stranger =
            thread::spawn(move || listener.accept().unwrap().0.write_all(b"HTTP/1.1 400 Bad Request"));
        let error = Client::connect(&addr, soon()).err().unwrap().to_string();
        assert!(error.contains("another program") && error.contains(&addr), "{error}");
        stranger.join().unwrap().unwrap();
    }

    #[test]
    fn nobody_there_is_an_error_at_the_deadline() {
        let addr = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
        let error = Client::connect(&addr, Instant::now()).err().unwrap().to_string();
        assert!(error.contains(&addr), "{error}");
    }

    #[test]
    fn a_host_that_drops_everything_is_an_error_at_the_deadline() {
        // An address for documentation, which no host has: no answer comes, or a router's that there is none.
        let begun = Instant::now();
        let error = Client::connect("192.0.2.1:29500", begun + Duration::from_millis(300)).err().unwrap();
        assert!(error.to_string().contains("does not answer at 192.0.2.1:29500"), "{error}");
        assert!(begun.elapsed() < Duration::from_secs(3), "{:?}", begun.elapsed());
    }

    #[test]
    fn values_have_a_limit() {
        let server = Server::bind("127.0.0.1:0", 2).unwrap();
        let mut client = Client::connect(&server.addr().to_string(), soon()).unwrap();
        assert!(client.set("card/0", &vec![0; MAX_VALUE + 1]).is_err());
        assert!(client.set("card/0", &vec![0; MAX_VALUE]).is_ok());
    }
}
