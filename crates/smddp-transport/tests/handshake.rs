//! Strangers, other versions and other users at the door.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::FileExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use smddp_transport::shm::Prepared;
use smddp_transport::{RankInfo, process::PROTOCOL};

const CAP: usize = 1 << 20;

/// One test at a time: each means the one socket that this process has.
fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// This process's id in the handshake: its first half is in the socket's name, the whole in every card.
fn my_id(rank_info: &RankInfo, socket: &str) -> [u8; 16] {
    let half = from_hex(socket.rsplit('-').next().unwrap());
    let bytes = rank_info.to_bytes();
    let at = bytes.windows(8).position(|window| window == half).unwrap();
    bytes[at..at + 16].try_into().unwrap()
}

/// The abstract names of this process's sockets, without the leading zero.
fn my_sockets() -> Vec<String> {
    let mine = format!("@smddp-{}-", std::process::id());
    let table = String::from_utf8_lossy(&std::fs::read("/proc/net/unix").unwrap()).into_owned();
    let names = table.lines().filter_map(|line| line.split_whitespace().last());
    names.filter(|name| name.starts_with(&mine)).map(|name| name[1..].to_owned()).collect()
}

fn dial(name: &str) -> UnixStream {
    let stream = UnixStream::connect_addr(&SocketAddr::from_abstract_name(name).unwrap()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    stream
}

fn hello(magic: &[u8; 8], version: u32, from: [u8; 16], to: [u8; 16]) -> Vec<u8> {
    [&magic[..], &version.to_le_bytes(), &from, &to].concat()
}

/// The group's token: at the end of rank 0's card.
fn token_of(first: &RankInfo) -> [u8; 32] {
    *first.to_bytes().last_chunk().unwrap()
}

/// As docs/security.md has it.
fn mac(token: &[u8; 32], parts: &[&[u8]]) -> [u8; 32] {
    let mut mac = Hmac::<Sha256>::new_from_slice(token).unwrap();
    for part in parts {
        mac.update(&(part.len() as u64).to_le_bytes());
        mac.update(part);
    }
    mac.finalize().into_bytes().into()
}

/// What a caller of this version says: a hello, what it wants (the memory), its token's name, a nonce.
fn words(hello: &[u8], token: &[u8; 32], nonce: u8) -> Vec<u8> {
    [hello, &[0; 8], &mac(token, &[b"smddp name"])[..16], &[nonce; 32]].concat()
}

/// The listener's nonce, out of an answer to these words that proves the token.
fn heard(stream: &mut UnixStream, token: &[u8; 32], words: &[u8]) -> Vec<u8> {
    let mut reply = [0; 76];
    stream.read_exact(&mut reply).unwrap();
    assert_eq!(reply[..12], [&b"smddp-in"[..], &PROTOCOL.to_le_bytes()].concat());
    assert_eq!(reply[44..], mac(token, &[b"smddp listener", words, &reply[12..44]]));
    reply[12..44].to_vec()
}

/// All that a caller says who has the token; the listener's last words come.
fn enter(stream: &mut UnixStream, token: &[u8; 32], words: &[u8]) -> Vec<u8> {
    let nonce = heard(stream, token, words);
    let proof = mac(token, &[b"smddp caller", words, &nonce]);
    stream.write_all(&proof).unwrap();
    stream.read_exact(&mut [0; 44]).unwrap();
    proof.to_vec()
}

/// Whether nothing comes any more.
fn is_shut_out(stream: &mut UnixStream) -> bool {
    let mut answer = Vec::new();
    // A reset says the same as an end.
    let _ = stream.read_to_end(&mut answer);
    answer.is_empty()
}

/// Rank 0 of two, which trusts its own card's token; rank 1, which keeps it; the socket's name, what says who is meant, the token.
fn at_home() -> ([smddp_transport::shm::LocalChannels; 2], String, Vec<u8>, [u8; 32]) {
    let prepared = [0, 1].map(|rank| Prepared::new(rank, 2, CAP, Vec::new()).unwrap());
    let name = my_sockets().pop().unwrap();
    let rank_infos: Vec<RankInfo> = prepared.iter().map(|p| p.rank_info().clone()).collect();
    let hello = hello(b"smddp-in", PROTOCOL, [1; 16], my_id(&rank_infos[0], &name));
    let token = token_of(&rank_infos[0]);
    (prepared.map(|p| p.connect(rank_infos.clone()).unwrap()), name, hello, token)
}

/// Eight bytes from sixteen digits.
fn from_hex(text: &str) -> Vec<u8> {
    (0..8).map(|i| u8::from_str_radix(&text[2 * i..2 * i + 2], 16).unwrap()).collect()
}

fn replace(bytes: &mut [u8], what: &[u8], by: &[u8]) {
    let at = bytes.windows(what.len()).position(|window| window == what).unwrap();
    bytes[at..at + by.len()].copy_from_slice(by);
}

/// My card as rank 1, and the card of a rank 0 that does not exist: its id and its socket's name differ from mine.
/// With the name of that socket and its id.
fn false_peer() -> (Prepared, Vec<RankInfo>, String, [u8; 16]) {
    let prepared = Prepared::new(1, 2, CAP, Vec::new()).unwrap();
    let name = my_sockets().pop().unwrap();
    let digits = name.rsplit('-').next().unwrap().to_owned();
    let id = from_hex(&digits);
    let other: Vec<u8> = id.iter().map(|byte| !byte).collect();
    let other_digits: String = other.iter().map(|byte| format!("{byte:02x}")).collect();
    let other_name = name.replace(&digits, &other_digits);
    let mut bytes = Prepared::new(0, 2, CAP, Vec::new()).unwrap().rank_info().to_bytes();
    let mut whole = my_id(prepared.rank_info(), &name);
    whole[..8].copy_from_slice(&other);
    replace(&mut bytes, &id, &other);
    replace(&mut bytes, name.as_bytes(), other_name.as_bytes());
    let rank_infos = vec![RankInfo::from_bytes(&bytes).unwrap(), prepared.rank_info().clone()];
    (prepared, rank_infos, other_name, whole)
}

#[test]
fn a_caller_with_another_magic_or_version_gets_nothing_and_harms_nobody() {
    let _alone = alone();
    let prepared: Vec<_> = (0..2).map(|r| Prepared::new(r, 2, CAP, Vec::new()).unwrap()).collect();
    let name = my_sockets().pop().unwrap();
    for bytes in [
        hello(b"not-smdd", PROTOCOL, [1; 16], [2; 16]),
        hello(b"smddp-in", PROTOCOL + 7, [1; 16], [2; 16]),
        // The right words for another process.
        hello(b"smddp-in", PROTOCOL, [1; 16], [2; 16]),
        b"GET / HTTP/1.1\r\nHost: somebody-else.example\r\n\r\n".to_vec(),
    ] {
        let mut stream = dial(&name);
        stream.write_all(&bytes).unwrap();
        assert!(is_shut_out(&mut stream), "a stranger got something");
    }
    let rank_infos: Vec<RankInfo> = prepared.iter().map(|p| p.rank_info().clone()).collect();
    for p in prepared {
        p.connect(rank_infos.clone()).unwrap();
    }
}

#[test]
fn a_listener_of_another_version_is_refused_with_both_versions_shown() {
    let _alone = alone();
    let (prepared, rank_infos, name, id) = false_peer();
    let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
    let other = PROTOCOL + 41;
    let answering = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.read_exact(&mut [0; 100]).unwrap();
        stream.write_all(&hello(b"smddp-in", other, id, [0; 16])).unwrap();
    });
    let text = prepared.connect(rank_infos).err().unwrap().to_string();
    answering.join().unwrap();
    assert!(text.contains(&format!("{PROTOCOL} here")) && text.contains(&format!("{other} there")), "{text}");
    assert!(text.contains("rank 0"), "{text}");
}

