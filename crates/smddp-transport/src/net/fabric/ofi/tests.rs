//! Two endpoints of this process over the machine's libfabric, where there is one.

use std::time::{Duration, Instant};

use super::super::endpoint::FabricEndpoint;
use super::super::provider_choice::{Settings, choose_provider};
use super::super::registration::RegisteredStaging;
use super::super::srd::connect;
use super::*;
use crate::net::fabric::wire::FabricWire;
use crate::net::frame::{Frame, Kind};
use crate::net::wire::{Sink, Target, Ticket, Wire};
use std::sync::atomic::AtomicU8;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

const CELL: usize = 1 << 20;

/// One test at a time: libfabric's sockets go over into processes that are spawned meanwhile, and stay open there.
fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Got {
    base: *mut u8,
    next: u64,
    sent: Vec<Ticket>,
    words: Vec<Vec<u8>>,
    wrong: Option<String>,
}

fn byte(index: u64, at: usize) -> u8 {
    (index as usize * 7 + at * 13 + (at >> 8)) as u8
}

impl Sink for Got {
    fn target(&mut self, _: usize, frame: &Frame) -> Target {
        if frame.bytes as usize > crate::net::wire::INLINE_PAYLOAD {
            return Target::At(self.base.wrapping_add(CELL * (2 + frame.index as usize % 4)));
        }
        self.words.push(vec![0; frame.bytes as usize]);
        Target::At(self.words.last_mut().unwrap().as_mut_ptr())
    }

    fn received(&mut self, _: usize, frame: &Frame) {
        if frame.index != self.next {
            self.wrong = Some(format!("frame {} where {} is due", frame.index, self.next));
        }
        self.next += 1;
        let bytes = frame.bytes as usize;
        let at = if bytes > crate::net::wire::INLINE_PAYLOAD {
            self.base.wrapping_add(CELL * (2 + frame.index as usize % 4)).cast_const()
        } else {
            self.words.remove(0).leak().as_ptr()
        };
        // SAFETY: where `place` said, which has that many bytes.
        let differs = (0..bytes).find(|&i| unsafe { at.wrapping_add(i).read() } != byte(frame.index, i));
        if let Some(i) = differs {
            self.wrong = Some(format!("byte {i} of frame {}", frame.index));
        }
    }

    fn sent(&mut self, ticket: Ticket) {
        self.sent.push(ticket);
    }
}

/// Two engines of this process; `None` where the provider is not there.
fn engines(provider: &str, writes: bool) -> Option<[Arc<Mutex<FabricEndpoint>>; 2]> {
    // EFA is simulated.
    let library = match provider {
        "efa" => Some(fake_libfabric::PATH.into()),
        _ => std::env::var_os("SMDDP_LIBFABRIC").map(Into::into),
    };
    let settings = Settings {
        library,
        provider: Some(provider.to_owned()),
        address: Some([127, 0, 0, 1].into()),
        ..Settings::default()
    };
    let (choice, lines) = choose_provider(&settings);
    let choice = match choice {
        Ok(choice) => choice,
        Err(reason) => {
            println!("{provider}: not run: {reason}");
            return None;
        }
    };
    println!("{lines:#?}");
    let engine = || {
        let (name, mut rails) = open(&choice).unwrap();
        // Large payloads may be read, though the device could write them.
        rails.iter_mut().for_each(|rail| rail.limits.writes &= writes);
        let memory: Arc<Vec<AtomicU8>> = Arc::new((0..6 * CELL).map(|_| AtomicU8::new(0)).collect());
        let staging = RegisteredStaging::new(memory[0].as_ptr(), memory.len(), memory.clone());
        Arc::new(Mutex::new(FabricEndpoint::new(name, rails, staging, 1, 16 << 20).unwrap()))
    };
    Some([engine(), engine()])
}

fn got(base: *mut u8) -> Got {
    Got { base, next: 0, sent: Vec::new(), words: Vec::new(), wrong: None }
}

