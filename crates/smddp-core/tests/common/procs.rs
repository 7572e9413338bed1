//! Ranks as processes: the test starts its binary again, once per rank, with a role.
//!
//! Ranks and test exchange lines over the ranks' standard input and output. The test process holds a small key-value
//! store for the ranks: a get returns as soon as the key exists. It also receives the ranks' reports. After any error
//! the test kills all ranks and prints their output.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Maximum number of lines printed for a failed test.
const LAST: usize = 120;
const ROLE: &str = "SMDDP_TEST_ROLE";
const RANK: &str = "SMDDP_TEST_RANK";
const SIZE: &str = "SMDDP_TEST_SIZE";

/// One rank in a separate process.
pub(crate) struct RankProcess {
    pub(crate) role: String,
    pub(crate) rank: usize,
    pub(crate) size: usize,
}

impl RankProcess {
    /// Returns this process as a rank; `None` in the test process.
    pub(crate) fn role() -> Option<Self> {
        let number = |name: &str| std::env::var(name).unwrap().parse().unwrap();
        let role = std::env::var(ROLE).ok()?;
        // Restores the default of programs in other languages: a write to a closed pipe ends the process.
        // SAFETY: no thread of this process has begun to write.
        unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
        Some(Self { role, rank: number(RANK), size: number(SIZE) })
    }

    /// Sends a report to the test.
    pub(crate) fn report(&self, line: &str) {
        send_line(&format!("@report {line}"));
    }

    pub(crate) fn put(&self, key: &str, value: &str) {
        send_line(&format!("@put {key} {value}"));
    }

    /// Waits until `key` exists. Only one thread of a rank may call it at a time.
    pub(crate) fn get(&self, key: &str) -> String {
        send_line(&format!("@get {key}"));
        let mut line = String::new();
        // The test process has exited, so this rank exits too.
        if std::io::stdin().read_line(&mut line).unwrap_or(0) == 0 {
            std::process::exit(3);
        }
        line.trim_end().to_owned()
    }
}

fn send_line(line: &str) {
    let mut out = std::io::stdout().lock();
    // The leading newline separates it from the output of the test harness.
    let _ = out.write_all(format!("\n{line}\n").as_bytes());
    let _ = out.flush();
}

pub(crate) fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

pub(crate) fn from_hex(text: &str) -> Vec<u8> {
    (0..text.len() / 2).map(|i| u8::from_str_radix(&text[2 * i..2 * i + 2], 16).unwrap()).collect()
}

#[derive(Default)]
struct Store {
    values: HashMap<String, String>,
    /// Ranks that wait for a key.
    waiting: Vec<(String, usize)>,
}

struct Shared {
    store: Mutex<Store>,
    inputs: Mutex<Vec<Option<ChildStdin>>>,
    /// All output of the ranks, with the time since the start.
    log: Mutex<Vec<(Duration, usize, String)>>,
    begun: Instant,
}

impl Shared {
    fn put(&self, key: &str, value: &str) {
        let ready: Vec<usize> = {
            let mut store = self.store.lock().unwrap();
            store.values.insert(key.to_owned(), value.to_owned());
            let (ready, waiting) =
                std::mem::take(&mut store.waiting).into_iter().partition(|(k, _)| k == key);
            store.waiting = waiting;
            let ready: Vec<(String, usize)> = ready;
            ready.into_iter().map(|(_, rank)| rank).collect()
        };
        for rank in ready {
            self.reply(rank, value);
        }
    }

    fn get(&self, rank: usize, key: &str) {
        let found = {
            let mut store = self.store.lock().unwrap();
            let found = store.values.get(key).cloned();
            if found.is_none() {
                store.waiting.push((key.to_owned(), rank));
            }
            found
        };
        if let Some(value) = found {
            self.reply(rank, &value);
        }
    }

    fn reply(&self, rank: usize, value: &str) {
        if let Some(input) = &mut self.inputs.lock().unwrap()[rank] {
            // The rank may be dead.
            let _ = input.write_all(format!("{value}\n").as_bytes());
        }
    }

    fn listen(&self, rank: usize, from: impl std::io::Read, events: Option<Sender<Event>>) {
        self.read(rank, from, events.as_ref());
        if let Some(events) = events {
            let _ = events.send(Event::End(rank));
        }
    }

    fn read(&self, rank: usize, from: impl std::io::Read, events: Option<&Sender<Event>>) {
        for line in BufReader::new(from).lines() {
            let Ok(line) = line else { return };
            if line.is_empty() {
                continue;
            }
            let (verb, rest) = line.split_once(' ').unwrap_or((&line, ""));
            match verb {
                "@get" => self.get(rank, rest),
                "@put" => {
                    let (key, value) = rest.split_once(' ').unwrap_or((rest, ""));
                    self.put(key, value);
                }
                _ => {
                    self.log.lock().unwrap().push((self.begun.elapsed(), rank, line.clone()));
                    if verb == "@report"
                        && let Some(events) = events
                    {
                        let text = rest.to_owned();
                        let _ = events.send(Event::Report(Report { rank, at: Instant::now(), text }));
                    }
                }
            }
        }
    }
}