#[test]
fn a_listener_that_speaks_something_else_or_is_gone_is_an_error_naming_the_rank() {
    let _alone = alone();
    let (prepared, rank_infos, name, _) = false_peer();
    let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
    let answering = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.read_exact(&mut [0; 100]).unwrap();
        stream.write_all(&[b'x'; 44]).unwrap();
    });
    let text = prepared.connect(rank_infos).err().unwrap().to_string();
    answering.join().unwrap();
    assert!(text.contains("rank 0") && text.contains("does not speak smddp"), "{text}");

    let (prepared, rank_infos, ..) = false_peer();
    let text = prepared.connect(rank_infos).err().unwrap().to_string();
    assert!(text.contains("rank 0") && text.contains("socket is closed"), "{text}");
}

#[test]
fn a_caller_of_another_user_gets_nothing() {
    // SAFETY: asks for a number only.
    if unsafe { libc::geteuid() } != 0 {
        println!("not tried: only root can become another user");
        return;
    }
    let _alone = alone();
    let (_groups, name, hello, token) = at_home();
    let bytes = words(&hello, &token, 3);
    // The same words of this user are answered.
    let mut stream = dial(&name);
    stream.write_all(&bytes).unwrap();
    enter(&mut stream, &token, &bytes);
    drop(stream);
    // SAFETY: the child makes system calls and small allocations (glibc's allocator is fork-safe) and leaves by
    // `_exit`; it does not return into the test.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        // SAFETY: changes this child only.
        let changed = unsafe { libc::setuid(65534) } == 0;
        let mut stream = dial(&name);
        let _ = stream.write_all(&bytes);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(i32::from(!changed || !answer.is_empty())) };
    }
    let mut status = 0;
    // SAFETY: our own child.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    assert_eq!(status, 0, "a process of another user got an answer");
}