/// Frames of many sizes from one endpoint to the other; sleeps on descriptors where nothing moves.
pub(super) fn frames_over(provider: &str, writes: bool) -> bool {
    let Some(engines) = engines(provider, writes) else { return false };
    let memories = engines.each_ref().map(|e| e.lock().unwrap().staging.base());
    println!("{:?}", engines[0].lock().unwrap().limits);
    let mut wires = connect(&engines).unwrap();
    println!("{}", wires[0].name());
    let mut sinks = memories.map(got);
    let sizes = [0, 1, 64, 1000, 8192, 8193, 70_000, 300_000, CELL];
    let begun = Instant::now();
    for index in 0..120u64 {
        let bytes = sizes[index as usize % sizes.len()];
        let at = if bytes > crate::net::wire::INLINE_PAYLOAD {
            memories[0].wrapping_add(CELL * (index as usize % 2))
        } else {
            vec![0; bytes].leak().as_mut_ptr()
        };
        for i in 0..bytes {
            // SAFETY: a cell that is free, or memory of its own.
            unsafe { at.wrapping_add(i).write(byte(index, i)) };
        }
        let frame = Frame { index, bytes: bytes as u64, ..Frame::new(Kind::Data, 1) };
        // SAFETY: short, or staged and unchanged until the ticket is back.
        unsafe { wires[0].send(1, &frame, at, index) };
        while !sinks[0].sent.contains(&index) || sinks[1].next <= index {
            let mut moved = false;
            for rank in 0..2 {
                moved |= wires[rank].poll(&mut sinks[rank]);
                assert_eq!(wires[rank].broken(), vec![], "{provider}");
            }
            assert_eq!(sinks[1].wrong, None, "{provider}, {bytes} bytes");
            assert!(begun.elapsed() < Duration::from_secs(30), "{provider} hangs at {index} ({bytes} bytes)");
            let mut fds = Vec::new();
            if !moved && wires[0].interest(&mut fds) && wires[1].interest(&mut fds) {
                let mut polls: Vec<_> =
                    fds.iter().map(|&(fd, events)| libc::pollfd { fd, events, revents: 0 }).collect();
                // SAFETY: descriptors of live wires.
                unsafe { libc::poll(polls.as_mut_ptr(), polls.len() as _, 100) };
            }
        }
    }
    println!("{provider}, writes {writes}: {:?}", begun.elapsed());
    true
}

#[test]
fn frames_go_over_the_providers_of_this_machine() {
    let _alone = alone();
    for provider in ["tcp;ofi_rxm", "net", "tcp"] {
        for writes in [true, false] {
            if !frames_over(provider, writes) {
                break;
            }
        }
    }
}

#[test]
fn a_peer_that_is_gone_is_noticed_by_whoever_waits_for_it() {
    let _alone = alone();
    for provider in ["tcp;ofi_rxm", "net", "tcp"] {
        let Some(engines) = engines(provider, true) else { continue };
        let mut wires = connect(&engines).unwrap();
        let mut sinks = [got(std::ptr::null_mut()), got(std::ptr::null_mut())];
        let frame = Frame::new(Kind::Credit, 1);
        let begun = Instant::now();
        // SAFETY: no payload.
        unsafe { wires[0].send(1, &frame, std::ptr::null(), 0) };
        while sinks[1].next == 0 {
            (0..2).for_each(|rank| {
                wires[rank].poll(&mut sinks[rank]);
            });
            assert!(begun.elapsed() < Duration::from_secs(20), "{provider}");
        }
        drop(wires.pop());
        let [first, second] = engines;
        drop(second);
        let begun = Instant::now();
        // Not every provider says that a peer is gone; for those there is the side channel.
        let sure = provider == "tcp;ofi_rxm";
        let patience = Duration::from_secs(if sure { 20 } else { 1 });
        while wires[0].broken().is_empty() && begun.elapsed() < patience {
            wires[0].watch(1, false, Instant::now());
            wires[0].poll(&mut sinks[0]);
        }
        println!("{provider}: {:?} after {:?}", wires[0].broken(), begun.elapsed());
        assert!(!sure || !wires[0].broken().is_empty());
        drop((wires, first));
    }
}

/// Takes everything into one place.
struct Anywhere {
    base: *mut u8,
    arrived: u64,
}

impl Sink for Anywhere {
    fn target(&mut self, _: usize, frame: &Frame) -> Target {
        Target::At(self.base.wrapping_add(CELL * (1 + frame.index as usize % 5)))
    }

    fn received(&mut self, _: usize, _: &Frame) {
        self.arrived += 1;
    }

    fn sent(&mut self, _: Ticket) {}
}

/// Frames to the other rank, large and small, with several under way at once, while it answers.
struct Talk {
    wire: FabricWire,
    sink: Anywhere,
    other: usize,
    index: u64,
}