/// A line that a rank reported to the test.
#[derive(Clone, Debug)]
pub(crate) struct Report {
    pub(crate) rank: usize,
    pub(crate) at: Instant,
    pub(crate) text: String,
}

enum Event {
    Report(Report),
    /// The output of this rank has ended.
    End(usize),
}

/// The ranks of a test. Its drop kills all of them.
pub(crate) struct Ranks {
    children: Vec<Child>,
    shared: Arc<Shared>,
    events: Receiver<Event>,
    ended: Vec<bool>,
    /// Received and not yet requested.
    reports: Vec<Report>,
    deadline: Instant,
}

/// Starts `size` ranks in `role` with a time limit. In values, `{pair}` stands for half the rank and `{rank}` for the
/// rank.
pub(crate) fn start(role: &str, size: usize, environment: &[(&str, &str)], timeout: Duration) -> Ranks {
    let shared = Arc::new(Shared {
        store: Mutex::default(),
        inputs: Mutex::default(),
        log: Mutex::default(),
        begun: Instant::now(),
    });
    let (sender, events) = channel();
    let mut children = Vec::new();
    for rank in 0..size {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "rank_process", "--nocapture", "--test-threads=1"])
            .env(ROLE, role)
            .env(RANK, rank.to_string())
            .env(SIZE, size.to_string())
            .env("RUST_BACKTRACE", "0")
            .envs(environment.iter().map(|(name, value)| {
                let value = value.replace("{pair}", &(rank / 2).to_string());
                (name, value.replace("{rank}", &rank.to_string()))
            }))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        shared.inputs.lock().unwrap().push(child.stdin.take());
        let (out, err) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
        let (a, b, sender) = (shared.clone(), shared.clone(), sender.clone());
        std::thread::spawn(move || a.listen(rank, out, Some(sender)));
        std::thread::spawn(move || b.listen(rank, err, None));
        children.push(child);
    }
    Ranks {
        children,
        shared,
        events,
        ended: vec![false; size],
        reports: Vec::new(),
        deadline: Instant::now() + timeout,
    }
}

impl Ranks {
    pub(crate) fn pid(&self, rank: usize) -> u32 {
        self.children[rank].id()
    }

    pub(crate) fn put(&self, key: &str, value: &str) {
        self.shared.put(key, value);
    }

    /// Returns the next report of `rank` that begins with `prefix`, within the ranks' time limit.
    pub(crate) fn wait_for(&mut self, rank: usize, prefix: &str) -> Report {
        loop {
            if let Some(at) = self.reports.iter().position(|r| r.rank == rank && r.text.starts_with(prefix)) {
                return self.reports.remove(at);
            }
            if self.ended[rank] {
                let status = self.exit(rank);
                self.fail(&format!("rank {rank} did not report `{prefix}`; it exited with {status}"));
            }
            let left = self.deadline.saturating_duration_since(Instant::now());
            match self.events.recv_timeout(left) {
                Ok(Event::Report(report)) => self.reports.push(report),
                Ok(Event::End(rank)) => self.ended[rank] = true,
                Err(_) => self.fail(&format!("rank {rank} did not report `{prefix}` in time")),
            }
        }
    }

    /// Kills `rank` with SIGKILL and reaps it. Returns the time of the signal.
    pub(crate) fn kill(&mut self, rank: usize) -> Instant {
        self.children[rank].kill().unwrap();
        let at = Instant::now();
        self.children[rank].wait().unwrap();
        at
    }

    /// Waits for the exit of `rank`.
    pub(crate) fn exit(&mut self, rank: usize) -> ExitStatus {
        loop {
            if let Some(status) = self.children[rank].try_wait().unwrap() {
                return status;
            }
            if Instant::now() > self.deadline {
                self.fail(&format!("rank {rank} did not exit in time"));
            }
            std::thread::park_timeout(Duration::from_millis(1));
        }
    }

    /// Waits until all of `ranks` have exited successfully.
    pub(crate) fn finish(mut self, ranks: impl IntoIterator<Item = usize>) {
        for rank in ranks {
            let status = self.exit(rank);
            if !status.success() {
                self.fail(&format!("rank {rank} exited with {status}"));
            }
        }
    }

    /// Kills all ranks and fails the test with their output.
    pub(crate) fn fail(&mut self, reason: &str) -> ! {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
        let mut text = format!("{reason}\n");
        let log = self.shared.log.lock().unwrap();
        for (at, rank, line) in &log[log.len().saturating_sub(LAST)..] {
            text += &format!("{:9.3} rank {rank}: {line}\n", at.as_secs_f64());
        }
        panic!("{text}");
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
