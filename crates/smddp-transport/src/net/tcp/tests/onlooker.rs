//! Somebody between two hosts, who sees what they send each other and may change it.

use std::io::Write;
use std::net::{Shutdown, SocketAddr, TcpListener};
use std::sync::Mutex;

use super::*;

/// What a caller says before its first frame.
const FIRST_WORDS: usize = 40 + 32 + 32;

#[derive(Clone, Default)]
struct Onlooker {
    seen: Arc<Mutex<Vec<u8>>>,
    /// Turns a bit of this byte of each caller's.
    changes: Option<usize>,
}

impl Onlooker {
    /// Where callers of `target` come by.
    fn before(&self, target: SocketAddr) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let this = self.clone();
        std::thread::spawn(move || {
            for caller in listener.incoming().map_while(Result::ok) {
                let Ok(called) = TcpStream::connect(target) else { return };
                let ends = [caller, called];
                let copies = ends.each_ref().map(|end| end.try_clone().unwrap());
                for (way, (from, to)) in ends.into_iter().zip(copies.into_iter().rev()).enumerate() {
                    let this = this.clone();
                    std::thread::spawn(move || this.pass_on(from, to, this.changes.filter(|_| way == 0)));
                }
            }
        });
        address
    }

    fn pass_on(&self, mut from: TcpStream, mut to: TcpStream, changes: Option<usize>) {
        let (mut passed, mut piece) = (0, [0; 1 << 16]);
        while let Ok(count @ 1..) = from.read(&mut piece) {
            if let Some(at) = changes.filter(|at| (passed..passed + count).contains(at)) {
                piece[at - passed] ^= 4;
            }
            passed += count;
            self.seen.lock().unwrap().extend(&piece[..count]);
            if to.write_all(&piece[..count]).is_err() {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Write);
    }

    /// Two ranks that reach each other through here alone.
    fn between(&self, encrypts: bool) -> Pair {
        Pair::with(
            |options| options.encrypts = encrypts,
            |rank_info| {
                let (address, _) = rank_info.offer.tcp.as_mut().unwrap();
                address.socket = self.before(address.socket);
            },
        )
    }

    fn has_seen(&self, value: u64) -> bool {
        self.seen.lock().unwrap().windows(8).any(|window| window == value.to_le_bytes())
    }
}

#[test]
fn encrypted_numbers_are_seen_by_nobody_on_their_way() {
    for encrypts in [false, true] {
        let onlooker = Onlooker::default();
        let mut pair = onlooker.between(encrypts);
        pair.goes_on();
        assert_eq!(pair.groups[0].way().contains("encrypted"), encrypts);
        for rank in [0, 1] {
            assert_eq!(onlooker.has_seen(number(rank, 1)), !encrypts, "rank {rank}'s, {encrypts}");
        }
    }
}

#[test]
fn a_changed_bit_ends_the_group_and_changes_no_number() {
    // Of the length, the text and the tag of the first record. (A length that is a little longer is waited for, as bytes are
    // that somebody holds back.)
    for at in [3, 4, 50, 80] {
        let onlooker = Onlooker { changes: Some(FIRST_WORDS + at), ..Onlooker::default() };
        match onlooker.between(true).exchange() {
            Err(Fault::Lost { how, .. }) => {
                assert!(how.contains("was not encrypted by that rank") || how.contains("closed"), "{how}")
            }
            other => panic!("byte {at}: {other:?}"),
        }
    }
}
