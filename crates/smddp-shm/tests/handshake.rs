//! Handshake of the Unix socket with foreign programs, other versions and other users.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::FileExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use smddp_net::handshake::PROTOCOL;
use smddp_shm::{LocalChannels, Prepared, RankAddress};

const CAP: usize = 1 << 20;
/// Token of the groups.
const TOKEN: [u8; 32] = [0x5a; 32];

/// Serializes the tests: all use the single socket of this process.
fn serialize() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns rank `rank` of two ranks, which trusts the group's token.
fn prepare(rank: usize) -> Prepared {
    let mut prepared = Prepared::new(rank, 2, CAP).unwrap();
    prepared.trust(&Arc::new(postcard::from_bytes(&TOKEN).unwrap()));
    prepared
}

/// Returns the addresses of the ranks.
fn addresses_of(prepared: &[Prepared]) -> Vec<RankAddress> {
    prepared.iter().map(|p| p.address().clone()).collect()
}

/// Returns the abstract names of this process's sockets, without the leading zero.
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

/// Returns the beginning of a greeting: magic, version, purpose (the memory), ids and ranks of initiator and responder.
fn greeting_start(magic: &[u8; 8], version: u32, from: [u8; 16], to: [u8; 16]) -> Vec<u8> {
    [&magic[..], &version.to_le_bytes(), &[3], &from, &[0], &to, &[0]].concat()
}

/// Computes the MAC as docs/security.md specifies.
fn mac(token: &[u8; 32], parts: &[&[u8]]) -> [u8; 32] {
    let mut mac = Hmac::<Sha256>::new_from_slice(token).unwrap();
    for part in parts {
        mac.update(&(part.len() as u64).to_le_bytes());
        mac.update(part);
    }
    mac.finalize().into_bytes().into()
}

/// Returns the greeting of an initiator of this version: its beginning, public id of the token, zeros and nonce.
fn greeting(start: &[u8], token: &[u8; 32], nonce: u8) -> Vec<u8> {
    [start, &mac(token, &[b"smddp name"])[..16], &[0; 33], &[nonce; 32]].concat()
}

/// Reads the reply to a greeting, checks that it proves the token, and returns the listener's nonce.
fn read_reply(stream: &mut UnixStream, token: &[u8; 32], greeting: &[u8]) -> Vec<u8> {
    let mut reply = [0; 76];
    stream.read_exact(&mut reply).unwrap();
    assert_eq!(reply[..12], [&b"smddp-hs"[..], &PROTOCOL.to_le_bytes()].concat());
    assert_eq!(reply[44..], mac(token, &[b"smddp listener", greeting, &reply[12..44]]));
    reply[12..44].to_vec()
}

/// Completes the handshake with the token and reads the listener's final message; returns the initiator's proof.
fn complete_handshake(stream: &mut UnixStream, token: &[u8; 32], greeting: &[u8]) -> Vec<u8> {
    let nonce = read_reply(stream, token, greeting);
    let proof = mac(token, &[b"smddp caller", greeting, &nonce]);
    stream.write_all(&proof).unwrap();
    stream.read_exact(&mut [0; 1]).unwrap();
    proof.to_vec()
}

/// Returns true if the listener closed the connection without a reply.
fn is_rejected(stream: &mut UnixStream) -> bool {
    let mut answer = Vec::new();
    // A reset counts as a closed connection.
    let _ = stream.read_to_end(&mut answer);
    answer.is_empty()
}

/// Connects two ranks of this process. Returns them with the socket's name and the beginning of a valid greeting to it.
fn connected_pair() -> ([LocalChannels; 2], String, Vec<u8>) {
    let prepared = [0, 1].map(prepare);
    let name = my_sockets().pop().unwrap();
    let addresses = addresses_of(&prepared);
    let start = greeting_start(b"smddp-hs", PROTOCOL, [1; 16], addresses[0].process.id);
    (prepared.map(|p| p.connect(addresses.clone()).unwrap()), name, start)
}

/// Decodes eight bytes from sixteen digits.
fn from_hex(text: &str) -> Vec<u8> {
    (0..8).map(|i| u8::from_str_radix(&text[2 * i..2 * i + 2], 16).unwrap()).collect()
}

fn replace(bytes: &mut [u8], old: &[u8], new: &[u8]) {
    let at = bytes.windows(old.len()).position(|window| window == old).unwrap();
    bytes[at..at + new.len()].copy_from_slice(new);
}

/// Returns this process as rank 1, and the address of a rank 0 that does not exist, with an altered id and socket name. Also
/// returns that socket's name and that id.
fn false_peer() -> (Prepared, Vec<RankAddress>, String, [u8; 16]) {
    let prepared = prepare(1);
    let name = my_sockets().pop().unwrap();
    let digits = name.rsplit('-').next().unwrap().to_owned();
    let id = from_hex(&digits);
    let other: Vec<u8> = id.iter().map(|byte| !byte).collect();
    let other_digits: String = other.iter().map(|byte| format!("{byte:02x}")).collect();
    let other_name = name.replace(&digits, &other_digits);
    let mut bytes = postcard::to_allocvec(prepare(0).address()).unwrap();
    let mut whole = prepared.address().process.id;
    whole[..8].copy_from_slice(&other);
    replace(&mut bytes, &id, &other);
    replace(&mut bytes, name.as_bytes(), other_name.as_bytes());
    let addresses = vec![postcard::from_bytes(&bytes).unwrap(), prepared.address().clone()];
    (prepared, addresses, other_name, whole)
}