#[test]
fn a_caller_of_this_user_without_the_token_gets_nothing_whatever_it_has_recorded() {
    let _alone = alone();
    let (_groups, name, hello, token) = at_home();
    let mut stream = dial(&name);
    let mine = words(&hello, &token, 3);
    stream.write_all(&mine).unwrap();
    let proof = enter(&mut stream, &token, &mine);
    let other = [7; 32];
    // A recorded hello, a recorded whole exchange, another token under its own name and under the right one, and nothing.
    let named = [&mine[..52], &words(&hello, &token, 4)[52..]].concat();
    let nonce_of = |words: &[u8], proof: &[u8]| {
        let mut stream = dial(&name);
        stream.write_all(&[words, proof].concat()).unwrap();
        let mut all = Vec::new();
        let _ = stream.read_to_end(&mut all);
        all.len()
    };
    assert_eq!(nonce_of(&words(&hello, &other, 3), &[]), 0, "a token of nobody's is answered");
    for (words, proof) in [
        (&mine, proof.clone()),
        (&named, mac(&other, &[b"smddp caller", &named, &[0; 32]]).to_vec()),
        (&mine, vec![0; 32]),
        // What the listener itself says is no proof.
        (&mine, mac(&token, &[b"smddp listener", &mine, &[0; 32]]).to_vec()),
    ] {
        assert_eq!(nonce_of(words, &proof), 76, "more than the listener's own proof");
    }
    // And who has it goes on to be heard.
    let mut stream = dial(&name);
    stream.write_all(&mine).unwrap();
    enter(&mut stream, &token, &mine);
}

#[test]
fn a_group_that_is_gone_is_no_way_in() {
    let _alone = alone();
    let keeps = Prepared::new(0, 2, CAP, Vec::new()).unwrap();
    let (groups, name, hello, token) = at_home();
    let words = words(&hello, &token, 3);
    let mut stream = dial(&name);
    stream.write_all(&words).unwrap();
    enter(&mut stream, &token, &words);
    drop((stream, groups));
    let mut stream = dial(&name);
    stream.write_all(&words).unwrap();
    assert!(is_shut_out(&mut stream));
    drop(keeps);
}

#[test]
fn a_card_of_garbage_is_refused() {
    for bytes in [&b""[..], b"hello", &[0; 300], &[0xff; 300]] {
        assert!(RankInfo::from_bytes(bytes).is_err());
    }
    let good = Prepared::new(0, 1, CAP, Vec::new()).unwrap().rank_info().to_bytes();
    assert!(RankInfo::from_bytes(&good[..good.len() - 3]).is_err());
}

