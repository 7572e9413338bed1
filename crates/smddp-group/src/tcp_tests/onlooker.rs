//! Attacker between two hosts, who reads their traffic and may change it.

use std::io::Write;
use std::net::{Shutdown, SocketAddr, TcpListener};
use std::sync::Mutex;

use smddp_net::frame::HEADER;
use smddp_net::handshake::{GREETING_BYTES, PROOF_BYTES};

use super::*;

/// Bytes of the initiator in the handshake.
const HANDSHAKE: usize = GREETING_BYTES + PROOF_BYTES;

#[derive(Clone, Default)]
struct Onlooker {
    seen: Arc<Mutex<Vec<u8>>>,
    /// Flips a bit of this byte of each initiator's stream.
    changes: Option<usize>,
}

impl Onlooker {
    /// Starts a proxy of `target`, and returns its address.
    fn proxy(&self, target: SocketAddr) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let this = self.clone();
        std::thread::spawn(move || {
            for incoming in listener.incoming().map_while(Result::ok) {
                let Ok(outgoing) = TcpStream::connect(target) else { return };
                let ends = [incoming, outgoing];
                let copies = ends.each_ref().map(|end| end.try_clone().unwrap());
                for (direction, (from, to)) in ends.into_iter().zip(copies.into_iter().rev()).enumerate() {
                    let this = this.clone();
                    std::thread::spawn(move || {
                        this.forward(from, to, this.changes.filter(|_| direction == 0))
                    });
                }
            }
        });
        address
    }

    fn forward(&self, mut from: TcpStream, mut to: TcpStream, changes: Option<usize>) {
        let (mut forwarded, mut chunk) = (0, [0; 1 << 16]);
        while let Ok(count @ 1..) = from.read(&mut chunk) {
            if let Some(at) = changes.filter(|at| (forwarded..forwarded + count).contains(at)) {
                chunk[at - forwarded] ^= 4;
            }
            forwarded += count;
            self.seen.lock().unwrap().extend(&chunk[..count]);
            if to.write_all(&chunk[..count]).is_err() {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Write);
    }

    /// Creates two ranks that reach each other only through the proxies.
    fn between(&self, encrypts: bool) -> Pair {
        self.between_with(|options| options.encrypts = encrypts)
    }

    fn between_with(&self, options: impl Fn(&mut TransportOptions)) -> Pair {
        Pair::with(options, |rank_info| {
            let (address, _) = rank_info.offer.tcp.as_mut().unwrap();
            address.socket = self.proxy(address.socket);
        })
    }

    fn has_seen(&self, value: u64) -> bool {
        self.seen.lock().unwrap().windows(8).any(|window| window == value.to_le_bytes())
    }
}

#[test]
fn encrypted_traffic_hides_the_data() {
    for encrypts in [false, true] {
        let onlooker = Onlooker::default();
        let mut pair = onlooker.between(encrypts);
        pair.check_exchanges();
        assert_eq!(pair.groups[0].info().network_path.contains("encrypted"), encrypts);
        for rank in [0, 1] {
            assert_eq!(
                onlooker.has_seen(number(rank, 1)),
                !encrypts,
                "data of rank {rank}, encrypted: {encrypts}"
            );
        }
    }
}

#[test]
fn changed_bit_fails_the_group_and_changes_no_data() {
    // Bytes of the length, the ciphertext and the tag of the first record. (A length that is slightly larger would only
    // make the receiver wait, as for delayed bytes.)
    for at in [3, 4, 50, 80] {
        let onlooker = Onlooker { changes: Some(HANDSHAKE + at), ..Onlooker::default() };
        match onlooker.between(true).exchange() {
            Err(Fault::Lost { how, .. }) => {
                assert!(how.contains("was not encrypted by that rank") || how.contains("closed"), "{how}")
            }
            other => panic!("byte {at}: {other:?}"),
        }
    }
}

#[test]
fn changed_bit_of_a_checked_frame_is_reported_as_corruption() {
    // Bytes of the header's checksum, the kind, the payload's checksum, the payload's length, and the payload; with
    // encryption of the ciphertext and the tag.
    let plain = [0, 4, 12, 32, HEADER, HEADER + 7].map(|at| (at, false));
    let encrypted = [4, 50, 80].map(|at| (at, true));
    for (at, encrypts) in plain.into_iter().chain(encrypted) {
        let onlooker = Onlooker { changes: Some(HANDSHAKE + at), ..Onlooker::default() };
        let set = |options: &mut TransportOptions| (options.checksums, options.encrypts) = (true, encrypts);
        match onlooker.between_with(set).exchange() {
            Err(Fault::Corrupted { detail, .. }) => {
                let reason = if encrypts { "authentication of received data failed" } else { "CRC32C" };
                assert!(detail.contains(reason) && detail.contains("over tcp lo"), "byte {at}: {detail}");
            }
            other => panic!("byte {at}, encrypted: {encrypts}: {other:?}"),
        }
    }
}

#[test]
fn frames_with_checksums_carry_the_data() {
    let onlooker = Onlooker::default();
    let mut pair = onlooker.between_with(|options| options.checksums = true);
    pair.check_exchanges();
    assert!(pair.groups[0].info().network_path.ends_with("with checksums"));
}
