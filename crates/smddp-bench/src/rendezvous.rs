//! Where the ranks of a benchmark find each other.

use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use smddp_core::{Communicator, Pending, Store};

use crate::calls::Team;
use crate::error::{Error, Result};
use crate::launched::{Launched, Meet};
use crate::store::{Client, Server};

/// The group's name.
const NAME: &str = "bench";

/// Makes the communicator of all ranks. With `store` somebody else serves the store there; otherwise rank 0
/// does, at the meeting point.
pub(crate) fn join(launched: &Launched, store: Option<&str>, timeout: Duration) -> Result<Team> {
    join_counted(launched, store, timeout).map(|(team, _)| team)
}

/// And how many bytes went through the store for this rank.
pub(crate) fn join_counted(
    launched: &Launched,
    store: Option<&str>,
    timeout: Duration,
) -> Result<(Team, u64)> {
    let deadline = Instant::now() + timeout;
    let (rank, size) = (launched.rank, launched.size);
    let make = |store: &dyn Store| {
        let left = deadline.saturating_duration_since(Instant::now());
        let comm = Communicator::make(store, ("making it", NAME), rank, size, left, None)?;
        comm.set_timeout(timeout);
        Ok::<_, Error>(comm)
    };
    if let (None, None) = (store, &launched.meet) {
        let pending = Pending::new(NAME, rank, size, timeout)?;
        let card = pending.card();
        return Ok((Team::new(pending.connect(&[card])?), 0));
    }
    let meeting = Meeting::open(launched, store, deadline)?;
    let comm = make(&meeting.values).inspect_err(|_| meeting.leave(launched))?;
    let traffic = meeting.values.traffic();
    meeting.end(launched, deadline)?;
    Ok((Team::new(comm), traffic))
}

/// The store in which the ranks find each other; rank 0 may serve it.
pub(crate) struct Meeting {
    pub values: Values,
    server: Option<Server>,
}

impl Meeting {
    /// With `store` somebody else serves it there.
    pub(crate) fn open(launched: &Launched, store: Option<&str>, deadline: Instant) -> Result<Meeting> {
        let (server, addr) = match (store, &launched.meet) {
            (Some(addr), _) => (None, addr.to_owned()),
            (None, Some(meet)) if launched.rank == 0 => {
                let server = serve(meet)?;
                let addr = local(server.addr()).to_string();
                (Some(server), addr)
            }
            (None, Some(meet)) => (None, join_host(&meet.host, meet.port)),
            (None, None) => return Err(Error::Rendezvous("one rank alone meets nobody".into())),
        };
        Ok(Meeting { values: Values::new(Client::connect(&addr, deadline)?), server })
    }

    /// This rank asks nothing more.
    fn leave(&self, launched: &Launched) {
        let _ = self.values.set(&format!("taken/{}", launched.rank), b"");
    }

    /// The same, and the server outlives the last rank's last question.
    pub(crate) fn end(&self, launched: &Launched, deadline: Instant) -> Result<()> {
        self.leave(launched);
        let Some(server) = &self.server else { return Ok(()) };
        let wait = || deadline.saturating_duration_since(Instant::now());
        match (0..launched.size).find(|r| server.get(&format!("taken/{r}"), wait()).is_none()) {
            Some(rank) => Err(Error::Rendezvous(format!("rank {rank} vanished during the rendezvous"))),
            None => Ok(()),
        }
    }
}

/// The server's values, as the core asks for them.
pub(crate) struct Values(Mutex<Client>);

impl Values {
    fn new(client: Client) -> Self {
        Self(Mutex::new(client))
    }

    fn traffic(&self) -> u64 {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).traffic()
    }

    /// What some rank sets before `deadline`.
    pub(crate) fn wait(&self, key: &str, deadline: Instant) -> Result<Option<Vec<u8>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(key, deadline)
    }

    fn ask<T>(&self, what: impl FnOnce(&mut Client) -> Result<T>) -> smddp_core::Result<T> {
        let mut client = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        what(&mut client).map_err(|error| smddp_core::Error::System {
            what: "the ranks' rendezvous".to_owned(),
            why: error.to_string(),
        })
    }
}

impl Store for Values {
    fn set(&self, key: &str, value: &[u8]) -> smddp_core::Result<()> {
        self.ask(|client| client.set(key, value))
    }

