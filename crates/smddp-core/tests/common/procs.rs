//! Ranks as real processes: the test starts its own binary again, once per rank, with a role to play.
//!
//! Ranks and test talk in lines over the ranks' standard input and output. The test holds a small store that the
//! ranks put values in and get values from (a get is answered as soon as the value is there), and hears what they
//! say. Whatever goes wrong, every rank is killed and what each of them said is printed.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Lines printed of a failed test.
const LAST: usize = 120;
const ROLE: &str = "SMDDP_TEST_ROLE";
const RANK: &str = "SMDDP_TEST_RANK";
const SIZE: &str = "SMDDP_TEST_SIZE";

/// One rank, in its own process.
pub(crate) struct Me {
    pub(crate) role: String,
    pub(crate) rank: usize,
    pub(crate) size: usize,
}

impl Me {
    /// This process as a rank; `None` in the test itself.
    pub(crate) fn role() -> Option<Self> {
        let number = |name: &str| std::env::var(name).unwrap().parse().unwrap();
        let role = std::env::var(ROLE).ok()?;
        // As in a program that is not Rust's or Python's: a write to whoever is gone would end it.
        // SAFETY: no thread of this process has begun to write.
        unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
        Some(Self { role, rank: number(RANK), size: number(SIZE) })
    }

    /// Tells the test.
    pub(crate) fn say(&self, line: &str) {
        tell(&format!("@say {line}"));
    }

    pub(crate) fn put(&self, key: &str, value: &str) {
        tell(&format!("@put {key} {value}"));
    }

    /// Waits until `key` is there. One thread of a rank at a time.
    pub(crate) fn get(&self, key: &str) -> String {
        tell(&format!("@get {key}"));
        let mut line = String::new();
        // No test any more: nobody wants this rank.
        if std::io::stdin().read_line(&mut line).unwrap_or(0) == 0 {
            std::process::exit(3);
        }
        line.trim_end().to_owned()
    }
}

fn tell(line: &str) {
    let mut out = std::io::stdout().lock();
    // The leading end of line parts it from what the test harness prints.
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
    /// Everything that every rank printed, with the time since the start.
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
            self.answer(rank, value);
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
            self.answer(rank, &value);
        }
    }

    fn answer(&self, rank: usize, value: &str) {
        if let Some(input) = &mut self.inputs.lock().unwrap()[rank] {
            // A dead rank does not listen.
            let _ = input.write_all(format!("{value}\n").as_bytes());
        }
    }

    fn listen(&self, rank: usize, from: impl std::io::Read, said: Option<Sender<Heard>>) {
        self.read(rank, from, said.as_ref());
        if let Some(said) = said {
            let _ = said.send(Heard::End(rank));
        }
    }

    fn read(&self, rank: usize, from: impl std::io::Read, said: Option<&Sender<Heard>>) {
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
                    if verb == "@say"
                        && let Some(said) = said
                    {
                        let text = rest.to_owned();
                        let _ = said.send(Heard::Line(Said { rank, at: Instant::now(), text }));
                    }
                }
            }
        }
    }
}

/// A line that a rank told the test.
#[derive(Clone, Debug)]
pub(crate) struct Said {
    pub(crate) rank: usize,
    pub(crate) at: Instant,
    pub(crate) text: String,
}

enum Heard {
    Line(Said),
    /// This rank says no more.
    End(usize),
}

/// The ranks as the test sees them. None outlives this value.
pub(crate) struct Ranks {
    children: Vec<Child>,
    shared: Arc<Shared>,
    said: Receiver<Heard>,
    ended: Vec<bool>,
    /// Heard, not yet asked for.
    kept: Vec<Said>,
    until: Instant,
}

/// Starts `size` ranks in `role`. They have `patience` to finish. `{pair}` in a value is half the rank.
pub(crate) fn start(role: &str, size: usize, environment: &[(&str, &str)], patience: Duration) -> Ranks {
    let shared = Arc::new(Shared {
        store: Mutex::default(),
        inputs: Mutex::default(),
        log: Mutex::default(),
        begun: Instant::now(),
    });
    let (sender, said) = channel();
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
        said,
        ended: vec![false; size],
        kept: Vec::new(),
        until: Instant::now() + patience,
    }
}

impl Ranks {
    pub(crate) fn pid(&self, rank: usize) -> u32 {
        self.children[rank].id()
    }

    pub(crate) fn put(&self, key: &str, value: &str) {
        self.shared.put(key, value);
    }

    /// The next line of `rank` that begins with `head`, within the ranks' time.
    pub(crate) fn hear(&mut self, rank: usize, head: &str) -> Said {
        loop {
            if let Some(at) = self.kept.iter().position(|s| s.rank == rank && s.text.starts_with(head)) {
                return self.kept.remove(at);
            }
            if self.ended[rank] {
                let status = self.exit(rank);
                self.fail(&format!("rank {rank} did not say `{head}`; it ended with {status}"));
            }
            let left = self.until.saturating_duration_since(Instant::now());
            match self.said.recv_timeout(left) {
                Ok(Heard::Line(said)) => self.kept.push(said),
                Ok(Heard::End(which)) => self.ended[which] = true,
                Err(_) => self.fail(&format!("rank {rank} did not say `{head}` in time")),
            }
        }
    }

    /// `kill -9`, reaped.
    pub(crate) fn kill(&mut self, rank: usize) -> Instant {
        self.children[rank].kill().unwrap();
        let at = Instant::now();
        self.children[rank].wait().unwrap();
        at
    }

    /// Waits for `rank`'s exit.
    pub(crate) fn exit(&mut self, rank: usize) -> ExitStatus {
        loop {
            if let Some(status) = self.children[rank].try_wait().unwrap() {
                return status;
            }
            if Instant::now() > self.until {
                self.fail(&format!("rank {rank} did not end in time"));
            }
            std::thread::park_timeout(Duration::from_millis(1));
        }
    }

    /// All of `ranks` must end well.
    pub(crate) fn finish(mut self, ranks: impl IntoIterator<Item = usize>) {
        for rank in ranks {
            let status = self.exit(rank);
            if !status.success() {
                self.fail(&format!("rank {rank} ended with {status}"));
            }
        }
    }

    /// Kills all ranks and fails the test with all they said.
    pub(crate) fn fail(&mut self, why: &str) -> ! {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
        let mut text = format!("{why}\n");
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
