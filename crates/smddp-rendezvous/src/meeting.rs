//! Where ranks find each other: rank 0 of those that were started together serves a small store.

use std::collections::HashMap;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use smddp_core::{Communicator, Pending, PerProcess, Store, after, interrupted};

use crate::error::{Error, Result};
use crate::launched::{Launched, Meet};
use crate::server::Server;
use crate::store::Client;

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
    let deadline = after(Instant::now(), timeout);
    let (rank, size) = (launched.rank, launched.size);
    smddp_core::check_size(name, size)?;
    if let (None, None) = (store, &launched.meet) {
        let pending = Pending::new(name, rank, size, timeout)?;
        let card = pending.card();
        return Ok(Joined { comm: pending.connect(&[card])?, traffic: 0 });
    }
    let meeting = Meeting::open(launched, store, deadline)?;
    let me = format!("pid {} on host {}", std::process::id(), host());
    if let Some(first) = meeting.values.wait(&taken(rank), Instant::now())?
        && !first.is_empty()
    {
        let first = String::from_utf8_lossy(&first);
        let text = format!(
            "two processes claim rank {rank} of group '{name}': {first}, which has joined already, and {me}"
        );
        return Err(smddp_core::Error::Topology(text).into());
    }
    let left = deadline.saturating_duration_since(Instant::now());
    let comm = Communicator::make(&meeting.values, (call, name), rank, size, left, None);
    let comm = comm.map_err(|error| {
        meeting.leave(launched, b"");
        meeting.explained(launched, error)
    })?;
    comm.set_timeout(timeout);
    let traffic = meeting.values.traffic();
    meeting.leave(launched, me.as_bytes());
    meeting.serve_last_requests(launched, deadline)?;
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
                let addr = served(&at, meet, launched)?;
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

    /// This rank sends no further request; `who` joined, if it did.
    fn leave(&self, launched: &Launched, who: &[u8]) {
        let _ = self.values.set(&taken(launched.rank), who);
    }

    /// Adds to a timeout that ranks of other hosts cannot reach this store, where that may be the cause.
    fn explained(&self, launched: &Launched, error: smddp_core::Error) -> smddp_core::Error {
        let (Some(serves), Some(meet)) = (&self.serves, &launched.meet) else { return error };
        let at = process().servers.get(serves).map(Server::addr);
        let Some(at) = at.filter(|at| at.ip().is_loopback() && !meet.local) else { return error };
        match error {
            smddp_core::Error::Timeout { what, group, after, missing, detail } => {
                let detail = format!(
                    "{detail} Rank 0 listens at {}, which '{}' means on this host and other hosts cannot reach: for ranks on \
                     other hosts {}",
                    at.ip(),
                    meet.host,
                    remedy()
                );
                smddp_core::Error::Timeout { what, group, after, missing, detail }
            }
            other => other,
        }
    }

    /// Ends this rank's part. Rank 0, which may be about to exit, serves the others' last requests first.
    ///
    /// # Errors
    /// A signal's.
    pub fn end(&self, launched: &Launched, deadline: Instant) -> Result<()> {
        self.leave(launched, b"");
        self.serve_last_requests(launched, deadline)
    }

    fn serve_last_requests(&self, launched: &Launched, deadline: Instant) -> Result<()> {
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

/// Listens at the meeting point's address only. Where its name is a loopback address here, only ranks of this host get in. Where
/// its address is not one of this host's own (behind address translation), the chosen network interface's address is used.
fn serve(meet: &Meet, launched: &Launched) -> Result<Server> {
    let (host, addr) = (&meet.host, join_host(&meet.host, meet.port));
    let listed: Vec<SocketAddr> =
        addr.to_socket_addrs().map_err(Error::io(format!("resolving the host name '{host}'")))?.collect();
    let outer = listed.iter().find(|found| meet.local || !found.ip().is_loopback());
    let at = outer.or(listed.first()).ok_or_else(|| Error::NotMet(format!("{host} has no address")))?;
    if let (None, Some(here)) = (outer, launched.local_size) {
        let elsewhere = launched.size.saturating_sub(here);
        return Err(Error::Usage(format!(
            "rank 0's address '{host}' is the loopback address {} on this host, and {elsewhere} of the {} ranks are on other \
             hosts: {}",
            at.ip(),
            launched.size,
            remedy()
        )));
    }
    let bound = match Server::bind(at, launched.size) {
        Err(e) if e.kind() == std::io::ErrorKind::AddrNotAvailable => {
            Server::bind(smddp_core::network_address(meet.port)?, launched.size)
        }
        bound => bound,
    };
    bound.map_err(|error| {
        let remedy = match error.kind() {
            std::io::ErrorKind::AddrInUse => {
                " (choose another port: `port=`, MASTER_PORT, or --port of smddp-bench)"
            }
            _ => "",
        };
        Error::io(format!("listening at {addr}, where the ranks meet{remedy}"))(error)
    })
}

/// Advice for a meeting point that is a loopback address.
fn remedy() -> String {
    format!(
        "set MASTER_ADDR (or address= of smddp.init) to an address of this host that they reach, the same on all ranks; this \
         host has {}",
        smddp_core::interfaces()
    )
}

/// The name of this host.
fn host() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// Where this process listens for those that meet at `at`: from the first time on.
fn served(at: &str, meet: &Meet, launched: &Launched) -> Result<SocketAddr> {
    let mut process = process();
    if let Some(server) = process.servers.get(at) {
        server.expect(launched.size);
        return Ok(server.addr());
    }
    let server = serve(meet, launched)?;
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
        let server = Server::bind("127.0.0.1:0", 5).unwrap();
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
        let server = Server::bind("127.0.0.1:0", 5).unwrap();
        let error = make(&server, 1, 3, Duration::from_millis(500)).err().unwrap().to_string();
        assert!(
            error.contains("ranks 0, 2 did not join group 'test' within 0.5 s (1 of 3 ranks joined"),
            "{error}"
        );
    }

    #[test]
    fn contradicting_ranks_are_named_immediately_and_alike_on_all_ranks() {
        let host = format!("pid {} on host {}", std::process::id(), host());
        let twice = format!("two processes claim rank 1 of group 'test': {host} and {host}");
        // Ranks with their world sizes; what each of them says.
        for (ranks, says) in [
            (vec![(0, 3), (1, 3), (1, 3)], twice.clone()),
            (vec![(1, 2), (1, 2)], twice),
            (vec![(0, 2), (1, 3), (2, 3)], "group 'test' has two world sizes: 2 on rank 0 (pid ".to_owned()),
            (vec![(0, 12), (1, 12), (8, 12), (9, 10)], "has two world sizes: 12 on rank ".to_owned()),
        ] {
            let server = Server::bind("127.0.0.1:0", 3).unwrap();
            let begun = Instant::now();
            thread::scope(|scope| {
                let make = |&(rank, size)| {
                    let server = &server;
                    scope.spawn(move || make(server, rank, size, Duration::from_secs(60)).err().unwrap())
                };
                let ranks: Vec<_> = ranks.iter().map(make).collect();
                for error in ranks.into_iter().map(|rank| rank.join().unwrap()) {
                    assert!(matches!(error, smddp_core::Error::Topology(_)), "{error:?}");
                    assert!(error.to_string().contains(&says), "{says}: {error}");
                    assert!(error.to_string().matches("group 'test'").count() == 1, "{error}");
                }
            });
            assert!(begun.elapsed() < Duration::from_secs(20), "{says}: {:?}", begun.elapsed());
        }
    }

    #[test]
    fn ranks_may_meet_again_at_the_same_place() {
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        thread::scope(|scope| {
            for rank in 0..3 {
                scope.spawn(move || {
                    let meet = Meet { host: "127.0.0.1".into(), port: free, local: true };
                    let launched = Launched {
                        rank,
                        size: 3,
                        local_rank: Some(rank),
                        local_size: Some(3),
                        meet: Some(meet),
                    };
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
        let error = serve(&at("127.0.0.1", port, true), &two(None)).err().unwrap().to_string();
        assert!(error.contains(&port.to_string()) && error.contains("--port"), "{error}");
    }

    fn at(host: &str, port: u16, local: bool) -> Meet {
        Meet { host: host.into(), port, local }
    }

    fn two(local_size: Option<usize>) -> Launched {
        Launched { rank: 0, size: 2, local_rank: None, local_size, meet: None }
    }

    #[test]
    fn the_store_never_listens_on_all_interfaces() {
        // (host, all ranks are on this host, ranks of this host, whether the store may listen)
        for (host, local, here, listens) in [
            ("127.0.0.1", true, Some(2), true),
            ("127.0.1.1", false, None, true),
            ("::1", false, None, true),
            ("127.0.1.1", false, Some(1), false),
            // An address for documentation, which no host has.
            ("192.0.2.1", false, Some(1), true),
        ] {
            match (serve(&at(host, 0, local), &two(here)), listens) {
                (Ok(server), true) => {
                    let found = server.addr().ip();
                    assert!(!found.is_unspecified(), "{host}: {found}");
                    assert_eq!(host.parse() == Ok(found), host != "192.0.2.1", "{host}: {found}");
                }
                (Err(error), false) => {
                    let text = error.to_string();
                    for part in
                        [host, "1 of the 2 ranks are on other hosts", "set MASTER_ADDR", "lo (127.0.0.1"]
                    {
                        assert!(text.contains(part), "{text}");
                    }
                }
                (Err(error), true) => panic!("{host}: {error}"),
                (Ok(server), false) => panic!("{host}: listens at {}", server.addr()),
            }
        }
    }
}
