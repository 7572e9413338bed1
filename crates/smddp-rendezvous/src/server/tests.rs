use super::*;
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

/// Returns true if the server closes that connection within a second.
fn is_closed(mut stream: &TcpStream) -> bool {
    stream.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
    match stream.read(&mut [0; 64]) {
        Ok(0) => true,
        Ok(_) => is_closed(stream),
        Err(error) => error.kind() == io::ErrorKind::ConnectionReset,
    }
}

#[test]
fn a_flood_of_silent_connections_keeps_no_rank_out_and_costs_a_bounded_number_of_descriptors() {
    let server = Server::bind("127.0.0.1:0", 4).unwrap();
    let mut early = member(&server);
    early.set("key/0", b"early").unwrap();
    let flood: Vec<TcpStream> = (0..2 * MAX_SILENT + 40)
        .map(|index| {
            let mut stream = TcpStream::connect(server.addr()).unwrap();
            // Nothing, a part of the greeting, the greeting, a request without an end, one of impossible length.
            let words = [&GREETING[..], &[GET, 200, 0, 1, 0, 0, 0, b'a']].concat();
            let words = [&words[..0], &words[..7], &words[..16], &words, &[0xff; 40][..]][index % 5];
            let _ = stream.write_all(words);
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
    // Other tests serve, too.
    assert!(threads() < MAX_SILENT / 4, "a thread for each connection");
    // A fifth of them ended by what they sent.
    let evicted = flood.len() * 4 / 5 - MAX_SILENT;
    assert!(flood[..evicted].iter().all(is_closed), "the oldest ones are kept");
}

#[test]
fn a_connection_without_a_request_ends_in_time_and_no_moment_earlier() {
    let server = Server::bind("127.0.0.1:0", 2).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let at = listener.local_addr().unwrap();
    let mut serving = Serving::new(listener, Arc::clone(&server.shared)).unwrap();
    let begun = Instant::now();
    let half = [GREETING, &[GET, 1, 0, 255, 255, 0, 0][..]].concat();
    let mut connect = |words: &[u8]| {
        let mut stream = TcpStream::connect(at).unwrap();
        stream.write_all(words).unwrap();
        serving.accept();
        serving.serve(serving.next - 1, &mut [0; 64]);
        (serving.connections.len(), serving.silent.len(), stream)
    };
    let _streams = [b"", &GREETING[..], &half].map(&mut connect);
    let (connections, silent, _member) = connect(&[&half[..], b"k"].concat());
    assert_eq!((connections, silent), (4, 3), "a member is taken for a silent connection");
    serving.expire(begun + PATIENCE - Duration::from_nanos(1));
    assert_eq!(serving.connections.len(), 4);
    serving.expire(Instant::now() + PATIENCE);
    assert_eq!((serving.connections.len(), serving.silent.len()), (1, 0));
    assert!(serving.until().is_some_and(|until| until > begun + PATIENCE), "the pending get");
    assert_eq!(server.shared.used.load(Ordering::Relaxed), 0);
}

#[test]
fn members_and_bytes_are_bounded_and_a_member_that_exceeds_them_ends_alone() {
    let server = Server::bind("127.0.0.1:0", 1).unwrap();
    let max = server.shared.max_bytes.load(Ordering::Relaxed);
    let mut good = member(&server);
    good.set("key/0", b"kept").unwrap();
    // The end of a request that comes alone is processed, whatever was received before it.
    for size in (CHUNKS_PER_TURN - 1) * CHUNK..(CHUNKS_PER_TURN - 1) * CHUNK + 8 {
        good.set("odd", &vec![1; size]).unwrap();
        assert_eq!(good.get("odd", soon()).unwrap().map(|value| value.len()), Some(size));
    }
    good.delete("odd").unwrap();
    // One largest value fits, and a second one does not, be it stored or only half sent.
    let mut greedy = member(&server);
    greedy.set("a", &vec![1; MAX_VALUE]).unwrap();
    assert!(greedy.get("a", soon()).unwrap().is_some_and(|value| value.len() == MAX_VALUE));
    let refused = greedy.set("b", &vec![1; MAX_VALUE]).and_then(|()| greedy.get("b", Instant::now()));
    assert!(refused.is_err(), "a second one is stored");
    assert!(server.shared.used.load(Ordering::Relaxed) <= max);
    // What is replaced or deleted counts no more.
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
fn a_pending_get_ends_with_its_connection() {
    let server = Server::bind("127.0.0.1:0", 2).unwrap();
    let mut stream = TcpStream::connect(server.addr()).unwrap();
    let get = |wait: u32| [&[GET, 1, 0][..], &wait.to_le_bytes(), b"k"].concat();
    stream.write_all(&[&GREETING[..], &get(0), &get(u32::MAX)].concat()).unwrap();
    let mut answer = [0; 21];
    stream.read_exact(&mut answer).unwrap();
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    assert!(is_closed(&stream));
}
