//! What an endpoint does: it moves bytes between the processes of one machine, by the rules of EFA's devices. Messages
//! are datagrams, reads and writes the kernel's copies between processes; things happen when the queue is read, in no
//! order.

use std::collections::VecDeque;
use std::ffi::{c_int, c_void};
use std::io::ErrorKind;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

use crate::table::{Name, Refused, Table, copy};
use crate::wrong;

pub const EAGAIN: c_int = 11;
pub const EINVAL: c_int = 22;
const EIO: c_int = 5;
const ETRUNC: c_int = 265;

pub const RECV: u64 = 1 << 10;
const SEND: u64 = 1 << 11;
const REMOTE_WRITE: u64 = 1 << 13;
const REMOTE_CQ_DATA: u64 = 1 << 17;

/// Bytes of the largest message.
pub const MESSAGE: usize = 8912;
/// Of the largest read or write.
pub const ONE_SIDED: usize = 1 << 30;
/// Operations under way, and receive buffers.
pub const OPERATIONS: usize = 4096;
pub const RECEIVES: usize = 8192;
/// So often may be tried again what found a queue full, before it is read.
const PATIENCE: usize = 64;
/// Whoever asks in vain may go to sleep for longer than a fabric takes.
const TURNS: usize = 16;

/// A small generator (splitmix64).
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }
}

/// Bytes of an operation, and the caller's word for it.
#[derive(Clone, Copy)]
pub struct Local {
    pub at: *mut u8,
    pub bytes: usize,
    pub context: *mut c_void,
}

/// Of a peer's memory.
#[derive(Clone, Copy)]
pub struct Remote {
    pub at: u64,
    pub key: u64,
}

/// A line of the completion queue. `error`: 0, or why it failed.
pub struct Entry {
    pub context: *mut c_void,
    pub flags: u64,
    pub bytes: usize,
    pub data: u64,
    pub error: c_int,
}

enum Cargo {
    Message,
    /// What is left of a read or a write, from and to, and the number that its target is told.
    Pieces {
        remote: Remote,
        left: Vec<(usize, usize)>,
        number: Option<u32>,
    },
    /// Only that number is left.
    Number(u32),
}

struct Flight {
    to: Name,
    local: Local,
    cargo: Cargo,
    /// Turns that it stays where it is.
    hold: usize,
}

pub struct Port {
    me: Name,
    socket: UnixDatagram,
    random: Random,
    flights: Vec<Flight>,
    arrived: Vec<Vec<u8>>,
    receives: VecDeque<Local>,
    /// What is over and not yet in the completion queue, and what is.
    over: Vec<Entry>,
    queue: VecDeque<Entry>,
    pub completions: usize,
    /// A write's number takes a receive buffer of its target.
    takes: bool,
    /// Tries since a queue was full and nobody read.
    tries: usize,
}

fn place(device: Name) -> std::io::Result<SocketAddr> {
    SocketAddr::from_abstract_name(format!("fake-efa-{:016x}", device.token))
}

impl Port {
    pub fn open(me: Name, takes: bool) -> std::io::Result<Self> {
        let socket = UnixDatagram::bind_addr(&place(me)?)?;
        socket.set_nonblocking(true)?;
        Ok(Self {
            me,
            socket,
            random: Random(me.token),
            flights: Vec::new(),
            arrived: Vec::new(),
            receives: VecDeque::new(),
            over: Vec::new(),
            queue: VecDeque::new(),
            completions: usize::MAX,
            takes,
            tries: 0,
        })
    }

    pub fn receive(&mut self, local: Local) -> c_int {
        if self.receives.len() >= RECEIVES {
            return -EAGAIN;
        }
        self.receives.push_back(local);
        0
    }

    pub fn send(&mut self, to: Name, local: Local) -> c_int {
        if local.bytes > MESSAGE {
            return self.refuse(&format!("a message of {} bytes", local.bytes));
        }
        self.start(to, local, Cargo::Message)
    }

    pub fn one_sided(&mut self, to: Name, local: Local, remote: Remote, number: Option<u32>) -> c_int {
        if local.bytes > ONE_SIDED {
            return self.refuse(&format!("{} bytes at once", local.bytes));
        }
        let left = self.pieces(local.bytes);
        self.start(to, local, Cargo::Pieces { remote, left, number })
    }

    fn refuse(&self, why: &str) -> c_int {
        wrong(why);
        -EINVAL
    }

    /// Cuts so many bytes at random.
    fn pieces(&mut self, bytes: usize) -> Vec<(usize, usize)> {
        let mut pieces = Vec::new();
        let mut start = 0;
        while start < bytes {
            let rest = bytes - start;
            let most = if self.random.below(3) == 0 { rest } else { 1 + self.random.below(rest) };
            pieces.push((start, start + most));
            start += most;
        }
        pieces
    }

    /// Full now and then.
    fn start(&mut self, to: Name, local: Local, cargo: Cargo) -> c_int {
        let full = self.flights.len() + self.over.len() >= OPERATIONS;
        if full || self.tries > 0 || self.random.below(12) == 0 {
            self.tries += 1;
            if self.tries > PATIENCE {
                wrong("tries at a full queue, whose completions are not read");
            }
            return -EAGAIN;
        }
        // Now and then something stays behind.
        let hold = if self.random.below(8) == 0 { self.random.below(4 * TURNS) } else { 0 };
        self.flights.push(Flight { to, local, cargo, hold });
        0
    }

