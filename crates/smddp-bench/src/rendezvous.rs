//! Every rank's card to every rank, then the communicator.

use std::net::{SocketAddr, ToSocketAddrs};
use std::time::{Duration, Instant};

use smddp_core::Pending;

use crate::calls::Team;
use crate::error::{Error, Result};
use crate::place::{Meet, Place};
use crate::store::{Client, Server};

/// Makes the communicator of all ranks. With `store` somebody else serves the store there; otherwise rank 0
/// does, at the place's meeting point.
pub(crate) fn join(place: &Place, store: Option<&str>, timeout: Duration) -> Result<Team> {
    let deadline = Instant::now() + timeout;
    let pending = Pending::new("bench", place.rank, place.size, timeout)?;
    let cards = match (store, &place.meet) {
        (Some(addr), _) => exchange(&mut Client::connect(addr, deadline)?, place, &pending.card(), deadline)?,
        (None, None) => vec![pending.card()],
        (None, Some(meet)) => {
            let server = if place.rank == 0 { Some(serve(meet)?) } else { None };
            let addr = match &server {
                Some(server) => local(server.addr()).to_string(),
                None => join_host(&meet.host, meet.port),
            };
            let mut client = Client::connect(&addr, deadline)?;
            let cards = exchange(&mut client, place, &pending.card(), deadline)?;
            // The server must outlive the last rank's last question.
            client.set(&format!("taken/{}", place.rank), b"")?;
            if let Some(server) = &server {
                let wait = || deadline.saturating_duration_since(Instant::now());
                let slow = (0..place.size).find(|r| server.get(&format!("taken/{r}"), wait()).is_none());
                if let Some(rank) = slow {
                    return Err(Error::Rendezvous(format!("rank {rank} vanished during the rendezvous")));
                }
            }
            cards
        }
    };
    Ok(Team::new(pending.connect(&cards)?))
}

fn exchange(client: &mut Client, place: &Place, card: &[u8], deadline: Instant) -> Result<Vec<Vec<u8>>> {
    let key = |rank: usize| format!("card/{rank}");
    client.set(&key(place.rank), card)?;
    let mut cards = Vec::with_capacity(place.size);
    let mut absent = Vec::new();
    for rank in 0..place.size {
        match client.get(&key(rank), deadline)? {
            Some(card) => cards.push(card),
            None => absent.push(rank.to_string()),
        }
    }
    if absent.is_empty() {
        return Ok(cards);
    }
    Err(Error::Rendezvous(format!(
        "of {} ranks, rank {} did not arrive in time (see --timeout)",
        place.size,
        absent.join(", ")
    )))
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

    fn place(rank: usize, size: usize) -> Place {
        Place { rank, size, local_rank: rank, meet: None }
    }

    #[test]
    fn all_cards_reach_all_ranks() {
        let server = Server::bind("127.0.0.1:0").unwrap();
        let addr = server.addr().to_string();
        let deadline = Instant::now() + Duration::from_secs(20);
        let ranks: Vec<_> = (0..5)
            .map(|rank| {
                let addr = addr.clone();
                thread::spawn(move || {
                    let mut client = Client::connect(&addr, deadline).unwrap();
                    exchange(&mut client, &place(rank, 5), &[rank as u8; 300], deadline).unwrap()
                })
            })
            .collect();
        for rank in ranks {
            let cards = rank.join().unwrap();
            assert_eq!(cards, (0..5u8).map(|r| vec![r; 300]).collect::<Vec<_>>());
        }
    }

    #[test]
    fn ranks_that_do_not_arrive_are_named() {
        let server = Server::bind("127.0.0.1:0").unwrap();
        let deadline = Instant::now() + Duration::from_millis(50);
        let mut client = Client::connect(&server.addr().to_string(), deadline).unwrap();
        let error = exchange(&mut client, &place(1, 3), b"x", deadline).unwrap_err().to_string();
        assert!(error.contains("rank 0, 2 did not arrive"), "{error}");
    }

    #[test]
    fn a_taken_port_is_named() {
        let other = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = other.local_addr().unwrap().port();
        let error = serve(&Meet { host: "127.0.0.1".into(), port, local: true }).err().unwrap().to_string();
        assert!(error.contains(&port.to_string()) && error.contains("--port"), "{error}");
    }
}
