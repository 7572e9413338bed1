//! Rendezvous of the ranks of a job through a key-value store that rank 0 serves.

use std::collections::HashMap;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use smddp_core::{Communicator, Pending, PerProcess, Store, after, host_name, interrupted, lock};

use crate::error::{Error, Result};
use crate::launch::{LaunchEnvironment, RendezvousAddress};
use crate::server::Server;
use crate::store::Client;

/// Time limit of rank 0 for serving the last requests of the other ranks. The group detects ranks that died meanwhile.
const LAST_REQUESTS: Duration = Duration::from_secs(10);

/// Interval between two checks for Ctrl-C.
const SIGNAL_CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// The group of all ranks of a job.
pub struct JoinedWorld {
    /// Communicator of all ranks.
    pub comm: Communicator,
    /// Bytes that this rank exchanged with the store.
    pub traffic: u64,
}

/// Creates the communicator of all ranks of the job.
///
/// `timeout` limits the creation, and is the default deadline of the group's calls. With `store` (`host:port`) another
/// process serves the store at that address; otherwise rank 0 serves it at the rendezvous address. Each call creates the
/// next group of the same ranks.
///
/// # Errors
/// [`Error::Rendezvous`] and [`Error::Io`] if rank 0 does not serve the store, and the errors of [`Communicator::make`].
pub fn join(
    (call, name): (&str, &str),
    launch: &LaunchEnvironment,
    store: Option<&str>,
    timeout: Duration,
) -> Result<JoinedWorld> {
    let deadline = after(Instant::now(), timeout);
    let (rank, size) = (launch.rank, launch.size);
    smddp_core::check_size(name, size)?;
    if let (None, None) = (store, &launch.address) {
        let pending = Pending::new(name, rank, size, timeout)?;
        let own = pending.rank_info();
        return Ok(JoinedWorld { comm: pending.connect(&[own])?, traffic: 0 });
    }
    let rendezvous = Rendezvous::open(launch, store, deadline)?;
    let me = format!("pid {} on host {}", std::process::id(), host_name());
    if let Some(first) = rendezvous.values.wait(&left_key(rank), Instant::now())?
        && !first.is_empty()
    {
        let first = String::from_utf8_lossy(&first);
        let text = format!(
            "two processes claim rank {rank} of group '{name}': {first}, which has joined already, and {me}"
        );
        return Err(smddp_core::Error::Topology(text).into());
    }
    let left = deadline.saturating_duration_since(Instant::now());
    let comm = Communicator::make(&rendezvous.values, (call, name), rank, size, left, None);
    let comm = comm.map_err(|error| {
        rendezvous.leave(launch, b"");
        rendezvous.with_loopback_hint(launch, error)
    })?;
    comm.set_timeout(timeout);
    let traffic = rendezvous.values.traffic();
    rendezvous.leave(launch, me.as_bytes());
    rendezvous.serve_last_requests(launch, deadline)?;
    Ok(JoinedWorld { comm, traffic })
}

/// The servers of this process, and the number of rendezvous of each of its ranks by address. A server runs until the
/// process exits, so that a request cannot reach a closing server.
#[derive(Default)]
struct Process {
    servers: HashMap<String, Server>,
    rounds: HashMap<(String, usize), u64>,
}

static PROCESS: PerProcess<Mutex<Process>> = PerProcess::new();

fn process() -> MutexGuard<'static, Process> {
    lock(PROCESS.get())
}

/// A connection to the rendezvous store, which rank 0 may serve.
pub struct Rendezvous {
    /// Client of the store.
    pub values: StoreClient,
    /// The address at which this rank serves the store.
    serves: Option<String>,
}

impl Rendezvous {
    /// Connects to the store. With `store` (`host:port`) another process serves it at that address. Waits for the server until
    /// `deadline`.
    ///
    /// # Errors
    /// [`Error::Io`] if rank 0 cannot listen; [`Error::Rendezvous`] if no server or another program is at the address.
    pub fn open(launch: &LaunchEnvironment, store: Option<&str>, deadline: Instant) -> Result<Rendezvous> {
        let (serves, addr, at) = match (store, &launch.address) {
            (Some(addr), _) => (None, addr.to_owned(), addr.to_owned()),
            (None, Some(address)) if launch.rank == 0 => {
                let at = join_host(&address.host, address.port);
                let addr = server_address(&at, address, launch)?;
                (Some(at.clone()), local(addr).to_string(), at)
            }
            (None, Some(address)) => {
                let at = join_host(&address.host, address.port);
                (None, at.clone(), at)
            }
            (None, None) => return Err(Error::Rendezvous("a single rank has no rendezvous".into())),
        };
        let client = Client::connect(&addr, deadline)?;
        let mut process = process();
        let round = process.rounds.entry((at, launch.rank)).or_default();
        *round += 1;
        Ok(Rendezvous { values: StoreClient { client: Mutex::new(client), round: *round }, serves })
    }

    /// Publishes that this rank sends no further request. `who` describes the process, or is empty if it did not join.
    fn leave(&self, launch: &LaunchEnvironment, who: &[u8]) {
        let _ = self.values.set(&left_key(launch.rank), who);
    }

