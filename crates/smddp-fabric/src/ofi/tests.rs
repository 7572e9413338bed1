//! Tests of two endpoints in this process over the installed libfabric; skipped without one.

use std::sync::atomic::AtomicU8;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use smddp_net::frame::{ALL_CLASSES, Frame, Kind};
use smddp_net::wire::{Broken, Payload, Sink, Target, Ticket, Wire};

use super::super::endpoint::FabricEndpoint;
use super::super::provider_choice::{Settings, choose_provider};
use super::super::registration::RegisteredStaging;
use super::simulated::connect;
use super::*;
use crate::wire::FabricWire;

const SLOT: usize = 1 << 20;

/// Serializes the tests: a process spawned at the same time inherits libfabric's sockets and keeps them open.
fn serialize() -> MutexGuard<'static, ()> {
    static LOCK: Mutex<()> = Mutex::new(());
    LOCK.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sink that checks the order and content of the received frames.
struct CheckingSink {
    base: *mut u8,
    next: u64,
    sent: Vec<Ticket>,
    short: Vec<Vec<u8>>,
    error: Option<String>,
}

fn byte(index: u64, at: usize) -> u8 {
    (index as usize * 7 + at * 13 + (at >> 8)) as u8
}

// SAFETY: a target is a slot of `SLOT` bytes in the staging memory, which outlives the wires, or an allocation of `frame.bytes`
// bytes. The sink reads it in `received`.
unsafe impl Sink for CheckingSink {
    fn target(&mut self, _: usize, frame: &Frame) -> Target {
        if frame.bytes as usize > smddp_net::wire::INLINE_PAYLOAD {
            return Target::At(self.base.wrapping_add(SLOT * (2 + frame.index as usize % 4)));
        }
        self.short.push(vec![0; frame.bytes as usize]);
        Target::At(self.short.last_mut().unwrap().as_mut_ptr())
    }

    fn received(&mut self, _: usize, frame: &Frame) {
        if frame.index != self.next {
            self.error = Some(format!("frame {} instead of {}", frame.index, self.next));
        }
        self.next += 1;
        let bytes = frame.bytes as usize;
        let at = if bytes > smddp_net::wire::INLINE_PAYLOAD {
            self.base.wrapping_add(SLOT * (2 + frame.index as usize % 4)).cast_const()
        } else {
            self.short.remove(0).leak().as_ptr()
        };
        // SAFETY: the target that `place` returned, which has that many bytes.
        let differs = (0..bytes).find(|&i| unsafe { at.wrapping_add(i).read() } != byte(frame.index, i));
        if let Some(i) = differs {
            self.error = Some(format!("byte {i} of frame {}", frame.index));
        }
    }

    fn sent(&mut self, ticket: Ticket) {
        self.sent.push(ticket);
    }
}

/// Creates two endpoints in this process; `None` if the provider is not available.
fn endpoints(provider: &str, writes: bool) -> Option<[Arc<Mutex<FabricEndpoint>>; 2]> {
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
    let endpoint = || {
        let (name, mut rails) = open(&choice).unwrap();
        // Without native writes, large payloads are read even if the device could write them.
        rails.iter_mut().for_each(|rail| rail.limits.writes &= writes);
        let memory: Arc<Vec<AtomicU8>> = Arc::new((0..6 * SLOT).map(|_| AtomicU8::new(0)).collect());
        let staging = RegisteredStaging::new(memory[0].as_ptr(), memory.len(), memory.clone());
        Arc::new(Mutex::new(FabricEndpoint::new(name, rails, staging, 1, 16 << 20).unwrap()))
    };
    Some([endpoint(), endpoint()])
}

fn checking_sink(base: *mut u8) -> CheckingSink {
    CheckingSink { base, next: 0, sent: Vec::new(), short: Vec::new(), error: None }
}

