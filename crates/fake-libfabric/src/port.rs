//! The data path of an endpoint: moves bytes between the processes of one machine by the rules of EFA devices. Messages
//! are Unix datagrams; reads and writes are `process_vm_readv` and `process_vm_writev`. Operations progress in random
//! order while the completion queue is read.

use std::collections::VecDeque;
use std::ffi::{c_int, c_void};
use std::io::ErrorKind;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

use crate::table::{AccessError, Name, Table, copy};
use crate::violation;

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
/// Bytes of the largest read or write.
pub const ONE_SIDED: usize = 1 << 30;
/// Limits on pending operations and on receive buffers.
pub const OPERATIONS: usize = 4096;
pub const RECEIVES: usize = 8192;
/// Attempts at a full queue that are allowed before its completions are read.
const MAX_RETRIES: usize = 64;
/// Progress rounds of one read. Several are needed because a caller that finds no completion may sleep for longer than a
/// real device needs.
const ROUNDS: usize = 16;

/// Pseudorandom generator (splitmix64).
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

/// Local memory of an operation, and the caller's context.
#[derive(Clone, Copy)]
pub struct Local {
    pub at: *mut u8,
    pub bytes: usize,
    pub context: *mut c_void,
}

/// An address in the memory of a peer, with its key.
#[derive(Clone, Copy)]
pub struct Remote {
    pub at: u64,
    pub key: u64,
}

/// An entry of the completion queue. `error` is 0 or the error number.
pub struct Entry {
    pub context: *mut c_void,
    pub flags: u64,
    pub bytes: usize,
    pub data: u64,
    pub error: c_int,
}

enum Payload {
    Message,
    /// The remaining ranges (start, end) of a read or a write, and the immediate data of a write.
    Ranges {
        remote: Remote,
        left: Vec<(usize, usize)>,
        number: Option<u32>,
    },
    /// A write of which only the immediate data remains.
    ImmediateData(u32),
}

struct Pending {
    to: Name,
    local: Local,
    payload: Payload,
    /// Remaining rounds in which the operation does not progress.
    delay: usize,
}

pub struct Port {
    me: Name,
    socket: UnixDatagram,
    random: Random,
    pending: Vec<Pending>,
    arrived: Vec<Vec<u8>>,
    receives: VecDeque<Local>,
    /// Completed operations that are not in the completion queue yet.
    completed: Vec<Entry>,
    queue: VecDeque<Entry>,
    pub completions: usize,
    /// The immediate data of a write consumes a receive buffer of its target.
    data_consumes_buffer: bool,
    /// Attempts since the queue was full, without a read of its completions.
    tries: usize,
}

fn socket_address(device: Name) -> std::io::Result<SocketAddr> {
    SocketAddr::from_abstract_name(format!("fake-efa-{:016x}", device.token))
}

