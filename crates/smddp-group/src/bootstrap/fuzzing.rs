//! Fuzz target: data that a rank receives from its sockets and from the store while its group is created.

use std::io::Read;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::OnceLock;

use smddp_net::fuzzing::Script;
use smddp_net::fuzzing::known_token;
use smddp_net::handshake::{Initiator, Listener, Responder};
use smddp_net::socket_io::exchange;
use smddp_net::token::{Keys, TAG};
use smddp_process::fuzzing::endpoint;
use smddp_shm::Prepared;

use super::link::{Session, initiator};
use super::payload::UP;
use super::*;

/// A rank that has a parent and a child.
const ME: usize = 8;
const SIZE: usize = 10;
const CHILD: usize = 9;
/// Maximum number of simultaneous connections to the rank.
const MOST: usize = 6;

fn rank_info() -> &'static RankInfo {
    static CARD: OnceLock<RankInfo> = OnceLock::new();
    CARD.get_or_init(|| {
        endpoint();
        let prepared = Prepared::new(ME, SIZE, 4 << 20).expect("shared memory");
        RankInfo::new(prepared.address().clone(), Vec::new(), None)
    })
}

/// Other end of a connection.
enum Other {
    Child(Initiator),
    Parent(Responder),
    Unauthenticated,
    /// Authenticated: its frames have valid authentication codes.
    Authenticated(Session),
}

impl Other {
    /// Moves the bytes of its handshake on a non-blocking socket.
    fn advance(&mut self, stream: &UnixStream) {
        let session = match self {
            Self::Child(handshake) => {
                let _ = exchange(stream, handshake);
                handshake.keys().map(|Keys { initiator, responder }| Session::new(initiator, responder))
            }
            Self::Parent(handshake) => {
                if exchange(stream, handshake).is_ok_and(|complete| complete) && handshake.keys().is_none() {
                    handshake.answer(known_token()).expect("random bytes");
                    let _ = exchange(stream, handshake);
                }
                handshake.keys().map(|Keys { initiator, responder }| Session::new(responder, initiator))
            }
            Self::Unauthenticated | Self::Authenticated(_) => None,
        };
        if let Some(session) = session {
            *self = Self::Authenticated(session);
        }
    }
}

/// Runs a rank against several connections, a parent and a store that send arbitrary data in any order.
pub fn bootstrap(bytes: &[u8]) {
    let mut script = Script::new(bytes);
    let (token, new) = (known_token(), || RankTree::new(rank_info(), None, None));
    let Ok(mut tree) = new() else { return };
    let parent = TreeAddress { id: random(), ..new().expect("sockets").address };
    let address = std::os::unix::net::SocketAddr::from_abstract_name(&parent.socket).expect("a name");
    let listener = UnixListener::bind_addr(&address).expect("a free name");
    listener.set_nonblocking(true).expect("a socket");
    let mine = std::os::unix::net::SocketAddr::from_abstract_name(&tree.address.socket).expect("a name");
    let mut others: Vec<(UnixStream, Other)> = Vec::new();
    while let Some(step) = script.step() {
        match step % 8 {
            0 if others.len() < MOST => {
                let stream = UnixStream::connect_addr(&mine).expect("a listener");
                let from = [ME + 1, ME, 0, u32::MAX as usize][script.below(4)];
                let handshake = initiator(from, &tree.address.id, &token).expect("random bytes");
                let other = match script.below(4) {
                    0 => Other::Unauthenticated,
                    _ => Other::Child(handshake),
                };
                others.push((stream, other));
            }
            1 => drop(tree.set_parent(token.clone(), &tree.records.seal(0, &parent), Instant::now())),
            2 => {
                let text = script.take(usize::from(step));
                let tag = token.tag(&[UP, &rank_bytes(CHILD), text]);
                tree.accept_relayed(CHILD, &[text, &tag[..if script.yes() { TAG } else { 0 }]].concat());
            }
            3 if tree.outcome.is_none() => tree.accept_result(script.take(usize::from(step))),
            4 if !others.is_empty() => drop(others.remove(script.below(others.len()))),
            _ if !others.is_empty() => {
                let at = script.below(others.len());
                let (stream, other) = &mut others[at];
                let bytes = script.take(usize::from(step));
                let mut frame = Vec::new();
                match other {
                    Other::Authenticated(session) if script.yes() => session.seal(bytes, &mut frame),
                    _ => frame.extend([&(script.number() as u32).to_le_bytes(), bytes].concat()),
                }
                frame.truncate(if script.yes() { frame.len() } else { script.below(frame.len()) });
                let _ = smddp_net::socket_io::send_all(&*stream, &frame);
            }
            _ => {}
        }
        if let Ok((stream, _)) = listener.accept() {
            others.push((stream, Other::Parent(Responder::new(Listener::Bootstrap))));
        }
        if let Some(Ok(rank_infos)) = tree.poll(Instant::now()) {
            assert_eq!(rank_infos.len(), SIZE);
        }
        for (stream, other) in &mut others {
            let _ = stream.set_nonblocking(true);
            other.advance(stream);
            let _ = (stream.read(&mut [0; 4096]), stream.set_nonblocking(false));
        }
        assert!(tree.incoming.len() <= MAX_INCOMING && tree.children.keys().all(|&child| child == CHILD));
    }
    // Arbitrary address records, to which the rank does not connect.
    let _ = (tree.set_parent(token, bytes, Instant::now()), tree.shared_token(bytes).is_ok());
}
