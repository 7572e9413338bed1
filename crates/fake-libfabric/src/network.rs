//! The data path: moves bytes between endpoints by the rules of EFA devices. Operations of one process are in one list and
//! progress in random order while any of its completion queues is read. Between processes, messages are Unix datagrams, and
//! reads and writes are `process_vm_readv` and `process_vm_writev`.

use std::ffi::c_int;
use std::io::ErrorKind;

use crate::knob::Rule;
use crate::knobs::Knobs;
use crate::port::{Arrival, Entry, Local, Port, SEND, socket_address};
use crate::table::{AccessError, Name, Remote, Table, copy};
use crate::{EAGAIN, EINVAL, EIO};

/// Attempts at a full queue that are allowed before its completions are read. Many peers share a queue.
const MAX_RETRIES: usize = 1000;
/// Progress rounds of one read. Several are needed because a caller that finds no completion may sleep for longer than a
/// real device needs.
const ROUNDS: usize = 16;
/// Maximum delay of an operation: the number of times that a round selects it without effect.
const MAX_DELAY: usize = 100;

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

/// Operation of an endpoint, or a datagram from another process.
enum Payload {
    Message(Local),
    /// The remaining ranges (start, end) of a read or a write, and the immediate data of a write.
    Ranges {
        local: Local,
        remote: Remote,
        left: Vec<(usize, usize)>,
        number: Option<u32>,
    },
    /// A write of which only the immediate data remains.
    ImmediateData(Local, u32),
    /// A datagram that has arrived at the socket of `from`.
    Datagram(Vec<u8>),
}

struct Pending {
    /// Number of the endpoint that started the operation.
    from: u64,
    to: Name,
    payload: Payload,
    delay: usize,
}

/// Endpoints of this process on one simulated fabric, and their operations.
pub struct Network {
    pub random: Random,
    ports: Vec<Port>,
    pending: Vec<Pending>,
    opened: u64,
    /// Buffer for datagrams, larger than each of them.
    datagram: Vec<u8>,
}

impl Network {
    pub fn new(seed: u64) -> Self {
        Self {
            random: Random(seed),
            ports: Vec::new(),
            pending: Vec::new(),
            opened: 0,
            datagram: vec![0; 16 << 10],
        }
    }

    /// Opens an endpoint with this name; returns its number.
    ///
    /// # Errors
    /// The error of the operating system if the endpoint's socket cannot be opened, for example because the name is in use.
    pub fn open(&mut self, knobs: &'static Knobs, name: Name) -> std::io::Result<u64> {
        self.opened += 1;
        self.ports.push(Port::open(knobs, self.opened, name)?);
        Ok(self.opened)
    }

    /// Closes an endpoint. Its operations end without an effect.
    pub fn close(&mut self, number: u64) {
        self.ports.retain(|port| port.number != number);
        self.pending.retain(|operation| operation.from != number);
    }

    fn index(&self, number: u64) -> usize {
        self.ports.iter().position(|port| port.number == number).expect("the endpoint is open")
    }

    pub fn port(&mut self, number: u64) -> &mut Port {
        let at = self.index(number);
        &mut self.ports[at]
    }

    pub fn send(&mut self, number: u64, to: Name, local: Local) -> c_int {
        self.start(number, to, Payload::Message(local))
    }

    pub fn one_sided(
        &mut self,
        number: u64,
        to: Name,
        local: Local,
        remote: Remote,
        data: Option<u32>,
    ) -> c_int {
        let left = self.pieces(number, local.bytes);
        self.start(number, to, Payload::Ranges { local, remote, left, number: data })
    }

    /// Splits `bytes` bytes into ranges of random length.
    fn pieces(&mut self, number: u64, bytes: usize) -> Vec<(usize, usize)> {
        let whole = !self.port(number).enforces(Rule::Order);
        let mut pieces = Vec::new();
        let mut start = 0;
        while start < bytes {
            let rest = bytes - start;
            let most = if whole || self.random.below(3) == 0 { rest } else { 1 + self.random.below(rest) };
            pieces.push((start, start + most));
            start += most;
        }
        pieces
    }

    /// Queues an operation. Reports a full queue at random.
    fn start(&mut self, from: u64, to: Name, payload: Payload) -> c_int {
        let (busy, long) = (self.random.below(12) == 0, self.random.below(8) == 0);
        let delay = self.random.below(MAX_DELAY);
        let port = self.port(from);
        let full = port.busy >= port.operations;
        let again = port.enforces(Rule::Again);
        if full || again && (busy || port.tries > 0) {
            port.tries += 1;
            if port.tries <= MAX_RETRIES || !again {
                return -EAGAIN;
            }
            port.violation(Rule::Again, "too many attempts at a full queue without reading its completions");
            port.tries = 0;
            if full {
                return -EAGAIN;
            }
        }
        port.busy += 1;
        let delay = if long && port.enforces(Rule::Order) { delay } else { 0 };
        self.pending.push(Pending { from, to, payload, delay });
        0
    }