    fn has(&self, keys: &[String]) -> smddp_core::Result<bool> {
        for key in keys {
            if self.ask(|client| client.get(key, Instant::now()))?.is_none() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn get(&self, key: &str) -> smddp_core::Result<Vec<u8>> {
        let absent = || Error::Rendezvous(format!("{key} is gone from the rendezvous"));
        self.ask(|client| client.get(key, Instant::now())?.ok_or_else(absent))
    }

    /// The store ends with the job.
    fn delete(&self, _key: &str) -> smddp_core::Result<()> {
        Ok(())
    }
}

/// The same values for one of several groups, under names of its own.
pub(crate) struct Prefixed<'a> {
    pub values: &'a Values,
    pub prefix: String,
}

impl Prefixed<'_> {
    fn key(&self, key: &str) -> String {
        format!("{}/{key}", self.prefix)
    }
}

impl Store for Prefixed<'_> {
    fn set(&self, key: &str, value: &[u8]) -> smddp_core::Result<()> {
        self.values.set(&self.key(key), value)
    }

    fn has(&self, keys: &[String]) -> smddp_core::Result<bool> {
        self.values.has(&keys.iter().map(|key| self.key(key)).collect::<Vec<_>>())
    }

    fn get(&self, key: &str) -> smddp_core::Result<Vec<u8>> {
        self.values.get(&self.key(key))
    }

    fn delete(&self, key: &str) -> smddp_core::Result<()> {
        self.values.delete(&self.key(key))
    }
}

/// Listens at the meeting point only, not on every interface of the host: except where its name means a
/// loopback address here while other hosts must reach it, or an address that is not this host's own (behind
/// address translation).
fn serve(meet: &Meet) -> Result<Server> {
    let addr = join_host(&meet.host, meet.port);
    let found = addr.to_socket_addrs().map_err(Error::io(format!("looking up {}", meet.host)))?.next();
    let found = found.ok_or_else(|| Error::Rendezvous(format!("{} has no address", meet.host)))?;
    let anywhere = SocketAddr::from(([0, 0, 0, 0], meet.port));
    let at = if found.ip().is_loopback() && !meet.local { anywhere } else { found };
    let bound = match Server::bind(at) {
        Err(e) if e.kind() == std::io::ErrorKind::AddrNotAvailable => Server::bind(anywhere),
        bound => bound,
    };
    bound.map_err(Error::io(format!(
        "listening at {addr}, where the ranks meet (choose another port with --port)"
    )))
}

/// How the serving process reaches itself.
fn local(addr: SocketAddr) -> SocketAddr {
    if addr.ip().is_unspecified() { SocketAddr::from(([127, 0, 0, 1], addr.port())) } else { addr }
}

fn join_host(host: &str, port: u16) -> String {
    if host.contains(':') && !host.starts_with('[') {
        format!("[{host}]:{port}")
    } else {
        format!("{host}:{port}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    /// One rank that meets the others at that server.
    fn make(
        server: &Server,
        rank: usize,
        size: usize,
        timeout: Duration,
    ) -> smddp_core::Result<Communicator> {
        let values =
            Values::new(Client::connect(&server.addr().to_string(), Instant::now() + timeout).unwrap());
        Communicator::make(&values, ("making it", NAME), rank, size, timeout, None)
    }

    #[test]
    fn all_ranks_meet_over_the_server() {
        let server = Server::bind("127.0.0.1:0").unwrap();
        thread::scope(|scope| {
            let server = &server;
            let rank = |rank| scope.spawn(move || make(server, rank, 5, Duration::from_secs(60)).unwrap());
            let ranks: Vec<_> = (0..5).map(rank).collect();
            for (rank, comm) in ranks.into_iter().map(|rank| rank.join().unwrap()).enumerate() {
                assert_eq!((comm.rank(), comm.size()), (rank, 5));
            }
        });
    }

    #[test]
    fn ranks_that_do_not_arrive_are_named() {
        let server = Server::bind("127.0.0.1:0").unwrap();
        let error = make(&server, 1, 3, Duration::from_millis(500)).err().unwrap().to_string();
        assert!(error.contains("no card from ranks 0, 2"), "{error}");
    }

    #[test]
    fn a_taken_port_is_named() {
        let other = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = other.local_addr().unwrap().port();
        let error = serve(&Meet { host: "127.0.0.1".into(), port, local: true }).err().unwrap().to_string();
        assert!(error.contains(&port.to_string()) && error.contains("--port"), "{error}");
    }
}