impl Talk {
    /// Lets everything that is under way come to its end.
    fn quiet(&mut self) {
        let mut since = Instant::now();
        while since.elapsed() < Duration::from_millis(50) || !self.wire.drained() {
            if self.wire.poll(&mut self.sink) {
                since = Instant::now();
            }
        }
    }

    /// `exchange` gives the other's address for this one's.
    fn new(engine: &Arc<Mutex<FabricEndpoint>>, me: usize, exchange: impl FnOnce(String) -> String) -> Self {
        let (mut wire, address) = FabricWire::prepare(engine, me, 2, 1).unwrap();
        let mine = postcard::to_allocvec(&address).unwrap();
        let theirs = exchange(mine.iter().map(|b| format!("{b:02x}")).collect());
        let byte = |i: usize| u8::from_str_radix(&theirs[i..i + 2], 16).unwrap();
        let theirs: Vec<u8> = (0..theirs.len()).step_by(2).map(byte).collect();
        let mut addresses = [None, None];
        addresses[1 - me] = Some(postcard::from_bytes(&theirs).unwrap());
        wire.connect(&addresses).unwrap();
        let base = engine.lock().unwrap().staging.base();
        Self { wire, sink: Anywhere { base, arrived: 0 }, other: 1 - me, index: 0 }
    }

    fn turn(&mut self) {
        if self.index < self.sink.arrived + 4 {
            let bytes = [65_536, 8, 4000][self.index as usize % 3];
            let frame = Frame { index: self.index, bytes, ..Frame::new(Kind::Data, 1) };
            // SAFETY: staged, and never written to.
            unsafe { self.wire.send(self.other, &frame, self.sink.base, 0) };
            self.index += 1;
        }
        self.wire.poll(&mut self.sink);
    }
}

/// The other process of the test below; alone it does nothing.
#[test]
fn the_other_process() {
    let Ok(provider) = std::env::var("FABRIC_TEST_CHILD") else { return };
    let [engine, _] = engines(&provider, true).unwrap();
    let mut talk = Talk::new(&engine, 1, |mine| {
        println!("\naddress {mine}");
        let mut line = String::new();
        std::io::stdin().read_line(&mut line).unwrap();
        line.trim().to_owned()
    });
    loop {
        talk.turn();
    }
}

/// Kills a process to which this one talks; `None` where the provider is not there.
pub(super) fn kill(provider: &str, idle: bool, patience: Duration) -> Option<bool> {
    use std::io::{BufRead, BufReader, Write};
    let [engine, _] = engines(provider, true)?;
    let mut child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "net::fabric::ofi::tests::the_other_process", "--nocapture"])
        .env("FABRIC_TEST_CHILD", provider)
        .env("FAKE_EFA_DEVICES", "2")
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut talk = Talk::new(&engine, 0, |mine| {
        writeln!(child.stdin.as_mut().unwrap(), "{mine}").unwrap();
        let address =
            |line: std::io::Result<String>| Some(line.unwrap().strip_prefix("address ")?.to_owned());
        lines.by_ref().find_map(address).unwrap()
    });
    let begun = Instant::now();
    while talk.sink.arrived < 300 {
        talk.turn();
        assert_eq!(talk.wire.broken(), vec![], "{provider}");
        assert!(begun.elapsed() < Duration::from_secs(30), "{provider}: {} arrived", talk.sink.arrived);
    }
    if idle {
        talk.quiet();
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let begun = Instant::now();
    while talk.wire.broken().is_empty() && begun.elapsed() < patience {
        talk.wire.watch(1, false, Instant::now());
        if idle {
            talk.wire.poll(&mut talk.sink);
        } else {
            talk.turn();
        }
    }
    println!("{provider}, idle {idle}: {:?} after {:?}", talk.wire.broken(), begun.elapsed());
    Some(!talk.wire.broken().is_empty())
}

#[test]
fn a_process_that_is_killed_is_noticed_by_whoever_talks_to_it_or_waits_for_it() {
    let _alone = alone();
    for provider in ["tcp;ofi_rxm", "net", "tcp"] {
        assert_ne!(kill(provider, false, Duration::from_secs(30)), Some(false), "{provider}");
        // With nothing under way, not every provider says so; for those there is the side channel.
        let sure = provider == "tcp;ofi_rxm";
        let noticed = kill(provider, true, Duration::from_secs(if sure { 30 } else { 1 }));
        assert!(!sure || noticed != Some(false), "{provider}");
    }
}
