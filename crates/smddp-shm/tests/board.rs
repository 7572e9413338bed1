//! Shared pages of flags between the ranks of a node, and memory exports over the sockets of their processes.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::{self, BufRead, BufReader, Read, Seek, Write};
use std::os::fd::OwnedFd;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::param::page_size;
use smddp_net::Token;
use smddp_process::MemoryExport;
use smddp_shm::{LocalChannels, Prepared, RankAddress, SharedPage};

const CAP: usize = 1 << 20;
const CHILD: &str = "SMDDP_TEST_CHILD";
const LIMIT: Duration = Duration::from_secs(60);

fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(text: &str) -> Vec<u8> {
    (0..text.len() / 2).map(|i| u8::from_str_radix(&text[2 * i..2 * i + 2], 16).unwrap()).collect()
}

fn flag(shared_page: &SharedPage, rank: usize, index: usize) -> &AtomicU64 {
    let page = shared_page.page(rank).unwrap();
    assert!(page.addr().is_multiple_of(page_size()) && SharedPage::PAGE.is_multiple_of(page_size()));
    // SAFETY: within the page, which lives as long as `shared_page`; all ranks access it as an atomic.
    unsafe { AtomicU64::from_ptr(page.cast::<u64>().add(index)) }
}

fn until(failure: &str, mut done: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < LIMIT, "{failure}");
        std::thread::yield_now();
    }
}

/// Creates one of two ranks in two processes that exchange text lines.
fn shared_page(
    rank: usize,
    from: &mut impl BufRead,
    to: &mut impl Write,
) -> (LocalChannels, Arc<SharedPage>) {
    let mut prepared = Prepared::new(rank, 2, CAP).unwrap();
    send_line(to, &to_hex(&postcard::to_allocvec(prepared.address()).unwrap()));
    let theirs: RankAddress = postcard::from_bytes(&from_hex(&receive_line(from))).unwrap();
    let mut addresses = vec![prepared.address().clone(), theirs];
    if rank == 1 {
        addresses.swap(0, 1);
    }
    let token: Token = postcard::from_bytes(&[7; 32]).unwrap();
    prepared.trust(&Arc::new(token));
    // No rank connects before the other one accepts connections.
    send_line(to, "ready");
    receive_line(from);
    let link = prepared.connect(addresses).unwrap();
    let shared_page = link.shared_page(vec![Some(0), Some(1)]).unwrap();
    (link, shared_page)
}

fn send_line(to: &mut impl Write, line: &str) {
    to.write_all(format!("\n@{line}\n").as_bytes()).unwrap();
    to.flush().unwrap();
}

/// Returns the next line of the protocol between the two processes.
fn receive_line(from: &mut impl BufRead) -> String {
    loop {
        let mut line = String::new();
        assert!(from.read_line(&mut line).unwrap() > 0, "the other process ended");
        if let Some(line) = line.trim_end().strip_prefix('@') {
            return line.to_owned();
        }
    }
}

