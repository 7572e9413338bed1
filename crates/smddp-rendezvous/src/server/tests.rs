use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Instant;

use super::connection::{CHUNK, CHUNKS_PER_PASS};
use super::serving::MAX_SILENT;
use super::values::{ENTRY, SPARE_MEMBERS};
use super::*;
use crate::protocol::{GET, GREETING, MAX_VALUE, REQUEST_TIMEOUT};
use crate::store::Client;

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

fn member(server: &Server) -> Client {
    Client::connect(&server.addr().to_string(), soon()).unwrap()
}

fn threads() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let name =
        |task: &std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm")).unwrap_or_default();
    tasks.filter(|task| name(task).trim() == "smddp-store").count()
}

/// Returns true if the server closes the connection within a second.
fn is_closed(mut stream: &TcpStream) -> bool {
    stream.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
    match stream.read(&mut [0; 64]) {
        Ok(0) => true,
        Ok(_) => is_closed(stream),
        Err(error) => error.kind() == io::ErrorKind::ConnectionReset,
    }
}

#[test]
fn flood_of_silent_connections_blocks_no_rank_and_uses_a_bounded_number_of_descriptors() {
    let server = Server::bind("127.0.0.1:0", 4).unwrap();
    let mut early = member(&server);
    early.set("key/0", b"early").unwrap();
    let flood: Vec<TcpStream> = (0..2 * MAX_SILENT + 40)
        .map(|index| {
            let mut stream = TcpStream::connect(server.addr()).unwrap();
            // Nothing, a part of the greeting, the greeting, an incomplete request, a request of impossible length.
            let bytes = [&GREETING[..], &[GET, 200, 0, 1, 0, 0, 0, b'a']].concat();
            let bytes = [&bytes[..0], &bytes[..7], &bytes[..16], &bytes, &[0xff; 40][..]][index % 5];
            let _ = stream.write_all(bytes);
            stream
        })
        .collect();
    let begun = Instant::now();
    for rank in 1..4 {
        let mut client = member(&server);
        client.set(&format!("key/{rank}"), b"late").unwrap();
        assert_eq!(client.get("key/0", soon()).unwrap().as_deref(), Some(&b"early"[..]));
    }
    assert_eq!(early.get("key/3", soon()).unwrap().as_deref(), Some(&b"late"[..]));
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    // Other tests run servers too.
    assert!(threads() < MAX_SILENT / 4, "a thread for each connection");
    // A fifth of the connections was closed because of a malformed request.
    let evicted = flood.len() * 4 / 5 - MAX_SILENT;
    assert!(flood[..evicted].iter().all(is_closed), "the oldest connections are not closed");
}

#[test]
fn connection_without_a_request_is_closed_exactly_at_the_timeout() {
    let server = Server::bind("127.0.0.1:0", 2).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let at = listener.local_addr().unwrap();
    let mut serving = Serving::new(listener, Arc::clone(&server.shared)).unwrap();
    let begun = Instant::now();
    let half = [GREETING, &[GET, 1, 0, 255, 255, 0, 0][..]].concat();
    let mut connect = |bytes: &[u8]| {
        let mut stream = TcpStream::connect(at).unwrap();
        stream.write_all(bytes).unwrap();
        serving.accept();
        serving.serve(serving.next - 1, &mut [0; 64]);
        (serving.connections.len(), serving.silent.len(), stream)
    };
    let _streams = [b"", &GREETING[..], &half].map(&mut connect);
    let (connections, silent, _member) = connect(&[&half[..], b"k"].concat());
    assert_eq!((connections, silent), (4, 3), "a member is counted as a silent connection");
    serving.expire(begun + REQUEST_TIMEOUT - Duration::from_nanos(1));
    assert_eq!(serving.connections.len(), 4);
    serving.expire(Instant::now() + REQUEST_TIMEOUT);
    assert_eq!((serving.connections.len(), serving.silent.len()), (1, 0));
    assert!(serving.until().is_some_and(|until| until > begun + REQUEST_TIMEOUT), "the pending get");
    assert_eq!(server.shared.used.load(Ordering::Relaxed), 0);
}

#[test]
fn members_and_bytes_are_bounded_and_only_an_exceeding_member_is_closed() {
    let server = Server::bind("127.0.0.1:0", 1).unwrap();
    let max = server.shared.max_bytes.load(Ordering::Relaxed);
    let mut good = member(&server);
    good.set("key/0", b"kept").unwrap();
    // The last bytes of a request are processed also if they arrive in a separate read.
    for size in (CHUNKS_PER_PASS - 1) * CHUNK..(CHUNKS_PER_PASS - 1) * CHUNK + 8 {
        good.set("odd", &vec![1; size]).unwrap();
        assert_eq!(good.get("odd", soon()).unwrap().map(|value| value.len()), Some(size));
    }
    good.delete("odd").unwrap();
    // One value of maximum size fits. A second does not, whether it is stored or only partly received.
    let mut greedy = member(&server);
    greedy.set("a", &vec![1; MAX_VALUE]).unwrap();
    assert!(greedy.get("a", soon()).unwrap().is_some_and(|value| value.len() == MAX_VALUE));
    let refused = greedy.set("b", &vec![1; MAX_VALUE]).and_then(|()| greedy.get("b", Instant::now()));
    assert!(refused.is_err(), "a second value of maximum size is stored");
    assert!(server.shared.used.load(Ordering::Relaxed) <= max);
    // Replaced and deleted values are not counted.
    let mut next = member(&server);
    next.set("a", b"").unwrap();
    next.set("b", &vec![1; MAX_VALUE]).unwrap();
    next.delete("b").unwrap();
    assert_eq!(next.get("a", soon()).unwrap().as_deref(), Some(&b""[..]));
    assert!(server.shared.used.load(Ordering::Relaxed) < 4 * ENTRY);
    let members: Vec<_> = (0..SPARE_MEMBERS - 1).map(|_| member(&server)).collect();
    let one_more = Client::connect(&server.addr().to_string(), Instant::now() + Duration::from_millis(100));
    assert!(one_more.is_err(), "{} members", members.len());
    assert_eq!(good.get("key/0", soon()).unwrap().as_deref(), Some(&b"kept"[..]));
}

#[test]
fn closing_a_connection_cancels_its_pending_get() {
    let server = Server::bind("127.0.0.1:0", 2).unwrap();
    let mut stream = TcpStream::connect(server.addr()).unwrap();
    let get = |wait: u32| [&[GET, 1, 0][..], &wait.to_le_bytes(), b"k"].concat();
    stream.write_all(&[&GREETING[..], &get(0), &get(u32::MAX)].concat()).unwrap();
    let mut answer = [0; 21];
    stream.read_exact(&mut answer).unwrap();
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    assert!(is_closed(&stream));
}
