//! Where ranks find each other: rank 0 of those that were started together serves a small store.

use std::collections::HashMap;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use smddp_core::{Communicator, Pending, PerProcess, Store, interrupted};

use crate::error::{Error, Result};
use crate::launched::{Launched, Meet};
use crate::store::{Client, Server};

/// How long rank 0 stays for the others' last questions; who has vanished by then is the group's to find.
const LAST_QUESTIONS: Duration = Duration::from_secs(10);

/// Between two looks whether Ctrl-C came.
const LOOK: Duration = Duration::from_millis(50);

/// A group that its ranks have made.
pub struct Joined {
    pub comm: Communicator,
    /// Bytes that went to the store and came from it for this rank.
    pub traffic: u64,
}

/// Makes the communicator of all ranks that were started together; `timeout` is for the making, and the deadline of
/// every call that has none of its own. With `store` (`host:port`) somebody else serves the store there; otherwise rank 0
/// does, at the meeting point. May be called again: each call of a process is the next group of those ranks.
///
/// # Errors
/// [`Error::NotMet`] and [`Error::Io`] where rank 0 does not serve; those of [`Communicator::make`].
pub fn join(
    (call, name): (&str, &str),
    launched: &Launched,
    store: Option<&str>,
    timeout: Duration,
) -> Result<Joined> {
    let deadline = Instant::now() + timeout;
    let (rank, size) = (launched.rank, launched.size);
    if let (None, None) = (store, &launched.meet) {
        let pending = Pending::new(name, rank, size, timeout)?;
        let card = pending.card();
        return Ok(Joined { comm: pending.connect(&[card])?, traffic: 0 });
    }
    let meeting = Meeting::open(launched, store, deadline)?;
    let left = deadline.saturating_duration_since(Instant::now());
    let comm = Communicator::make(&meeting.values, (call, name), rank, size, left, None);
    let comm = comm.inspect_err(|_| meeting.leave(launched))?;
    comm.set_timeout(timeout);
    let traffic = meeting.values.traffic();
    meeting.end(launched, deadline)?;
    Ok(Joined { comm, traffic })
}

/// What this process serves, and how often each rank in it met others at an address. Servers last as long as their
/// process, so that nobody asks one that is about to end.
#[derive(Default)]
struct Process {
    servers: HashMap<String, Server>,
    rounds: HashMap<(String, usize), u64>,
}

static PROCESS: PerProcess<Mutex<Process>> = PerProcess::new();

fn process() -> MutexGuard<'static, Process> {
    PROCESS.get().lock().unwrap_or_else(PoisonError::into_inner)
}

/// The store in which the ranks find each other; rank 0 may serve it.
pub struct Meeting {
    pub values: Values,
    /// Where this rank serves it.
    serves: Option<String>,
}

impl Meeting {
    /// With `store` (`host:port`) somebody else serves it there. Waits until `deadline` for it to be there.
    ///
    /// # Errors
    /// [`Error::Io`] where rank 0 cannot listen; [`Error::NotMet`] where nobody serves, or a stranger does.
    pub fn open(launched: &Launched, store: Option<&str>, deadline: Instant) -> Result<Meeting> {
        let (serves, addr, at) = match (store, &launched.meet) {
            (Some(addr), _) => (None, addr.to_owned(), addr.to_owned()),
            (None, Some(meet)) if launched.rank == 0 => {
                let at = join_host(&meet.host, meet.port);
                let addr = served(&at, meet)?;
                (Some(at.clone()), local(addr).to_string(), at)
            }
            (None, Some(meet)) => {
                let at = join_host(&meet.host, meet.port);
                (None, at.clone(), at)
            }
            (None, None) => return Err(Error::NotMet("one rank alone meets nobody".into())),
        };
        let client = Client::connect(&addr, deadline)?;
        let mut process = process();
        let round = process.rounds.entry((at, launched.rank)).or_default();
        *round += 1;
        Ok(Meeting { values: Values { client: Mutex::new(client), round: *round }, serves })
    }

    /// This rank asks nothing more.
    fn leave(&self, launched: &Launched) {
        let _ = self.values.set(&taken(launched.rank), b"");
    }

    /// The same, and rank 0, which may be about to exit, stays for the others' last questions.
    ///
    /// # Errors
    /// A signal's.
    pub fn end(&self, launched: &Launched, deadline: Instant) -> Result<()> {
        self.leave(launched);
        let Some(serves) = &self.serves else { return Ok(()) };
        let until = deadline.min(Instant::now() + LAST_QUESTIONS);
        for rank in 0..launched.size {
            let key = self.values.key(&taken(rank));
            loop {
                let left = until.saturating_duration_since(Instant::now());
                let asked = process().servers.get(serves).map(Server::waiter);
                if left.is_zero() || asked.is_none_or(|server| server.get(&key, left.min(LOOK)).is_some()) {
                    break;
                }
                if interrupted() {
                    return Err(smddp_core::Error::Interrupted.into());
                }
            }
        }
        Ok(())
    }
}