#[test]
fn wrong_magic_version_or_recipient_gets_no_reply() {
    let _serialized = serialize();
    let prepared = [0, 1].map(prepare);
    let name = my_sockets().pop().unwrap();
    for bytes in [
        greeting_start(b"not-smdd", PROTOCOL, [1; 16], [2; 16]),
        greeting_start(b"smddp-hs", PROTOCOL + 7, [1; 16], [2; 16]),
        // A valid greeting for another process.
        greeting(&greeting_start(b"smddp-hs", PROTOCOL, [1; 16], [2; 16]), &TOKEN, 3),
        b"GET / HTTP/1.1\r\nHost: other.example\r\n\r\n".to_vec(),
    ] {
        let mut stream = dial(&name);
        stream.write_all(&bytes).unwrap();
        assert!(is_rejected(&mut stream), "an invalid greeting got a reply");
    }
    let addresses = addresses_of(&prepared);
    for p in prepared {
        p.connect(addresses.clone()).unwrap();
    }
}

#[test]
fn version_mismatch_error_contains_both_versions() {
    let _serialized = serialize();
    let (prepared, addresses, name, id) = false_peer();
    let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
    let other = PROTOCOL + 41;
    let answering = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.read_exact(&mut [0; 128]).unwrap();
        stream.write_all(&greeting_start(b"smddp-hs", other, id, [0; 16])).unwrap();
    });
    let text = prepared.connect(addresses).err().unwrap().to_string();
    answering.join().unwrap();
    assert!(text.contains(&format!("{PROTOCOL} here")) && text.contains(&format!("{other} there")), "{text}");
    assert!(text.contains("rank 0"), "{text}");
}

#[test]
fn foreign_or_closed_listener_is_an_error_with_the_rank() {
    let _serialized = serialize();
    let (prepared, addresses, name, _) = false_peer();
    let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
    let answering = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.read_exact(&mut [0; 128]).unwrap();
        stream.write_all(&[b'x'; 44]).unwrap();
    });
    let text = prepared.connect(addresses).err().unwrap().to_string();
    answering.join().unwrap();
    assert!(text.contains("rank 0") && text.contains("is not an smddp process"), "{text}");

    let (prepared, addresses, ..) = false_peer();
    let text = prepared.connect(addresses).err().unwrap().to_string();
    assert!(text.contains("rank 0") && text.contains("socket is closed"), "{text}");
}

#[test]
fn connection_of_another_user_gets_no_reply() {
    // SAFETY: returns a number only.
    if unsafe { libc::geteuid() } != 0 {
        println!("skipped: only root can change to another user");
        return;
    }
    let _serialized = serialize();
    let (_groups, name, start) = connected_pair();
    let bytes = greeting(&start, &TOKEN, 3);
    // The same bytes from this user get a reply.
    let mut stream = dial(&name);
    stream.write_all(&bytes).unwrap();
    complete_handshake(&mut stream, &TOKEN, &bytes);
    drop(stream);
    // SAFETY: the child makes system calls and small allocations (glibc's allocator is fork-safe) and exits with `_exit`; it does
    // not return into the test.
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
    // SAFETY: a child of this process.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    assert_eq!(status, 0, "a process of another user got a reply");
}

#[test]
fn connection_without_the_token_is_rejected_despite_recorded_messages() {
    let _serialized = serialize();
    let (_groups, name, start) = connected_pair();
    let mut stream = dial(&name);
    let mine = greeting(&start, &TOKEN, 3);
    stream.write_all(&mine).unwrap();
    let proof = complete_handshake(&mut stream, &TOKEN, &mine);
    let other = [7; 32];
    // Cases: a recorded greeting, a whole recorded exchange, another token under its own id and under the right one, no proof.
    let named = greeting(&start, &TOKEN, 4);
    let reply_bytes = |greeting: &[u8], proof: &[u8]| {
        let mut stream = dial(&name);
        stream.write_all(&[greeting, proof].concat()).unwrap();
        let mut all = Vec::new();
        let _ = stream.read_to_end(&mut all);
        all.len()
    };
    assert_eq!(reply_bytes(&greeting(&start, &other, 3), &[]), 0, "an unknown token got a reply");
    for (greeting, proof) in [
        (&mine, proof.clone()),
        (&named, mac(&other, &[b"smddp caller", &named, &[0; 32]]).to_vec()),
        (&mine, vec![0; 32]),
        // The listener's own MAC is not a valid proof.
        (&mine, mac(&TOKEN, &[b"smddp listener", &mine, &[0; 32]]).to_vec()),
    ] {
        assert_eq!(reply_bytes(greeting, &proof), 76, "more than the listener's own proof");
    }
    // A holder of the token can still connect.
    let mut stream = dial(&name);
    stream.write_all(&mine).unwrap();
    complete_handshake(&mut stream, &TOKEN, &mine);
}

