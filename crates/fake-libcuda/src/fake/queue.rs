//! Queue of a stream: operations, which one thread executes in order.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::check::{self, Order};
use crate::operation::{Operation, transfer};
use crate::state::*;
use crate::types::*;
use crate::words;

#[derive(Default)]
struct Waiting {
    operations: VecDeque<(Operation, Order)>,
    submitted: u64,
    completed: u64,
    closed: bool,
}

pub(crate) struct Queue {
    pub(crate) process: usize,
    pub(crate) number: u64,
    waiting: Mutex<Waiting>,
    changed: Condvar,
}

impl Queue {
    pub(crate) fn start() -> Arc<Self> {
        let (process, number) = (process(), fresh());
        let queue = Arc::new(Self { process, number, waiting: Mutex::default(), changed: Condvar::new() });
        let ours = queue.clone();
        // In a world the seed is the same in each run.
        let seed =
            check::add_stream(process, number).map_or(number, |(rank, stream)| (rank << 16 | stream) as u64);
        std::thread::Builder::new()
            .name(format!("fake-cuda-{number}"))
            .spawn(move || {
                become_process(process);
                ours.work(Delays::new(seed));
            })
            .expect("a stream thread starts");
        queue
    }

    fn work(&self, mut delays: Delays) {
        loop {
            let mut waiting = lock(&self.waiting);
            let (operation, order) = loop {
                if let Some(next) = waiting.operations.pop_front() {
                    break next;
                }
                if waiting.closed {
                    return;
                }
                waiting = self.changed.wait(waiting).unwrap_or_else(PoisonError::into_inner);
            };
            drop(waiting);
            delays.sleep();
            // A broken context executes nothing, but enqueued operations complete.
            if broken() == CUDA_SUCCESS && !check::has_ended(self.process) {
                self.run(operation, &order, &mut delays);
            } else if let Operation::Tick(ticket) = operation {
                ticket.tick();
            }
            check::complete_operation(self, &order);
            lock(&self.waiting).completed += 1;
            self.changed.notify_all();
        }
    }

    pub(crate) fn submit(&self, operation: Operation) {
        let mut waiting = lock(&self.waiting);
        let order = check::enqueue(self, &operation).unwrap_or_default();
        if order.left_out {
            return;
        }
        waiting.submitted += 1;
        waiting.operations.push_back((operation, order));
        drop(waiting);
        self.changed.notify_all();
    }

    pub(crate) fn submitted(&self) -> u64 {
        lock(&self.waiting).submitted
    }

    pub(crate) fn is_empty(&self) -> bool {
        let waiting = lock(&self.waiting);
        waiting.completed == waiting.submitted
    }

    /// Waits until `count` operations are complete. Returns false at the time limit.
    pub(crate) fn wait(&self, count: u64, limit: Option<Duration>) -> bool {
        let begin = Instant::now();
        let mut waiting = lock(&self.waiting);
        while waiting.completed < count {
            if limit.is_some_and(|limit| begin.elapsed() >= limit) {
                return false;
            }
            let interval = Duration::from_millis(500);
            waiting = match self.changed.wait_timeout(waiting, interval) {
                Ok((waiting, _)) => waiting,
                Err(error) => error.into_inner().0,
            };
        }
        true
    }

    fn run(&self, operation: Operation, order: &Order, delays: &mut Delays) {
        match &operation {
            Operation::Wait { word, value } => {
                return words::wait(*word, *value, || check::complete_wait(self, order, *word, *value));
            }
            Operation::Await(ticket) => {
                ticket.wait();
                return check::complete_event_wait(self, order, ticket);
            }
            _ if check::execute(self, order, &operation) => return,
            _ => {}
        }
        match operation {
            Operation::Copy(mut copies) => {
                // The copies of a batch are unordered.
                while !copies.is_empty() {
                    let copy = copies.swap_remove((delays.next() % copies.len() as u64) as usize);
                    transfer(&copy);
                }
            }
            Operation::Write { word, value } => words::write(word, value),
            Operation::Tick(ticket) => ticket.tick(),
            Operation::Launch(launch) => launch.run(),
            Operation::Wait { .. } | Operation::Await(_) => {}
        }
    }

    pub(crate) fn close(&self) {
        lock(&self.waiting).closed = true;
        self.changed.notify_all();
    }
}

/// Random numbers, and random delays if the seed is not 0.
pub(crate) struct Delays {
    state: u64,
    delays: bool,
}

impl Delays {
    fn new(number: u64) -> Self {
        let seed = settings().seed;
        let state = (seed ^ number.wrapping_mul(0x9E37_79B9_7F4A_7C15)) | 1;
        Self { state, delays: seed != 0 }
    }

    fn next(&mut self) -> u64 {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        self.state
    }

    fn sleep(&mut self) {
        if self.delays {
            match self.next() % 64 {
                // Long compared with an operation, so that other streams interleave. A test has many operations.
                0 => std::thread::sleep(Duration::from_micros(self.next() % 500)),
                1..16 => std::thread::sleep(Duration::from_micros(self.next() % 60)),
                _ => {}
            }
        }
    }
}
