//! What comes to a rank's sockets while its group is made, and out of the store.

use std::io::{Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::OnceLock;

use super::*;
use crate::fuzzing::{Script, endpoint};
use crate::shm::Prepared;

/// A rank that has a parent and a child.
const ME: usize = 8;
const SIZE: usize = 10;
const CHILD: usize = 9;
/// Connections to it at once.
const MOST: usize = 6;

fn card() -> &'static Card {
    static CARD: OnceLock<Card> = OnceLock::new();
    CARD.get_or_init(|| {
        endpoint();
        Prepared::new(ME, SIZE, 4 << 20, Vec::new()).expect("shared memory").card().clone()
    })
}

/// Several callers, a parent and a store that say anything, in any order.
pub fn bootstrap(bytes: &[u8]) {
    let mut script = Script::new(bytes);
    let Ok(mut tree) = CardTree::new(card()) else { return };
    let parent = TreeAddress { token: random(), ..CardTree::new(card()).expect("sockets").address };
    let address = std::os::unix::net::SocketAddr::from_abstract_name(&parent.socket).expect("a name");
    let listener = UnixListener::bind_addr(&address).expect("a free name");
    listener.set_nonblocking(true).expect("a socket");
    let mine = std::os::unix::net::SocketAddr::from_abstract_name(&tree.address.socket).expect("a name");
    let mut callers: Vec<(UnixStream, Id)> = Vec::new();
    while let Some(step) = script.step() {
        match step % 8 {
            0 if callers.len() < MOST => {
                let stream = UnixStream::connect_addr(&mine).expect("a listener");
                callers.push((stream, tree.address.token));
            }
            1 => tree.call(&postcard::to_allocvec(&parent).expect("bytes")).expect("an address"),
            2 => tree.carried_up(CHILD, script.take(usize::from(step))),
            3 if tree.outcome.is_none() => tree.carried_down(script.take(usize::from(step))),
            4 if !callers.is_empty() => drop(callers.remove(script.below(callers.len()))),
            _ if !callers.is_empty() => {
                let caller = script.below(callers.len());
                let (stream, token) = &callers[caller];
                let from = [ME as u32 + 1, ME as u32, 0, u32::MAX][script.below(4)];
                let words = script.take(usize::from(step));
                let length = if script.yes() { words.len() as u32 } else { script.number() as u32 };
                let mut frame = token.to_vec();
                frame.extend_from_slice(&from.to_le_bytes());
                frame.extend_from_slice(&length.to_le_bytes());
                frame.extend_from_slice(words);
                frame.truncate(if script.yes() { frame.len() } else { script.below(frame.len()) });
                let _ = crate::send::send_all(stream, &frame);
            }
            _ => {}
        }
        if let Ok((stream, _)) = listener.accept() {
            callers.push((stream, parent.token));
        }
        if let Some(Ok(cards)) = tree.go_on(Duration::ZERO) {
            assert_eq!(cards.len(), SIZE);
        }
        for (stream, _) in &mut callers {
            let _ = stream.set_nonblocking(true).and_then(|()| stream.read(&mut [0; 4096]));
            let _ = stream.set_nonblocking(false).and_then(|()| stream.flush());
        }
        assert!(tree.callers.len() <= CALLERS && tree.children.keys().all(|&child| child == CHILD));
    }
    // Nobody is called there.
    let _ = tree.call(bytes);
}