fn file(contents: &str) -> OwnedFd {
    let fd = rustix::fs::memfd_create(c"lent", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let mut file = std::fs::File::from(fd);
    file.write_all(contents.as_bytes()).unwrap();
    file.into()
}

fn contents(fd: OwnedFd) -> String {
    let (mut file, mut text) = (std::fs::File::from(fd), String::new());
    file.rewind().unwrap();
    file.read_to_string(&mut text).unwrap();
    text
}

struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Rank 1: exports memory, sends the tokens, and communicates through flags.
fn exporter_process() {
    let (mut from, mut to) = (BufReader::new(io::stdin()), io::stdout());
    let (_link, shared_page) = shared_page(1, &mut from, &mut to);
    let times = Arc::new(AtomicUsize::new(0));
    let calls = times.clone();
    let bytes = |count: usize, fds: usize| {
        move || {
            let fds = (0..fds).map(|i| file(&format!("file {i}"))).collect();
            Ok(MemoryExport { bytes: (0..count).map(|i| i as u8).collect(), fds })
        }
    };
    let tokens = [
        shared_page.export(Box::new(move || {
            calls.fetch_add(1, Ordering::SeqCst);
            bytes(3, 2)()
        })),
        shared_page.export(Box::new(bytes(MemoryExport::MOST_BYTES, MemoryExport::MOST_FDS))),
        shared_page.export(Box::new(bytes(MemoryExport::MOST_BYTES + 1, 0))),
        shared_page.export(Box::new(bytes(0, MemoryExport::MOST_FDS + 1))),
        shared_page.export(Box::new(|| Err(io::Error::other("export refused")))),
        shared_page.export(Box::new(bytes(1, 0))),
    ];
    shared_page.withdraw(tokens[5]);
    send_line(&mut to, &tokens.map(|token| token.to_string()).join(" "));
    // Both processes see the same two pages.
    until("rank 0 does not write its flag", || flag(&shared_page, 0, 511).load(Ordering::Acquire) == 7);
    flag(&shared_page, 1, 3).store(8, Ordering::Release);
    assert_eq!(flag(&shared_page, 1, 511).load(Ordering::Acquire), 0);
    receive_line(&mut from);
    assert_eq!(times.load(Ordering::SeqCst), 2, "each import calls the exporter");
}

#[test]
fn exports_or_their_errors_reach_another_process_and_pages_are_shared() {
    if std::env::var(CHILD).is_ok() {
        return exporter_process();
    }
    let name = "exports_or_their_errors_reach_another_process_and_pages_are_shared";
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture", "--test-threads=1"])
        .env(CHILD, "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let (mut to, from) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    let (mut from, mut child) = (BufReader::new(from), Ended(child));
    let (_link, shared_page) = shared_page(0, &mut from, &mut to);
    let tokens: Vec<u64> = receive_line(&mut from).split(' ').map(|token| token.parse().unwrap()).collect();

    for _ in 0..2 {
        let imported = shared_page.import(1, tokens[0]).unwrap();
        assert_eq!(imported.bytes, [0, 1, 2]);
        let texts: Vec<String> = imported.fds.into_iter().map(contents).collect();
        assert_eq!(texts, ["file 0", "file 1"], "descriptors keep their order");
    }
    let most = shared_page.import(1, tokens[1]).unwrap();
    assert!(most.bytes.iter().enumerate().all(|(i, &byte)| byte == i as u8));
    assert_eq!((most.bytes.len(), most.fds.len()), (MemoryExport::MOST_BYTES, MemoryExport::MOST_FDS));
    assert_eq!(
        contents(most.fds.into_iter().next_back().unwrap()),
        format!("file {}", MemoryExport::MOST_FDS - 1)
    );

    let refused = |token: u64| shared_page.import(1, token).unwrap_err().to_string();
    assert!(refused(tokens[2]).contains("exceeds the limit of"), "{}", refused(tokens[2]));
    assert!(refused(tokens[3]).contains("exceeds the limit of"), "{}", refused(tokens[3]));
    assert_eq!(refused(tokens[4]), "export refused");
    for unknown in [tokens[5], 1 << 40] {
        assert_eq!(refused(unknown), format!("no export has number {unknown}"));
    }
    assert_eq!(shared_page.import(2, tokens[0]).unwrap_err().to_string(), "it is on another node");

    flag(&shared_page, 0, 511).store(7, Ordering::Release);
    until("rank 1 does not write its flag", || flag(&shared_page, 1, 3).load(Ordering::Acquire) == 8);
    send_line(&mut to, "over");
    assert!(child.0.wait().unwrap().success());
    // The process has ended: the import fails immediately instead of waiting.
    let begun = Instant::now();
    shared_page.import(1, tokens[0]).unwrap_err();
    assert!(begun.elapsed() < Duration::from_secs(4), "{:?}", begun.elapsed());
}
