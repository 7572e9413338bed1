//! An endpoint: its receive buffers, its completion queue and its limits.

use std::collections::VecDeque;
use std::ffi::{c_int, c_void};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

use crate::EAGAIN;
use crate::knob::{self, Rule};
use crate::knobs::Knobs;
use crate::table::Name;

const ETRUNC: c_int = 265;
const EOVERRUN: c_int = 268;

const RECV: u64 = 1 << 10;
pub const SEND: u64 = 1 << 11;
const REMOTE_WRITE: u64 = 1 << 13;
const REMOTE_CQ_DATA: u64 = 1 << 17;

/// Default limits: bytes of the largest message and of the largest read or write, pending operations and receive buffers.
pub const MESSAGE: usize = 8912;
pub const ONE_SIDED: usize = 1 << 30;
pub const OPERATIONS: usize = 4096;
pub const RECEIVES: usize = 8192;
/// Limit on bytes without the rule.
const UNLIMITED: usize = usize::MAX >> 1;

/// Returns the bytes of the largest message, and of the largest read or write.
pub fn byte_limits(knobs: &Knobs) -> (usize, usize) {
    let limit = |rule, knob, default| match knobs.enforces(rule) {
        true => knobs.limit(knob, default),
        false => UNLIMITED,
    };
    (limit(Rule::Message, knob::MESSAGE, MESSAGE), limit(Rule::OneSided, knob::ONE_SIDED, ONE_SIDED))
}

/// Local memory of an operation, and the caller's context.
#[derive(Clone, Copy)]
pub struct Local {
    pub at: *mut u8,
    pub bytes: usize,
    pub context: *mut c_void,
}

/// An entry of the completion queue. `error` is 0 or the error number.
pub struct Entry {
    pub context: *mut c_void,
    pub flags: u64,
    pub bytes: usize,
    pub data: u64,
    pub error: c_int,
}

/// Content of a message that arrives at an endpoint.
pub enum Arrival<'a> {
    Message(&'a [u8]),
    ImmediateData { number: u32, bytes: usize },
}

impl Arrival<'_> {
    /// Returns the datagram that carries this to another process.
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Self::Message(bytes) => [&[0], *bytes].concat(),
            Self::ImmediateData { number, bytes } => {
                [&[1], &number.to_le_bytes()[..], &(*bytes as u64).to_le_bytes()].concat()
            }
        }
    }

    pub fn decode(datagram: &[u8]) -> Arrival<'_> {
        match datagram[0] {
            0 => Arrival::Message(&datagram[1..]),
            _ => Arrival::ImmediateData {
                number: u32::from_le_bytes(std::array::from_fn(|i| datagram[1 + i])),
                bytes: u64::from_le_bytes(std::array::from_fn(|i| datagram[5 + i])) as usize,
            },
        }
    }
}

/// State of an open endpoint.
pub struct Port {
    knobs: &'static Knobs,
    pub number: u64,
    pub name: Name,
    pub socket: UnixDatagram,
    receives: VecDeque<Local>,
    /// Completed operations that are not in the completion queue yet.
    pub completed: Vec<Entry>,
    pub queue: VecDeque<Entry>,
    /// Operations whose completions were not read.
    pub busy: usize,
    /// Attempts since the queue was full, without a read of its completions.
    pub tries: usize,
    pub operations: usize,
    buffers: usize,
    pub completions: usize,
    /// The immediate data of a write consumes a receive buffer of its target.
    data_consumes_buffer: bool,
    without: u64,
}

/// Returns the address of a device's socket.
///
/// # Errors
/// The error of the standard library for an invalid abstract name.
pub fn socket_address(device: Name) -> std::io::Result<SocketAddr> {
    SocketAddr::from_abstract_name(format!("fake-efa-{:016x}", device.token))
}