#[test]
fn token_of_a_closed_group_is_rejected() {
    let _serialized = serialize();
    let open_group = Prepared::new(0, 2, CAP).unwrap();
    let (groups, name, start) = connected_pair();
    let greeting = greeting(&start, &TOKEN, 3);
    let mut stream = dial(&name);
    stream.write_all(&greeting).unwrap();
    complete_handshake(&mut stream, &TOKEN, &greeting);
    drop((stream, groups));
    let mut stream = dial(&name);
    stream.write_all(&greeting).unwrap();
    assert!(is_rejected(&mut stream));
    drop(open_group);
}

/// Opens the kernel's status file of the thread that answers connections.
fn service_thread() -> File {
    let begun = Instant::now();
    // The thread sets its name when it starts.
    while begun.elapsed() < Duration::from_secs(10) {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap();
        let mut files = tasks.filter_map(|task| File::open(task.unwrap().path().join("stat")).ok());
        if let Some(found) = files.find(|file| stat(file).contains("(smddp-service)")) {
            return found;
        }
    }
    panic!("no thread is named smddp-service");
}

fn stat(file: &File) -> String {
    let mut bytes = [0; 512];
    let read = file.read_at(&mut bytes, 0).unwrap_or(0);
    String::from_utf8_lossy(&bytes[..read]).into_owned()
}

#[test]
fn incomplete_greetings_do_not_delay_other_connections() {
    let _serialized = serialize();
    let (_groups, name, start) = connected_pair();
    let greeting = greeting(&start, &TOKEN, 3);
    let silent: Vec<UnixStream> = (0..4).map(|_| dial(&name)).collect();
    let halves: Vec<UnixStream> = (0..4)
        .map(|_| {
            let mut stream = dial(&name);
            stream.write_all(&greeting[..30]).unwrap();
            stream
        })
        .collect();
    let begun = Instant::now();
    let mut stream = dial(&name);
    stream.write_all(&greeting).unwrap();
    complete_handshake(&mut stream, &TOKEN, &greeting);
    // The time limit of a single connection is 5 s.
    assert!(begun.elapsed() < Duration::from_secs(3), "{:?}", begun.elapsed());
    // The rest of a greeting may arrive later.
    for mut stream in halves {
        stream.write_all(&greeting[30..]).unwrap();
        complete_handshake(&mut stream, &TOKEN, &greeting);
    }
    drop(silent);
}

#[test]
fn silent_connections_are_evicted_for_a_new_one() {
    let _serialized = serialize();
    let (_groups, name, start) = connected_pair();
    let greeting = greeting(&start, &TOKEN, 3);
    let silent: Vec<UnixStream> = (0..300).map(|_| dial(&name)).collect();
    let mut stream = dial(&name);
    stream.write_all(&greeting).unwrap();
    complete_handshake(&mut stream, &TOKEN, &greeting);
    drop(silent);
}

#[test]
fn connections_wait_for_a_free_descriptor_without_busy_polling() {
    let _serialized = serialize();
    let (_groups, name, start) = connected_pair();
    let greeting = greeting(&start, &TOKEN, 3);
    let limit = |soft: libc::rlim_t| {
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: fills and reads a local structure.
        unsafe {
            assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit), 0);
            let old = std::mem::replace(&mut limit.rlim_cur, soft);
            assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit), 0);
            old
        }
    };
    // SAFETY: creates a socket; connecting it needs no other descriptor.
    let socket = unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) };
    assert!(socket >= 0);
    // SAFETY: a new descriptor without another owner.
    let mut stream = unsafe { UnixStream::from_raw_fd(socket) };
    let mut address =
        libc::sockaddr_un { sun_family: libc::AF_UNIX as libc::sa_family_t, sun_path: [0; 108] };
    for (target, byte) in address.sun_path[1..].iter_mut().zip(name.bytes()) {
        *target = byte as libc::c_char;
    }
    let length = size_of::<libc::sa_family_t>() + 1 + name.len();
    let thread = service_thread();
    // Descriptors 0 to 2 are open, so no other can be opened.
    let old = limit(3);
    // SAFETY: an address of that length; the descriptor belongs to the stream.
    let connected =
        unsafe { libc::connect(stream.as_raw_fd(), (&raw const address).cast(), length as libc::socklen_t) };
    stream.write_all(&greeting).unwrap();
    stream.set_read_timeout(Some(Duration::from_millis(30))).unwrap();
    let samples: Vec<(bool, bool)> =
        (0..50).map(|_| (stream.read(&mut [0; 1]).is_err(), stat(&thread).contains(") S "))).collect();
    limit(old);
    assert_eq!(connected, 0);
    assert!(samples.iter().all(|sample| sample.0), "a reply without a free descriptor");
    let asleep = samples.iter().filter(|sample| sample.1).count();
    assert!(asleep > 10, "the thread slept in {asleep} of {} samples", samples.len());
    // The connection is accepted as soon as descriptors are free.
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    complete_handshake(&mut stream, &TOKEN, &greeting);
}