    /// Makes progress, then returns up to `most` entries of the endpoint's completion queue.
    pub fn read(&mut self, number: u64, most: usize) -> Vec<Entry> {
        self.receive_datagrams(number);
        let at = self.index(number);
        self.ports[at].tries = 0;
        for _ in 0..ROUNDS {
            self.progress(number);
            let Self { random, ports, .. } = self;
            let port = &mut ports[at];
            let in_order = !port.enforces(Rule::Order);
            let ready = port.completed.len();
            for _ in 0..if in_order { ready } else { random.below(ready + 1) } {
                let next = if in_order { 0 } else { random.below(port.completed.len()) };
                let entry = port.completed.remove(next);
                port.queue.push_back(entry);
            }
            if !port.queue.is_empty() || port.completed.is_empty() && self.pending.is_empty() {
                break;
            }
        }
        self.ports[at].take(most)
    }

    /// Receives datagrams of other processes.
    fn receive_datagrams(&mut self, number: u64) {
        let at = self.index(number);
        let Self { ports, pending, datagram, .. } = self;
        for _ in 0..16 {
            let Ok(bytes) = ports[at].socket.recv(datagram) else { break };
            let payload = Payload::Datagram(datagram[..bytes].to_vec());
            pending.push(Pending { from: number, to: ports[at].name, payload, delay: 0 });
        }
    }

    /// Executes a few operations of all endpoints. `reader`: endpoint whose completion queue is read.
    fn progress(&mut self, reader: u64) {
        let in_order = !self.port(reader).enforces(Rule::Order);
        let steps = if in_order { 8 } else { 1 + self.random.below(8) };
        for _ in 0..steps.min(self.pending.len()) {
            let at = if in_order { 0 } else { self.random.below(self.pending.len()) };
            if self.pending[at].delay > 0 {
                self.pending[at].delay -= 1;
                continue;
            }
            // `swap_remove` changes the order.
            let operation = if in_order { self.pending.remove(at) } else { self.pending.swap_remove(at) };
            self.execute(operation);
        }
    }

    fn execute(&mut self, mut operation: Pending) {
        let Pending { from, to, .. } = operation;
        // Set after the operation has ended, with 0 or an error number.
        let ended = match &mut operation.payload {
            Payload::Message(local) => {
                let bytes = unsafe { std::slice::from_raw_parts(local.at, local.bytes) };
                self.arrive(from, to, &Arrival::Message(bytes)).map(|error| (*local, error))
            }
            Payload::ImmediateData(local, number) => {
                let arrival = Arrival::ImmediateData { number: *number, bytes: local.bytes };
                self.arrive(from, to, &arrival).map(|error| (*local, error))
            }
            Payload::Datagram(datagram) => {
                let datagram = std::mem::take(datagram);
                let at = self.index(from);
                if !self.ports[at].deliver(&Arrival::decode(&datagram)) {
                    let payload = Payload::Datagram(datagram);
                    self.pending.push(Pending { payload, delay: 3, ..operation });
                }
                return;
            }
            Payload::Ranges { local, remote, left, number } => {
                let (local, remote, number) = (*local, *remote, *number);
                let done = match left.is_empty() {
                    true => Ok(()),
                    false => {
                        let range = left.swap_remove(self.random.below(left.len()));
                        self.piece(from, to, local, remote, range, number.is_some())
                    }
                };
                match (done, left.is_empty(), number) {
                    (Err(error), ..) => Some((local, error)),
                    (Ok(()), false, _) => None,
                    (Ok(()), true, None) => Some((local, 0)),
                    (Ok(()), true, Some(number)) => {
                        operation.payload = Payload::ImmediateData(local, number);
                        if !self.port(from).enforces(Rule::Order) {
                            return self.execute(operation);
                        }
                        None
                    }
                }
            }
        };
        match ended {
            None => self.pending.push(operation),
            Some((local, error)) => {
                self.port(from).end(Entry { context: local.context, flags: SEND, bytes: 0, data: 0, error });
            }
        }
    }

    /// Delivers a message, or sends it to another process. Returns 0 or an error number, or `None` if the operation has to wait
    /// for a receive buffer or for room in a socket.
    fn arrive(&mut self, from: u64, to: Name, arrival: &Arrival<'_>) -> Option<c_int> {
        if let Some(target) = self.ports.iter().position(|port| port.name == to) {
            return self.ports[target].deliver(arrival).then_some(0);
        }
        let port = self.port(from);
        if to.process == port.name.process {
            // The peer has closed its endpoint.
            return Some(EIO);
        }
        let datagram = arrival.encode();
        match socket_address(to).and_then(|address| port.socket.send_to_addr(&datagram, &address)) {
            Ok(_) => Some(0),
            Err(error) if error.kind() == ErrorKind::WouldBlock => None,
            Err(_) => Some(EIO),
        }
    }

    /// Copies a range of a read or a write.
    fn piece(
        &mut self,
        from: u64,
        to: Name,
        local: Local,
        remote: Remote,
        (start, end): (usize, usize),
        write: bool,
    ) -> Result<(), c_int> {
        let own = self.ports.iter().any(|port| port.name == to);
        let port = self.port(from);
        if to.process == port.name.process && !own {
            return Err(EIO);
        }
        let remote = Remote { at: remote.at + start as u64, ..remote };
        let bytes = end - start;
        let me = (port.name.token, port.enforces(Rule::AddressVector));
        match Table::check_access((to, own), me, remote, bytes as u64) {
            Ok(at) if copy((to.process, own), local.at.wrapping_add(start), at, bytes, write) => Ok(()),
            Ok(_) | Err(AccessError::PeerClosed) => Err(EIO),
            Err(AccessError::Violation(rule, text)) => {
                port.violation(rule, &text);
                Err(EINVAL)
            }
        }
    }
}