impl Port {
    pub fn open(me: Name, data_consumes_buffer: bool) -> std::io::Result<Self> {
        let socket = UnixDatagram::bind_addr(&socket_address(me)?)?;
        socket.set_nonblocking(true)?;
        Ok(Self {
            me,
            socket,
            random: Random(me.token),
            pending: Vec::new(),
            arrived: Vec::new(),
            receives: VecDeque::new(),
            completed: Vec::new(),
            queue: VecDeque::new(),
            completions: usize::MAX,
            data_consumes_buffer,
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
            return self.refuse(&format!("a message of {} bytes, more than the limit", local.bytes));
        }
        self.start(to, local, Payload::Message)
    }

    pub fn one_sided(&mut self, to: Name, local: Local, remote: Remote, number: Option<u32>) -> c_int {
        if local.bytes > ONE_SIDED {
            return self.refuse(&format!("a read or write of {} bytes, more than the limit", local.bytes));
        }
        let left = self.pieces(local.bytes);
        self.start(to, local, Payload::Ranges { remote, left, number })
    }

    fn refuse(&self, why: &str) -> c_int {
        violation(why);
        -EINVAL
    }

    /// Splits `bytes` bytes into ranges of random length.
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

    /// Queues an operation. Reports a full queue at random.
    fn start(&mut self, to: Name, local: Local, payload: Payload) -> c_int {
        let full = self.pending.len() + self.completed.len() >= OPERATIONS;
        if full || self.tries > 0 || self.random.below(12) == 0 {
            self.tries += 1;
            if self.tries > MAX_RETRIES {
                violation("too many attempts at a full queue without reading its completions");
            }
            return -EAGAIN;
        }
        // Delays an operation at random.
        let delay = if self.random.below(8) == 0 { self.random.below(4 * ROUNDS) } else { 0 };
        self.pending.push(Pending { to, local, payload, delay });
        0
    }

    /// Makes progress, then returns up to `most` entries of the completion queue.
    pub fn read(&mut self, most: usize) -> Vec<Entry> {
        self.tries = 0;
        for _ in 0..ROUNDS {
            self.progress();
            for _ in 0..self.random.below(self.completed.len() + 1) {
                let at = self.random.below(self.completed.len());
                let entry = self.completed.swap_remove(at);
                self.queue.push_back(entry);
            }
            if !self.queue.is_empty()
                || self.pending.is_empty() && self.arrived.is_empty() && self.completed.is_empty()
            {
                break;
            }
        }
        // An error entry is read alone, with `fi_cq_readerr`.
        let plain = self.queue.iter().take(most).take_while(|entry| entry.error == 0).count();
        self.queue.drain(..plain).collect()
    }

    /// Removes and returns the first entry of the queue if it is an error.
    pub fn failed(&mut self) -> Option<Entry> {
        if self.has_failed() { self.queue.pop_front() } else { None }
    }

    pub fn has_failed(&self) -> bool {
        self.queue.front().is_some_and(|entry| entry.error != 0)
    }

    fn end(&mut self, entry: Entry) {
        if self.completed.len() + self.queue.len() >= self.completions {
            violation("the completion queue overflows");
        }
        self.completed.push(entry);
    }

    fn progress(&mut self) {
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
        for _ in 0..self.pending.len().min(1 + self.random.below(8)) {
            let at = self.random.below(self.pending.len());
            if self.pending[at].delay > 0 {
                self.pending[at].delay -= 1;
                continue;
            }
            let operation = self.pending.swap_remove(at);
            self.execute(operation);
        }
    }

    fn execute(&mut self, mut operation: Pending) {
        let local = operation.local;
        let error = match &mut operation.payload {
            Payload::Message => {
                let bytes = unsafe { std::slice::from_raw_parts(local.at, local.bytes) };
                self.datagram(operation.to, &[&[0], bytes].concat())
            }
            Payload::ImmediateData(number) => {
                let mut message = vec![1];
                message.extend(number.to_le_bytes());
                message.extend((local.bytes as u64).to_le_bytes());
                self.datagram(operation.to, &message)
            }
            Payload::Ranges { remote, left, number } => {
                let done = match left.is_empty() {
                    true => Ok(()),
                    false => {
                        let (start, end) = left.swap_remove(self.random.below(left.len()));
                        self.piece(operation.to, local, *remote, (start, end), number.is_some())
                    }
                };
                match (done, left.is_empty(), *number) {
                    (Err(error), ..) => Some(error),
                    (Ok(()), false, _) => return self.pending.push(operation),
                    (Ok(()), true, None) => Some(0),
                    (Ok(()), true, Some(number)) => {
                        return self
                            .pending
                            .push(Pending { payload: Payload::ImmediateData(number), ..operation });
                    }
                }
            }
        };
        match error {
            // The receiver's queue is full: try again in a later round.
            None => self.pending.push(operation),
            Some(error) => {
                self.end(Entry { context: local.context, flags: SEND, bytes: 0, data: 0, error });
            }
        }
    }

    /// Sends a datagram. Returns `None` if the receiver's queue is full, otherwise 0 or an error number.
    fn datagram(&self, to: Name, message: &[u8]) -> Option<c_int> {
        match socket_address(to).and_then(|socket_address| self.socket.send_to_addr(message, &socket_address))
        {
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
        match Table::check_access(to, self.me.token, remote.key, at, bytes as u64) {
            Ok(()) if copy(to.process, local.at.wrapping_add(start), at, bytes, write) => Ok(()),
            Ok(()) | Err(AccessError::PeerClosed) => Err(EIO),
            Err(AccessError::Violation(why)) => {
                violation(&why);
                Err(EINVAL)
            }
        }
    }

    fn deliver(&mut self, message: Vec<u8>) {
        match message[0] {
            0 => {
                let Some(room) = self.receives.pop_front() else {
                    violation("no receive buffer is posted for a message");
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
                if self.data_consumes_buffer {
                    let Some(room) = self.receives.pop_front() else {
                        violation("no receive buffer is posted for the immediate data of a write");
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
