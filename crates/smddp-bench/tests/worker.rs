//! Tests of the worker with the commands of the lab's coordinator.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Child, Command};
use std::time::Duration;

struct Peer {
    rank: usize,
    lines: BufReader<UnixStream>,
}

impl Peer {
    fn read(&mut self) -> String {
        let mut line = String::new();
        self.lines.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }
}

/// Accepts the next worker's connection. Panics if the workers have exited.
fn accept(listener: &UnixListener, parent: &mut Child) -> UnixStream {
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false).unwrap();
                return stream;
            }
            Err(_) if parent.try_wait().unwrap().is_none() => std::thread::sleep(Duration::from_millis(5)),
            Err(e) => panic!("the workers exited before their greeting: {e}"),
        }
    }
}

struct Coordinator {
    /// The parent of all workers.
    parent: Child,
    peers: Vec<Peer>,
    socket: PathBuf,
}

impl Coordinator {
    fn start(ranks: usize, name: &str) -> Coordinator {
        let socket = std::env::temp_dir().join(format!("bench-{name}-{}", std::process::id()));
        let listener = UnixListener::bind(&socket).unwrap();
        listener.set_nonblocking(true).unwrap();
        let mut parent = Command::new(env!("CARGO_BIN_EXE_smddp-bench"))
            .args(["worker", "--nproc", &ranks.to_string()])
            .env("PEERS_SOCK", &socket)
            .env("PEERS_NAME", name)
            .spawn()
            .unwrap();
        let mut peers: Vec<Peer> = (0..ranks)
            .map(|_| {
                let mut peer = Peer { rank: 0, lines: BufReader::new(accept(&listener, &mut parent)) };
                let hello = peer.read();
                let words: Vec<&str> = hello.splitn(6, ' ').collect();
                assert_eq!(words[..2], ["hello", name], "{hello}");
                assert_eq!(words[3], ranks.to_string(), "{hello}");
                assert!(words[5].starts_with("smddp-core"), "{hello}");
                peer.rank = words[2].parse().unwrap();
                peer
            })
            .collect();
        peers.sort_by_key(|p| p.rank);
        Coordinator { parent, peers, socket }
    }

    /// Sends a command to every rank, and returns the replies in rank order.
    fn request(&mut self, command: &str) -> Vec<String> {
        for peer in &mut self.peers {
            peer.lines.get_mut().write_all(format!("{command}\n").as_bytes()).unwrap();
        }
        self.peers.iter_mut().map(Peer::read).collect()
    }

    fn expect_replies(&mut self, command: &str, expected: &str) {
        for reply in self.request(command) {
            assert_eq!(reply, expected, "{command}");
        }
    }

    fn stop(mut self) {
        for peer in &mut self.peers {
            peer.lines.get_mut().write_all(b"quit\n").unwrap();
        }
        assert!(self.parent.wait().unwrap().success());
        std::fs::remove_file(&self.socket).unwrap();
    }
}

#[test]
fn worker_implements_the_labs_protocol() {
    let mut coordinator = Coordinator::start(3, "protocol");
    for op in ["all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all", "copy"] {
        for (dtype, size) in [("f32", 4), ("f64", 8), ("i8", 1), ("bf16", 2), ("f16", 2)] {
            for bytes in [0, 8, 1000, 100_000] {
                let part = (bytes / size / 3).max(1);
                coordinator.expect_replies(
                    &format!("prep {op} {bytes} {dtype}"),
                    &format!("ok {}", part * 3 * size),
                );
                coordinator.expect_replies("check", "wrong 0");
                for reply in coordinator.request("time 3") {
                    let elapsed = reply.strip_prefix("ns ").and_then(|n| n.parse::<u64>().ok());
                    assert!(elapsed.is_some(), "{op}: {reply}");
                }
                coordinator.expect_replies("check", "wrong 0");
                coordinator.expect_replies("free", "ok 0");
            }
        }
    }
    coordinator.expect_replies("prep all_gathers 8 f32", "no such op or type");
    coordinator.expect_replies("prep all_gather 8 f31", "no such op or type");
    coordinator.expect_replies("time 1", "error no call is prepared: send prep first");
    coordinator.stop();
}