    /// What the queue tells next; moves things on before.
    pub fn read(&mut self, most: usize) -> Vec<Entry> {
        self.tries = 0;
        for _ in 0..TURNS {
            self.turn();
            for _ in 0..self.random.below(self.over.len() + 1) {
                let at = self.random.below(self.over.len());
                let entry = self.over.swap_remove(at);
                self.queue.push_back(entry);
            }
            if !self.queue.is_empty()
                || self.flights.is_empty() && self.arrived.is_empty() && self.over.is_empty()
            {
                break;
            }
        }
        // An error stands alone: it is read in another way.
        let plain = self.queue.iter().take(most).take_while(|entry| entry.error == 0).count();
        self.queue.drain(..plain).collect()
    }

    /// The error that stands at the queue's head.
    pub fn failed(&mut self) -> Option<Entry> {
        if self.has_failed() { self.queue.pop_front() } else { None }
    }

    pub fn has_failed(&self) -> bool {
        self.queue.front().is_some_and(|entry| entry.error != 0)
    }

    fn end(&mut self, entry: Entry) {
        if self.over.len() + self.queue.len() >= self.completions {
            wrong("more completions than the queue holds");
        }
        self.over.push(entry);
    }

    fn turn(&mut self) {
        for _ in 0..16 {
            let mut room = vec![0; MESSAGE + 64];
            let Ok(bytes) = self.socket.recv(&mut room) else { break };
            room.truncate(bytes);
            self.arrived.push(room);
        }
        for _ in 0..self.random.below(self.arrived.len() + 1) {
            let at = self.random.below(self.arrived.len());
            let message = self.arrived.swap_remove(at);
            self.deliver(message);
        }
        for _ in 0..self.flights.len().min(1 + self.random.below(8)) {
            let at = self.random.below(self.flights.len());
            if self.flights[at].hold > 0 {
                self.flights[at].hold -= 1;
                continue;
            }
            let flight = self.flights.swap_remove(at);
            self.land(flight);
        }
    }

    fn land(&mut self, mut flight: Flight) {
        let local = flight.local;
        let error = match &mut flight.cargo {
            Cargo::Message => {
                let bytes = unsafe { std::slice::from_raw_parts(local.at, local.bytes) };
                self.datagram(flight.to, &[&[0], bytes].concat())
            }
            Cargo::Number(number) => {
                let mut message = vec![1];
                message.extend(number.to_le_bytes());
                message.extend((local.bytes as u64).to_le_bytes());
                self.datagram(flight.to, &message)
            }
            Cargo::Pieces { remote, left, number } => {
                let done = match left.is_empty() {
                    true => Ok(()),
                    false => {
                        let (start, end) = left.swap_remove(self.random.below(left.len()));
                        self.piece(flight.to, local, *remote, (start, end), number.is_some())
                    }
                };
                match (done, left.is_empty(), *number) {
                    (Err(error), ..) => Some(error),
                    (Ok(()), false, _) => return self.flights.push(flight),
                    (Ok(()), true, None) => Some(0),
                    (Ok(()), true, Some(number)) => {
                        return self.flights.push(Flight { cargo: Cargo::Number(number), ..flight });
                    }
                }
            }
        };
        match error {
            // Its queue is full: later.
            None => self.flights.push(flight),
            Some(error) => {
                self.end(Entry { context: local.context, flags: SEND, bytes: 0, data: 0, error });
            }
        }
    }

    /// `None`: not now.
    fn datagram(&self, to: Name, message: &[u8]) -> Option<c_int> {
        match place(to).and_then(|place| self.socket.send_to_addr(message, &place)) {
            Ok(_) => Some(0),
            Err(why) if why.kind() == ErrorKind::WouldBlock => None,
            Err(_) => Some(EIO),
        }
    }

    fn piece(
        &self,
        to: Name,
        local: Local,
        remote: Remote,
        (start, end): (usize, usize),
        write: bool,
    ) -> Result<(), c_int> {
        let (at, bytes) = (remote.at + start as u64, end - start);
        match Table::ask(to, self.me.token, remote.key, at, bytes as u64) {
            Ok(()) if copy(to.process, local.at.wrapping_add(start), at, bytes, write) => Ok(()),
            Ok(()) | Err(Refused::Gone) => Err(EIO),
            Err(Refused::Wrong(why)) => {
                wrong(&why);
                Err(EINVAL)
            }
        }
    }

    fn deliver(&mut self, message: Vec<u8>) {
        match message[0] {
            0 => {
                let Some(room) = self.receives.pop_front() else {
                    wrong("no receive buffer is posted for a message");
                    return self.arrived.push(message);
                };
                let bytes = (message.len() - 1).min(room.bytes);
                let error = if bytes < message.len() - 1 { ETRUNC } else { 0 };
                unsafe { room.at.copy_from_nonoverlapping(message[1..].as_ptr(), bytes) };
                self.end(Entry { context: room.context, flags: RECV, bytes, data: 0, error });
            }
            _ => {
                let number = u32::from_le_bytes(std::array::from_fn(|i| message[1 + i]));
                let bytes = u64::from_le_bytes(std::array::from_fn(|i| message[5 + i])) as usize;
                let mut context = std::ptr::null_mut();
                if self.takes {
                    let Some(room) = self.receives.pop_front() else {
                        wrong("no receive buffer is posted for a write's number");
                        return self.arrived.push(message);
                    };
                    context = room.context;
                }
                let flags = REMOTE_WRITE | REMOTE_CQ_DATA;
                self.end(Entry { context, flags, bytes, data: number.into(), error: 0 });
            }
        }
    }
}
