//! Tests of an attacker without the token between the ranks or with write access to the store: the group fails with a reason.

use std::io::{Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::thread::JoinHandle;

use smddp_net::handshake::{GREETING_BYTES, HandshakeEnd, PROOF_BYTES, REPLY_BYTES};
use smddp_net::token::TAG;

use super::super::link::initiator;
use super::*;

const SECRET: &[u8] = b"a job secret of 32 bytes or more";
const DEADLINE: Duration = Duration::from_secs(60);

fn connect(socket: &[u8]) -> UnixStream {
    UnixStream::connect_addr(&SocketAddr::from_abstract_name(socket).unwrap()).unwrap()
}

fn pass(from: &mut UnixStream, to: &mut UnixStream, bytes: usize) -> Option<Vec<u8>> {
    let mut buffer = vec![0; bytes];
    from.read_exact(&mut buffer).ok()?;
    to.write_all(&buffer).ok()?;
    Some(buffer)
}

/// Change of the first frame of a child by a relay: length, text and authentication code.
type Tamper = fn(&mut Vec<u8>);

/// Relays the proofs of a child and its parent, then the changed frame of the child, then all data of the parent.
fn relay(listener: UnixListener, parent: Vec<u8>, tamper: Tamper) -> JoinHandle<Option<()>> {
    std::thread::spawn(move || {
        let mut child = listener.accept().ok()?.0;
        let mut parent = connect(&parent);
        pass(&mut child, &mut parent, GREETING_BYTES)?;
        pass(&mut parent, &mut child, REPLY_BYTES)?;
        pass(&mut child, &mut parent, PROOF_BYTES)?;
        let mut frame = vec![0; 4];
        child.read_exact(&mut frame).ok()?;
        let length = u32::from_le_bytes(*frame.first_chunk()?) as usize;
        frame.resize(4 + length + TAG, 0);
        child.read_exact(&mut frame[4..]).ok()?;
        tamper(&mut frame);
        parent.write_all(&frame).ok()?;
        std::io::copy(&mut parent, &mut child).ok()?;
        Some(())
    })
}

/// Two ranks whose only connection goes through a relay.
fn over_a_relay(tamper: Tamper) -> Vec<TreeResult> {
    let mut trees = trees(2);
    let name = [b"smddp-cards-", &random::<16>()[..]].concat();
    let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
    let token = trees[0].token.clone().unwrap();
    // Without a job secret, a writer of the store may change addresses.
    let mut address = trees[0].records.open(0, &trees[0].address()).unwrap();
    let parent = std::mem::replace(&mut address.socket, name);
    let record = trees[0].records.seal(0, &address);
    trees[1].set_parent(token, &record, Instant::now()).unwrap();
    let relay = relay(listener, parent, tamper);
    let outcomes = outcomes(&mut trees);
    drop(trees);
    relay.join().unwrap();
    outcomes
}

#[test]
fn relayed_frames_that_are_not_as_sent_end_the_group() {
    assert!(over_a_relay(|_| {}).iter().all(Result::is_ok));
    let changes: [Tamper; 5] = [
        |frame| frame[10] ^= 1,
        |frame| *frame.last_mut().unwrap() ^= 0x80,
        // A text that is one byte shorter.
        |frame| {
            let length = u32::try_from(frame.len() - 4 - TAG - 1).unwrap();
            frame[..4].copy_from_slice(&length.to_le_bytes());
            let _ = frame.remove(4);
        },
        // Another text of that length.
        |frame| frame[4..].reverse(),
        // The same frame twice: the first is taken, so the second changes nothing.
        |frame| frame.extend(frame.clone()),
    ];
    for (case, tamper) in changes.into_iter().enumerate() {
        for outcome in over_a_relay(tamper) {
            match outcome {
                Err(failure) if case < 4 => {
                    assert!(failure.reason.contains("changed in transit"), "{case}: {failure:?}");
                }
                Ok(rank_infos) if case == 4 => assert_eq!(rank_infos.len(), 2),
                other => panic!("case {case}: {other:?}"),
            }
        }
    }
}

/// A tree of one rank with that secret.
fn tree(rank: usize, size: usize, secret: Option<&[u8]>) -> RankTree {
    let one = Prepared::new(rank, size, Vec::new(), &options(rank)).unwrap();
    RankTree::new(one.rank_info(), None, secret).unwrap()
}

#[test]
fn address_records_are_bound_to_job_secret_rank_and_size() {
    let (reader, writer) = (tree(9, 20, Some(SECRET)), tree(8, 20, Some(SECRET)));
    let record = writer.address();
    assert!(reader.records.open(8, &record).is_ok());
    let refused = |reader: &RankTree, rank: usize, record: &[u8]| {
        let reason = reader.records.open(rank, record).err().expect("it is accepted");
        assert!(
            reason.starts_with("another job token: ") && reason.contains("SMDDP_JOB_TOKEN_FILE"),
            "{reason}"
        );
    };
    refused(&reader, 7, &record);
    refused(&tree(9, 21, Some(SECRET)), 8, &record);
    refused(&tree(9, 20, Some(b"another secret of 32 bytes, or more")), 8, &record);
    refused(&tree(9, 20, None), 8, &record);
    refused(&reader, 8, &tree(8, 20, None).address());
    refused(&reader, 8, &record[..record.len() - TAG]);
    for at in 0..record.len() {
        let mut record = record.clone();
        record[at] ^= 1;
        assert!(reader.records.open(8, &record).is_err(), "byte {at}");
    }
    // A rank of another attempt has another record.
    assert_ne!(record, tree(8, 20, Some(SECRET)).address());
}

/// Returns both ranks of a group whose messages are relayed through the store, and the message of the child.
fn relayed() -> (Vec<RankTree>, Vec<u8>) {
    let mut trees = trees(2);
    let token = trees[0].token.clone();
    trees[1].token = token;
    trees[1].parent_link = ParentLink::Unreached { relay_tag: None };
    let up = trees[1].take_relay().unwrap().0;
    (trees, up)
}

#[test]
fn relayed_messages_cannot_be_changed_exchanged_or_repeated() {
    let reason = |tree: &RankTree| tree.failure().map(|failure| failure.reason.clone()).unwrap_or_default();
    let (mut trees, up) = relayed();
    trees[0].accept_relayed(1, &up);
    let _ = trees[0].poll(Instant::now());
    let (child, down) = trees[0].result_to_relay().swap_remove(0);
    assert_eq!(child, 1);
    for (tampered, at) in [(&up, 5), (&up, up.len() - 1), (&down, 5), (&down, down.len() - 1)] {
        let (mut trees, _) = relayed();
        let mut bytes = tampered.clone();
        bytes[at] ^= 1;
        let rank = usize::from(tampered == &down);
        match rank {
            0 => trees[0].accept_relayed(1, &bytes),
            _ => trees[1].accept_result(&bytes),
        }
        assert!(reason(&trees[rank]).contains("do not verify under the group's token"), "byte {at}");
    }
    // A message under another rank's number, and the reply to another attempt.
    let (mut other, _) = relayed();
    other[0].token = trees[0].token.clone();
    other[0].accept_relayed(2, &up);
    assert!(reason(&other[0]).contains("rank 2"), "{}", reason(&other[0]));
    let (mut other, _) = relayed();
    other[1].token = trees[0].token.clone();
    other[1].accept_result(&down);
    assert!(reason(&other[1]).contains("do not verify"), "{}", reason(&other[1]));
    trees[1].accept_result(&down);
    assert_eq!(trees[1].poll(Instant::now()).unwrap().as_ref().unwrap().len(), 2);
}

#[test]
fn startup_sockets_reject_other_users() {
    if !rustix::process::geteuid().is_root() {
        println!("not tried: only root can become another user");
        return;
    }
    let mut tree = trees(2).swap_remove(0);
    let token = tree.token.clone().unwrap();
    let handshake = initiator(1, &tree.address.id, &token).unwrap();
    let greeting = handshake.output();
    // Created before the fork: the child must not allocate, because another thread may hold the allocator's lock.
    let mut stream = UnixStream::pair().unwrap().0;
    let address = SocketAddr::from_abstract_name(&tree.address.socket).unwrap();
    let mut answer = [0; REPLY_BYTES];
    // SAFETY: the child makes system calls and leaves by `_exit`; it does not return into the test.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        // SAFETY: changes this child only.
        let changed = unsafe { libc::setuid(65534) } == 0;
        let connected = UnixStream::connect_addr(&address).map(|other| stream = other).is_ok();
        let _ = stream.write_all(greeting);
        let received = matches!(stream.read(&mut answer), Ok(1..));
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(i32::from(!changed || !connected || received)) };
    }
    let (mut status, begun) = (0, Instant::now());
    // SAFETY: our own child; `status` is this thread's.
    while unsafe { libc::waitpid(pid, &raw mut status, libc::WNOHANG) } == 0 {
        assert!(begun.elapsed() < DEADLINE, "the child does not end");
        let now = Instant::now();
        tree.wait(Duration::from_millis(1), now);
        let _ = tree.poll(now);
    }
    assert_eq!(status, 0, "a process of another user got an answer");
    assert!(tree.reject_logged && tree.incoming.is_empty());
}