impl Port {
    /// # Errors
    /// The error of the operating system if the socket cannot be bound, for example because the name is in use.
    pub fn open(knobs: &'static Knobs, number: u64, name: Name) -> std::io::Result<Self> {
        let socket = UnixDatagram::bind_addr(&socket_address(name)?)?;
        socket.set_nonblocking(true)?;
        Ok(Self {
            knobs,
            number,
            name,
            socket,
            receives: VecDeque::new(),
            completed: Vec::new(),
            queue: VecDeque::new(),
            busy: 0,
            tries: 0,
            operations: knobs.limit(knob::OPERATIONS, OPERATIONS),
            buffers: knobs.limit(knob::RECEIVES, RECEIVES),
            completions: knobs.limit(knob::COMPLETIONS, usize::MAX),
            data_consumes_buffer: knobs.get(knob::DATA_CONSUMES_BUFFER) != 0,
            without: knobs.get(knob::WITHOUT),
        })
    }

    pub fn enforces(&self, rule: Rule) -> bool {
        self.without & rule.bit() == 0
    }

    pub fn violation(&self, rule: Rule, description: &str) {
        self.knobs.violation(rule, description);
    }

    /// Posts a receive buffer.
    pub fn receive(&mut self, local: Local) -> c_int {
        if self.receives.len() >= self.buffers {
            return -EAGAIN;
        }
        self.receives.push_back(local);
        0
    }

    /// Delivers a message into a receive buffer. Returns false if none is posted.
    pub fn deliver(&mut self, arrival: &Arrival<'_>) -> bool {
        match *arrival {
            Arrival::Message(message) => {
                let Some(room) = self.receive_buffer("a message") else { return false };
                let bytes = message.len().min(room.bytes);
                let error = if bytes < message.len() { ETRUNC } else { 0 };
                unsafe { room.at.copy_from_nonoverlapping(message.as_ptr(), bytes) };
                self.end(Entry { context: room.context, flags: RECV, bytes, data: 0, error });
            }
            Arrival::ImmediateData { number, bytes } => {
                let mut context = std::ptr::null_mut();
                if self.data_consumes_buffer {
                    let Some(room) = self.receive_buffer("the immediate data of a write") else {
                        return false;
                    };
                    context = room.context;
                }
                let flags = REMOTE_WRITE | REMOTE_CQ_DATA;
                self.end(Entry { context, flags, bytes, data: number.into(), error: 0 });
            }
        }
        true
    }

    fn receive_buffer(&mut self, purpose: &str) -> Option<Local> {
        let room = self.receives.pop_front();
        if room.is_none() && self.enforces(Rule::Receive) {
            self.violation(Rule::Receive, &format!("no receive buffer is posted for {purpose}"));
        }
        room
    }

    /// Completes an operation.
    pub fn end(&mut self, entry: Entry) {
        if self.completed.len() + self.queue.len() >= self.completions && self.enforces(Rule::Completions) {
            self.violation(Rule::Completions, "the completion queue overruns");
            let context = std::ptr::null_mut();
            self.completed.push(Entry { context, flags: 0, bytes: 0, data: 0, error: EOVERRUN });
        }
        self.completed.push(entry);
    }

    /// Removes and returns up to `most` entries of the queue. An error entry is read alone, with `fi_cq_readerr`.
    pub fn take(&mut self, most: usize) -> Vec<Entry> {
        let plain = self.queue.iter().take(most).take_while(|entry| entry.error == 0).count();
        let entries: Vec<Entry> = self.queue.drain(..plain).collect();
        self.busy -= entries.iter().filter(|entry| entry.flags == SEND).count();
        entries
    }

    /// Removes and returns the first entry of the queue if it is an error.
    pub fn take_error(&mut self) -> Option<Entry> {
        let entry = if self.has_failed() { self.queue.pop_front() } else { None }?;
        self.busy -= usize::from(entry.flags == SEND);
        Some(entry)
    }

    pub fn has_failed(&self) -> bool {
        self.queue.front().is_some_and(|entry| entry.error != 0)
    }
}