fn taken(rank: usize) -> String {
    format!("taken/{rank}")
}

/// The server's values, as the core asks for them.
pub struct Values {
    client: Mutex<Client>,
    /// How often these ranks have met: each time under names of its own.
    round: u64,
}

impl Values {
    fn client(&self) -> MutexGuard<'_, Client> {
        self.client.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn key(&self, key: &str) -> String {
        format!("{}/{key}", self.round)
    }

    fn traffic(&self) -> u64 {
        self.client().traffic()
    }

    /// What some rank sets before `deadline`.
    ///
    /// # Errors
    /// [`Error::NotMet`] where the server is gone.
    pub fn wait(&self, key: &str, deadline: Instant) -> Result<Option<Vec<u8>>> {
        self.client().get(&self.key(key), deadline)
    }

    fn ask<T>(&self, what: impl FnOnce(&mut Client) -> Result<T>) -> smddp_core::Result<T> {
        what(&mut self.client()).map_err(|error| match error {
            Error::Core(error) => error,
            error => {
                smddp_core::Error::System { what: "the ranks' rendezvous".to_owned(), why: error.to_string() }
            }
        })
    }
}

impl Store for Values {
    fn set(&self, key: &str, value: &[u8]) -> smddp_core::Result<()> {
        self.ask(|client| client.set(&self.key(key), value))
    }

    fn has(&self, keys: &[String]) -> smddp_core::Result<bool> {
        for key in keys {
            if self.ask(|client| client.get(&self.key(key), Instant::now()))?.is_none() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn get(&self, key: &str) -> smddp_core::Result<Vec<u8>> {
        let absent = || Error::NotMet(format!("{key} is gone from the rendezvous"));
        self.ask(|client| client.get(&self.key(key), Instant::now())?.ok_or_else(absent))
    }

    fn delete(&self, key: &str) -> smddp_core::Result<()> {
        self.ask(|client| client.delete(&self.key(key)))
    }
}

/// The same values for one of several groups, under names of its own.
pub struct Prefixed<'a> {
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
    let found = found.ok_or_else(|| Error::NotMet(format!("{} has no address", meet.host)))?;
    let anywhere = SocketAddr::from(([0, 0, 0, 0], meet.port));
    let at = if found.ip().is_loopback() && !meet.local { anywhere } else { found };
    let bound = match Server::bind(at) {
        Err(e) if e.kind() == std::io::ErrorKind::AddrNotAvailable => Server::bind(anywhere),
        bound => bound,
    };
    bound.map_err(Error::io(format!(
        "listening at {addr}, where the ranks meet (choose another port: `port=`, MASTER_PORT, or --port of smddp-bench)"
    )))
}

/// Where this process listens for those that meet at `at`: from the first time on.
fn served(at: &str, meet: &Meet) -> Result<SocketAddr> {
    let mut process = process();
    if let Some(server) = process.servers.get(at) {
        return Ok(server.addr());
    }
    let server = serve(meet)?;
    let addr = server.addr();
    process.servers.insert(at.to_owned(), server);
    Ok(addr)
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
        let client = Client::connect(&server.addr().to_string(), Instant::now() + timeout).unwrap();
        let values = Values { client: Mutex::new(client), round: 1 };
        Communicator::make(&values, ("making it", "test"), rank, size, timeout, None)
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
    fn ranks_may_meet_again_at_the_same_place() {
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        thread::scope(|scope| {
            for rank in 0..3 {
                scope.spawn(move || {
                    let meet = Meet { host: "127.0.0.1".into(), port: free, local: true };
                    let launched =
                        Launched { rank, size: 3, local_rank: rank, local_size: Some(3), meet: Some(meet) };
                    for turn in 0..3 {
                        let name = format!("group {turn}");
                        let joined = join(("join", &name), &launched, None, Duration::from_secs(60)).unwrap();
                        assert_eq!((joined.comm.rank(), joined.comm.size()), (rank, 3));
                        joined.comm.barrier(smddp_core::Options::default()).unwrap();
                    }
                });
            }
        });
    }

    #[test]
    fn a_taken_port_is_named() {
        let other = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = other.local_addr().unwrap().port();
        let error = serve(&Meet { host: "127.0.0.1".into(), port, local: true }).err().unwrap().to_string();
        assert!(error.contains(&port.to_string()) && error.contains("--port"), "{error}");
    }
}