/// What the kernel says of the thread that answers callers.
fn service_thread() -> File {
    let begun = Instant::now();
    // It names itself when it begins.
    while begun.elapsed() < Duration::from_secs(10) {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap();
        let mut files = tasks.filter_map(|task| File::open(task.unwrap().path().join("stat")).ok());
        if let Some(found) = files.find(|file| stat(file).contains("(smddp-service)")) {
            return found;
        }
    }
    panic!("there is no such thread");
}

fn stat(file: &File) -> String {
    let mut bytes = [0; 512];
    let read = file.read_at(&mut bytes, 0).unwrap_or(0);
    String::from_utf8_lossy(&bytes[..read]).into_owned()
}

#[test]
fn a_caller_that_says_nothing_or_half_of_it_keeps_no_other_waiting() {
    let _alone = alone();
    let (_groups, name, hello, token) = at_home();
    let words = words(&hello, &token, 3);
    let silent: Vec<UnixStream> = (0..4).map(|_| dial(&name)).collect();
    let halves: Vec<UnixStream> = (0..4)
        .map(|_| {
            let mut stream = dial(&name);
            stream.write_all(&words[..30]).unwrap();
            stream
        })
        .collect();
    let begun = Instant::now();
    let mut stream = dial(&name);
    stream.write_all(&words).unwrap();
    enter(&mut stream, &token, &words);
    // One of them alone has 5 s.
    assert!(begun.elapsed() < Duration::from_secs(3), "{:?}", begun.elapsed());
    // The other half may come later.
    for mut stream in halves {
        stream.write_all(&words[30..]).unwrap();
        enter(&mut stream, &token, &words);
    }
    drop(silent);
}

#[test]
fn any_number_of_callers_that_say_nothing_make_room_for_one_that_speaks() {
    let _alone = alone();
    let (_groups, name, hello, token) = at_home();
    let words = words(&hello, &token, 3);
    let silent: Vec<UnixStream> = (0..300).map(|_| dial(&name)).collect();
    let mut stream = dial(&name);
    stream.write_all(&words).unwrap();
    enter(&mut stream, &token, &words);
    drop(silent);
}

#[test]
fn a_process_without_descriptors_lets_callers_wait_and_stays_idle() {
    let _alone = alone();
    let (_groups, name, hello, token) = at_home();
    let words = words(&hello, &token, 3);
    let limit = |soft: libc::rlim_t| {
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: fills and reads a record of ours.
        unsafe {
            assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit), 0);
            let old = std::mem::replace(&mut limit.rlim_cur, soft);
            assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit), 0);
            old
        }
    };
    // SAFETY: makes a socket of ours; who connects needs no other descriptor.
    let socket = unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) };
    assert!(socket >= 0);
    // SAFETY: just made, and nobody else's.
    let mut stream = unsafe { UnixStream::from_raw_fd(socket) };
    let mut address =
        libc::sockaddr_un { sun_family: libc::AF_UNIX as libc::sa_family_t, sun_path: [0; 108] };
    for (place, byte) in address.sun_path[1..].iter_mut().zip(name.bytes()) {
        *place = byte as libc::c_char;
    }
    let length = size_of::<libc::sa_family_t>() + 1 + name.len();
    let thread = service_thread();
    // Descriptors 0 to 2 are open, so there is no other.
    let old = limit(3);
    // SAFETY: an address of that length; the descriptor is the stream's.
    let connected =
        unsafe { libc::connect(stream.as_raw_fd(), (&raw const address).cast(), length as libc::socklen_t) };
    stream.write_all(&words).unwrap();
    stream.set_read_timeout(Some(Duration::from_millis(30))).unwrap();
    let looks: Vec<(bool, bool)> =
        (0..50).map(|_| (stream.read(&mut [0; 1]).is_err(), stat(&thread).contains(") S "))).collect();
    limit(old);
    assert_eq!(connected, 0);
    assert!(looks.iter().all(|look| look.0), "answered without a descriptor");
    let asleep = looks.iter().filter(|look| look.1).count();
    assert!(asleep > 10, "the thread slept in {asleep} of {} looks", looks.len());
    // As soon as there are descriptors again, the caller has what it wants.
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    enter(&mut stream, &token, &words);
}