/// Sends frames of many sizes from one endpoint to the other; sleeps on descriptors without progress. Returns false if the
/// provider is not available.
pub(super) fn frames_over(provider: &str, writes: bool) -> bool {
    let Some(endpoints) = endpoints(provider, writes) else { return false };
    let memories = endpoints.each_ref().map(|e| e.lock().unwrap().staging.base());
    println!("{:?}", endpoints[0].lock().unwrap().limits);
    let mut wires = connect(&endpoints);
    println!("{}", wires[0].capabilities().name);
    let mut sinks = memories.map(checking_sink);
    let sizes = [0, 1, 64, 1000, 8192, 8193, 70_000, 300_000, SLOT];
    let begun = Instant::now();
    for index in 0..120u64 {
        let bytes = sizes[index as usize % sizes.len()];
        let at = if bytes > smddp_net::wire::INLINE_PAYLOAD {
            memories[0].wrapping_add(SLOT * (index as usize % 2))
        } else {
            vec![0; bytes].leak().as_mut_ptr()
        };
        for i in 0..bytes {
            // SAFETY: a free slot, or a new allocation.
            unsafe { at.wrapping_add(i).write(byte(index, i)) };
        }
        let frame = Frame { index, bytes: bytes as u64, ..Frame::new(Kind::Data, 1) };
        // SAFETY: short, or staged and unchanged until the ticket returns.
        unsafe { wires[0].send(1, &frame, Payload::Borrowed { at, ticket: index }) };
        while !sinks[0].sent.contains(&index) || sinks[1].next <= index {
            let mut moved = false;
            for rank in 0..2 {
                moved |= wires[rank].poll(&mut sinks[rank]);
                assert_eq!(Broken::among(wires[rank].peers()), vec![], "{provider}");
            }
            assert_eq!(sinks[1].error, None, "{provider}, {bytes} bytes");
            assert!(begun.elapsed() < Duration::from_secs(30), "{provider} hangs at {index} ({bytes} bytes)");
            let mut fds = Vec::new();
            if !moved && wires[0].wait_sources(&mut fds) && wires[1].wait_sources(&mut fds) {
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
fn frames_arrive_over_each_installed_provider() {
    let _serialized = serialize();
    for provider in ["tcp;ofi_rxm", "net", "tcp"] {
        for writes in [true, false] {
            if !frames_over(provider, writes) {
                break;
            }
        }
    }
}

#[test]
fn closed_peer_is_detected_by_a_waiting_rank() {
    let _serialized = serialize();
    for provider in ["tcp;ofi_rxm", "net", "tcp"] {
        let Some(endpoints) = endpoints(provider, true) else { continue };
        let mut wires = connect(&endpoints);
        let mut sinks = [checking_sink(std::ptr::null_mut()), checking_sink(std::ptr::null_mut())];
        let frame = Frame::new(Kind::Credit, 1);
        let begun = Instant::now();
        // SAFETY: no payload.
        unsafe { wires[0].send(1, &frame, Payload::None) };
        while sinks[1].next == 0 {
            (0..2).for_each(|rank| {
                wires[rank].poll(&mut sinks[rank]);
            });
            assert!(begun.elapsed() < Duration::from_secs(20), "{provider}");
        }
        drop(wires.pop());
        let [first, second] = endpoints;
        drop(second);
        let begun = Instant::now();
        // Not every provider reports a closed peer; the sideband covers the others.
        let is_reported = provider == "tcp;ofi_rxm";
        let limit = Duration::from_secs(if is_reported { 20 } else { 1 });
        while Broken::among(wires[0].peers()).is_empty() && begun.elapsed() < limit {
            wires[0].check(Instant::now(), &[1]);
            wires[0].poll(&mut sinks[0]);
        }
        println!("{provider}: {:?} after {:?}", Broken::among(wires[0].peers()), begun.elapsed());
        assert!(!is_reported || !Broken::among(wires[0].peers()).is_empty());
        drop((wires, first));
    }
}

/// Sink that accepts all frames into a few slots.
struct AcceptingSink {
    base: *mut u8,
    arrived: u64,
}

// SAFETY: a target is a slot of `SLOT` bytes in the staging memory. The endpoint keeps that memory, and only wires access the slot.
unsafe impl Sink for AcceptingSink {
    fn target(&mut self, _: usize, frame: &Frame) -> Target {
        Target::At(self.base.wrapping_add(SLOT * (1 + frame.index as usize % 5)))
    }

    fn received(&mut self, _: usize, _: &Frame) {
        self.arrived += 1;
    }

    fn sent(&mut self, _: Ticket) {}
}

/// Sends large and small frames to the other rank, several at the same time, while the other rank does the same.
struct Exchange {
    wire: FabricWire,
    sink: AcceptingSink,
    other: usize,
    index: u64,
}

impl Exchange {
    /// Polls until everything in flight is complete.
    fn drain(&mut self) {
        let mut since = Instant::now();
        while since.elapsed() < Duration::from_millis(50) || !self.wire.is_flushed(ALL_CLASSES) {
            if self.wire.poll(&mut self.sink) {
                since = Instant::now();
            }
        }
    }

    /// `exchange` returns the other rank's address for this rank's.
    fn new(
        endpoint: &Arc<Mutex<FabricEndpoint>>,
        me: usize,
        exchange: impl FnOnce(String) -> String,
    ) -> Self {
        let (mut wire, address) = FabricWire::prepare(endpoint, me, 2, 1).unwrap();
        let mine = postcard::to_allocvec(&address).unwrap();
        let theirs = exchange(mine.iter().map(|b| format!("{b:02x}")).collect());
        let byte = |i: usize| u8::from_str_radix(&theirs[i..i + 2], 16).unwrap();
        let theirs: Vec<u8> = (0..theirs.len()).step_by(2).map(byte).collect();
        let mut addresses = [None, None];
        addresses[1 - me] = Some(postcard::from_bytes(&theirs).unwrap());
        wire.connect(&addresses).unwrap();
        let base = endpoint.lock().unwrap().staging.base();
        Self { wire, sink: AcceptingSink { base, arrived: 0 }, other: 1 - me, index: 0 }
    }

    fn step(&mut self) {
        if self.index < self.sink.arrived + 4 {
            let bytes = [65_536, 8, 4000][self.index as usize % 3];
            let frame = Frame { index: self.index, bytes, ..Frame::new(Kind::Data, 1) };
            // SAFETY: staged, and never written to.
            unsafe {
                self.wire.send(self.other, &frame, Payload::Borrowed { at: self.sink.base, ticket: 0 })
            };
            self.index += 1;
        }
        self.wire.poll(&mut self.sink);
    }
}

/// Child process of the test below; does nothing without the environment variable.
#[test]
fn child_process() {
    let Ok(provider) = std::env::var("FABRIC_TEST_CHILD") else { return };
    let [endpoint, _] = endpoints(&provider, true).unwrap();
    let mut exchange = Exchange::new(&endpoint, 1, |mine| {
        println!("\naddress {mine}");
        let mut line = String::new();
        std::io::stdin().read_line(&mut line).unwrap();
        line.trim().to_owned()
    });
    loop {
        exchange.step();
    }
}

/// Kills a process in an exchange with this one and returns whether that is detected; `None` if the provider is not available.
pub(super) fn kill(provider: &str, idle: bool, limit: Duration) -> Option<bool> {
    use std::io::{BufRead, BufReader, Write};
    let [endpoint, _] = endpoints(provider, true)?;
    let mut child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "ofi::tests::child_process", "--nocapture"])
        .env("FABRIC_TEST_CHILD", provider)
        .env("FAKE_EFA_DEVICES", "2")
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut exchange = Exchange::new(&endpoint, 0, |mine| {
        writeln!(child.stdin.as_mut().unwrap(), "{mine}").unwrap();
        let address =
            |line: std::io::Result<String>| Some(line.unwrap().strip_prefix("address ")?.to_owned());
        lines.by_ref().find_map(address).unwrap()
    });
    let begun = Instant::now();
    while exchange.sink.arrived < 300 {
        exchange.step();
        assert_eq!(Broken::among(exchange.wire.peers()), vec![], "{provider}");
        assert!(begun.elapsed() < Duration::from_secs(30), "{provider}: {} arrived", exchange.sink.arrived);
    }
    if idle {
        exchange.drain();
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let begun = Instant::now();
    while Broken::among(exchange.wire.peers()).is_empty() && begun.elapsed() < limit {
        exchange.wire.check(Instant::now(), &[1]);
        if idle {
            exchange.wire.poll(&mut exchange.sink);
        } else {
            exchange.step();
        }
    }
    println!(
        "{provider}, idle {idle}: {:?} after {:?}",
        Broken::among(exchange.wire.peers()),
        begun.elapsed()
    );
    Some(!Broken::among(exchange.wire.peers()).is_empty())
}

#[test]
fn killed_process_is_detected_by_a_sending_or_waiting_peer() {
    let _serialized = serialize();
    for provider in ["tcp;ofi_rxm", "net", "tcp"] {
        assert_ne!(kill(provider, false, Duration::from_secs(30)), Some(false), "{provider}");
        // Not every provider reports an idle peer's death; the sideband covers the others.
        let is_reported = provider == "tcp;ofi_rxm";
        let detected = kill(provider, true, Duration::from_secs(if is_reported { 30 } else { 1 }));
        assert!(!is_reported || detected != Some(false), "{provider}");
    }
}