    /// Extends a timeout error with a hint if the store listens at a loopback address that other hosts cannot reach.
    fn with_loopback_hint(&self, launch: &LaunchEnvironment, error: smddp_core::Error) -> smddp_core::Error {
        let (Some(serves), Some(address)) = (&self.serves, &launch.address) else { return error };
        let at = process().servers.get(serves).map(Server::addr);
        let Some(at) = at.filter(|at| at.ip().is_loopback() && !address.local) else { return error };
        match error {
            smddp_core::Error::Timeout { operation, group, after, missing, detail } => {
                let detail = format!(
                    "{detail} Rank 0 listens at {}, which '{}' means on this host and other hosts cannot reach: for ranks on \
                     other hosts {}",
                    at.ip(),
                    address.host,
                    remedy()
                );
                smddp_core::Error::Timeout { operation, group, after, missing, detail }
            }
            other => other,
        }
    }

    /// Ends this rank's use of the store. Rank 0, which may exit afterwards, first serves the last requests of other ranks.
    ///
    /// # Errors
    /// A signal interrupted the wait.
    pub fn end(&self, launch: &LaunchEnvironment, deadline: Instant) -> Result<()> {
        self.leave(launch, b"");
        self.serve_last_requests(launch, deadline)
    }

    fn serve_last_requests(&self, launch: &LaunchEnvironment, deadline: Instant) -> Result<()> {
        let Some(serves) = &self.serves else { return Ok(()) };
        let until = deadline.min(Instant::now() + LAST_REQUESTS);
        for rank in 0..launch.size {
            let key = self.values.key(&left_key(rank));
            loop {
                let left = until.saturating_duration_since(Instant::now());
                let client = process().servers.get(serves).map(Server::waiting_client);
                if left.is_zero()
                    || client.is_none_or(|server| server.get(&key, left.min(SIGNAL_CHECK_INTERVAL)).is_some())
                {
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

fn left_key(rank: usize) -> String {
    format!("taken/{rank}")
}

/// Client of the server's values, with the interface of the core's stores.
pub struct StoreClient {
    client: Mutex<Client>,
    /// Number of rendezvous of these ranks, used as a key prefix.
    round: u64,
}

impl StoreClient {
    fn client(&self) -> MutexGuard<'_, Client> {
        lock(&self.client)
    }

    fn key(&self, key: &str) -> String {
        format!("{}/{key}", self.round)
    }

    fn traffic(&self) -> u64 {
        self.client().traffic()
    }

    /// Returns the value of `key`, or `None` if it is not set before `deadline`.
    ///
    /// # Errors
    /// [`Error::Rendezvous`] if the connection to the server is lost.
    pub fn wait(&self, key: &str, deadline: Instant) -> Result<Option<Vec<u8>>> {
        self.client().get(&self.key(key), deadline)
    }

    fn request<T>(&self, operation: impl FnOnce(&mut Client) -> Result<T>) -> smddp_core::Result<T> {
        operation(&mut self.client()).map_err(|error| match error {
            Error::Core(error) => error,
            error => smddp_core::Error::System {
                operation: "the ranks' rendezvous".to_owned(),
                reason: error.to_string(),
            },
        })
    }
}

impl Store for StoreClient {
    fn set(&self, key: &str, value: &[u8]) -> smddp_core::Result<()> {
        self.request(|client| client.set(&self.key(key), value))
    }

    fn has(&self, keys: &[String]) -> smddp_core::Result<bool> {
        for key in keys {
            if self.request(|client| client.get(&self.key(key), Instant::now()))?.is_none() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn get(&self, key: &str) -> smddp_core::Result<Vec<u8>> {
        let absent = || Error::Rendezvous(format!("the rendezvous store has no value for {key}"));
        self.request(|client| client.get(&self.key(key), Instant::now())?.ok_or_else(absent))
    }

    fn delete(&self, key: &str) -> smddp_core::Result<()> {
        self.request(|client| client.delete(&self.key(key)))
    }
}

/// The values of one of several groups, with a key prefix.
pub struct PrefixStore<'a> {
    /// Client of the store.
    pub values: &'a StoreClient,
    /// Prefix of the group's keys, which a slash follows.
    pub prefix: String,
}

impl PrefixStore<'_> {
    fn key(&self, key: &str) -> String {
        format!("{}/{key}", self.prefix)
    }
}

impl Store for PrefixStore<'_> {
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

/// Starts the server at the rendezvous address only. If that is a loopback address, only ranks of this host can connect. If
/// the address does not belong to this host (behind address translation), the address of the selected interface is used.
fn serve(address: &RendezvousAddress, launch: &LaunchEnvironment) -> Result<Server> {
    let (host, addr) = (&address.host, join_host(&address.host, address.port));
    let listed: Vec<SocketAddr> =
        addr.to_socket_addrs().map_err(Error::io(format!("resolving the host name '{host}'")))?.collect();
    let outer = listed.iter().find(|found| address.local || !found.ip().is_loopback());
    let at = outer.or(listed.first()).ok_or_else(|| Error::Rendezvous(format!("{host} has no address")))?;
    if let (None, Some(here)) = (outer, launch.local_size) {
        let elsewhere = launch.size.saturating_sub(here);
        return Err(Error::Usage(format!(
            "rank 0's address '{host}' is the loopback address {} on this host, and {elsewhere} of the {} ranks are on other \
             hosts: {}",
            at.ip(),
            launch.size,
            remedy()
        )));
    }
    let bound = match Server::bind(at, launch.size) {
        Err(e) if e.kind() == std::io::ErrorKind::AddrNotAvailable => {
            Server::bind(smddp_core::network_address(address.port)?, launch.size)
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
        Error::io(format!("listening at the rendezvous address {addr}{remedy}"))(error)
    })
}

/// Returns advice for a rendezvous address that is a loopback address.
fn remedy() -> String {
    format!(
        "set MASTER_ADDR (or address= of smddp.init) to an address of this host that they reach, the same on all ranks; this \
         host has {}",
        smddp_core::interfaces()
    )
}

/// Returns the socket address of this process's server for the rendezvous address `at`. Starts the server on the first call.
fn server_address(at: &str, address: &RendezvousAddress, launch: &LaunchEnvironment) -> Result<SocketAddr> {
    let mut process = process();
    if let Some(server) = process.servers.get(at) {
        server.expect(launch.size);
        return Ok(server.addr());
    }
    let server = serve(address, launch)?;
    let addr = server.addr();
    process.servers.insert(at.to_owned(), server);
    Ok(addr)
}

/// Returns the address at which the serving process connects to itself.
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

    /// Creates the group's communicator of one rank through `server`.
    fn make(
        server: &Server,
        rank: usize,
        size: usize,
        timeout: Duration,
    ) -> smddp_core::Result<Communicator> {
        let client = Client::connect(&server.addr().to_string(), Instant::now() + timeout).unwrap();
        let values = StoreClient { client: Mutex::new(client), round: 1 };
        Communicator::make(&values, ("the test", "test"), rank, size, timeout, None)
    }

    #[test]
    fn all_ranks_join_through_the_server() {
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
    fn missing_ranks_are_named() {
        let server = Server::bind("127.0.0.1:0", 5).unwrap();
        let error = make(&server, 1, 3, Duration::from_millis(500)).err().unwrap().to_string();
        assert!(
            error.contains("ranks 0, 2 did not join group 'test' within 0.5 s (1 of 3 ranks joined"),
            "{error}"
        );
    }

    #[test]
    fn contradicting_ranks_are_reported_immediately_and_equally_on_all_ranks() {
        let host = format!("pid {} on host {}", std::process::id(), host_name());
        let twice = format!("two processes claim rank 1 of group 'test': {host} and {host}");
        // Ranks with their world sizes, and the error of each of them.
        for (ranks, expected) in [
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
                    assert!(error.to_string().contains(&expected), "{expected}: {error}");
                    assert!(error.to_string().matches("group 'test'").count() == 1, "{error}");
                }
            });
            assert!(begun.elapsed() < Duration::from_secs(20), "{expected}: {:?}", begun.elapsed());
        }
    }

    #[test]
    fn ranks_may_join_several_times_at_one_address() {
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        thread::scope(|scope| {
            for rank in 0..3 {
                scope.spawn(move || {
                    let address = RendezvousAddress { host: "127.0.0.1".into(), port: free, local: true };
                    let launch = LaunchEnvironment {
                        rank,
                        size: 3,
                        local_rank: Some(rank),
                        local_size: Some(3),
                        address: Some(address),
                    };
                    for round in 0..3 {
                        let name = format!("group {round}");
                        let joined = join(("join", &name), &launch, None, Duration::from_secs(60)).unwrap();
                        assert_eq!((joined.comm.rank(), joined.comm.size()), (rank, 3));
                        joined.comm.barrier(smddp_core::Options::default()).unwrap();
                    }
                });
            }
        });
    }

    #[test]
    fn port_in_use_is_named() {
        let other = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = other.local_addr().unwrap().port();
        let error = serve(&at("127.0.0.1", port, true), &two(None)).err().unwrap().to_string();
        assert!(error.contains(&port.to_string()) && error.contains("--port"), "{error}");
    }

    fn at(host: &str, port: u16, local: bool) -> RendezvousAddress {
        RendezvousAddress { host: host.into(), port, local }
    }

    fn two(local_size: Option<usize>) -> LaunchEnvironment {
        LaunchEnvironment { rank: 0, size: 2, local_rank: None, local_size, address: None }
    }

    #[test]
    fn the_store_never_listens_on_all_interfaces() {
        // (host, all ranks are on this host, ranks of this host, the store may listen)
        for (host, local, here, listens) in [
            ("127.0.0.1", true, Some(2), true),
            ("127.0.1.1", false, None, true),
            ("::1", false, None, true),
            ("127.0.1.1", false, Some(1), false),
            // A documentation address, which no host has.
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
