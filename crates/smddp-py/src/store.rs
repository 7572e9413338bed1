//! torch's stores, as the core asks them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyCFunction};
use smddp_core::{Communicator, Deletion, Error, Known, Result, Store, after, interrupted, log};

use crate::errors::raise;

/// Between two looks whether Ctrl-C came, or a rank is known to be dead.
const LOOK: Duration = Duration::from_millis(50);
/// After which an answer is told to be late.
const SLOW: Duration = Duration::from_secs(10);
/// What an answer has in any case: after the deadline it is still asked who came.
const LEAST: Duration = Duration::from_secs(1);

/// So many ranks are looked after while there is no answer.
const WATCHED: usize = 8;

type Question = Box<dyn FnOnce() + Send>;

/// An object with `set`, `check`, `get` and `delete_key`. The exception that it raises is the cause of the group's error.
///
/// torch's client waits for an answer as long as its connection lasts, which is for ever where the store's host has fallen
/// silent. So a thread of its own asks; when the deadline has passed it stays behind, and nothing more is asked.
pub(crate) struct PyStore {
    store: Arc<Py<PyAny>>,
    /// What is made, and of which group; within which time, and until when.
    making: (String, String, Duration, Instant),
    rank: usize,
    /// A group in which the ranks are already, and what they are there: it knows who is dead while the store says nothing.
    known: Option<(Communicator, Vec<usize>)>,
    raised: Mutex<Option<PyErr>>,
    asker: OnceLock<Sender<Question>>,
    /// Whether the asker has ended.
    ended: Arc<AtomicBool>,
    silent: AtomicBool,
}

impl PyStore {
    pub(crate) fn new(
        store: Py<PyAny>,
        names: (&str, &str),
        rank: usize,
        timeout: Duration,
        known: Option<(Communicator, Vec<usize>)>,
    ) -> Self {
        Self::shared(Arc::new(store), names, rank, timeout, known)
    }

    fn shared(
        store: Arc<Py<PyAny>>,
        (call, group): (&str, &str),
        rank: usize,
        timeout: Duration,
        known: Option<(Communicator, Vec<usize>)>,
    ) -> Self {
        Self {
            store,
            known,
            making: (call.to_owned(), group.to_owned(), timeout, after(Instant::now(), timeout)),
            rank,
            raised: Mutex::default(),
            asker: OnceLock::new(),
            ended: Arc::default(),
            silent: AtomicBool::new(false),
        }
    }

    /// The exception of a group that was not made. One of the store is its cause, and an exception that is no `Exception`
    /// (of a signal handler) is raised itself.
    pub(crate) fn exception(&self, py: Python<'_>, error: Error) -> PyErr {
        let of_store = matches!(&error, Error::System { what, .. } if *what == self.operation());
        let raised = self.raised.lock().ok().and_then(|mut raised| raised.take()).filter(|_| of_store);
        match raised {
            Some(raised) if !raised.is_instance_of::<PyException>(py) => raised,
            raised => {
                let made = raise(py, error);
                made.set_cause(py, raised);
                made
            }
        }
    }

    fn operation(&self) -> String {
        let (call, group, ..) = &self.making;
        format!("{call} on group `{group}` failed")
    }

    /// The store did not do what this rank asked.
    fn failed(&self, why: &str) -> Error {
        let (rank, host, pid) = (self.rank, smddp_core::host_name(), std::process::id());
        Error::System {
            what: self.operation(),
            why: format!(
                "rank {rank} (host {host}, pid {pid}) cannot use {} ({why}). Has the process that serves the store ended? \
                 Existing groups go on. For new groups serve the store from a process that outlives the ranks (torchrun \
                 does), give a group other ranks with `reconfigure` and hints={{\"store\": \"HOST:PORT\"}}, or start the \
                 job again",
                self.place()
            ),
        }
    }

    fn ask<T: Send + 'static>(
        &self,
        what: impl FnOnce(&Bound<'_, PyAny>) -> PyResult<T> + Send + 'static,
    ) -> Result<T> {
        let (answer, answered) = channel();
        let store = Arc::clone(&self.store);
        self.hand(Box::new(move || {
            let outcome = Python::attach(|py| {
                let outcome = what(store.bind(py));
                // A store that is dropped without the interpreter lock may stay open for some time.
                drop(store);
                outcome
            });
            // Nobody listens any more where the deadline has passed.
            let _ = answer.send(outcome);
        }))?;
        let begun = Instant::now();
        let patience = self.making.3.saturating_duration_since(begun).max(LEAST);
        let mut slow = begun + SLOW;
        loop {
            let left = patience.saturating_sub(begun.elapsed());
            match answered.recv_timeout(left.min(LOOK)) {
                Ok(Ok(value)) => return Ok(value),
                Ok(Err(error)) => {
                    // torch appends the stack of its C++ code.
                    let why = error.to_string().lines().next().unwrap_or_default().to_owned();
                    if let Ok(mut raised) = self.raised.lock() {
                        raised.get_or_insert(error);
                    }
                    return Err(self.lost().unwrap_or_else(|| self.failed(&why)));
                }
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(self.failed("the thread that asks it has ended"));
                }
                Err(RecvTimeoutError::Timeout) if interrupted() => {
                    self.leave_behind();
                    return Err(Error::Interrupted);
                }
                Err(RecvTimeoutError::Timeout) if left.is_zero() => {
                    self.leave_behind();
                    return Err(self.silence());
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
            if let Some(error) = self.lost() {
                self.leave_behind();
                return Err(error);
            }
            if Instant::now() >= slow {
                let (call, group, ..) = &self.making;
                let (place, after) = (self.place(), begun.elapsed().as_secs());
                log::say(
                    log::Level::Warn,
                    &format!("{call} on group `{group}`: {place} has not answered for {after} s"),
                );
                slow += 6 * SLOW;
            }
        }
    }

    fn hand(&self, question: Question) -> Result<()> {
        if self.silent.load(Ordering::Relaxed) {
            return Err(self.silence());
        }
        let refused = |why: &dyn std::fmt::Display| self.failed(&why.to_string());
        let asker = match self.asker.get() {
            Some(asker) => asker,
            None => {
                let (sender, questions) = channel::<Question>();
                // It ends with the sender.
                let ended = Arc::clone(&self.ended);
                let run = move || {
                    questions.into_iter().for_each(|question| question());
                    ended.store(true, Ordering::Release);
                };
                smddp_core::spawn("smddp-store", run).map_err(|error| refused(&error))?;
                self.asker.get_or_init(|| sender)
            }
        };
        asker.send(question).map_err(|error| refused(&error))
    }

    /// One of the first ranks is dead: the store is at one of them, or at none.
    fn lost(&self) -> Option<Error> {
        let (group, ranks) = self.known.as_ref()?;
        let (call, name, ..) = &self.making;
        let first: Vec<usize> = (0..ranks.len().min(WATCHED)).collect();
        Known { group, ranks, siblings: &[] }.lost((call, name), &first)
    }

    /// Nothing more is asked; what the thread is in ends with the process at the latest.
    fn leave_behind(&self) {
        self.silent.store(true, Ordering::Relaxed);
        let ended = Arc::clone(&self.ended);
        let left = Python::attach(|py| -> PyResult<()> {
            let port: Option<u16> =
                self.innermost(py).getattr("port").ok().and_then(|port| port.extract().ok());
            let ended = PyCFunction::new_closure(py, None, None, move |_, _| ended.load(Ordering::Acquire))?;
            py.import("smddp.exit_hooks.silent_store")?.call_method1("leave_behind", (port, ended)).map(drop)
        });
        if let Err(error) = left {
            log::say(log::Level::Warn, &format!("a thread that asks the store cannot be ended: {error}"));
        }
    }

    fn silence(&self) -> Error {
        let (call, group, after, _) = &self.making;
        let detail = format!(
            "{} does not answer. Is the host that serves it up, and the network to it?",
            self.place()
        );
        Error::Timeout {
            what: call.clone(),
            group: group.clone(),
            after: *after,
            missing: Vec::new(),
            detail,
        }
    }

    /// The store under those that only put names before the keys.
    fn innermost<'py>(&self, py: Python<'py>) -> Bound<'py, PyAny> {
        let mut store = self.store.bind(py).clone();
        while let Ok(under) = store.getattr("underlying_store") {
            store = under;
        }
        store
    }

    /// "the store (TCPStore at 10.0.0.1:29500)".
    fn place(&self) -> String {
        Python::attach(|py| {
            let store = self.innermost(py);
            let kind = store.get_type().name().map(|name| name.to_string()).unwrap_or_default();
            let text = |name: &str| Some(store.getattr(name).ok()?.str().ok()?.to_string());
            match (text("host"), text("port")) {
                (Some(host), Some(port)) => format!("the store ({kind} at {host}:{port})"),
                _ => format!("the store ({kind})"),
            }
        })
    }
}

impl Store for PyStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        let (key, value) = (key.to_owned(), value.to_owned());
        self.ask(move |store| store.call_method1("set", (key, PyBytes::new(store.py(), &value))).map(drop))
    }

    fn has(&self, keys: &[String]) -> Result<bool> {
        let keys = keys.to_owned();
        self.ask(move |store| store.call_method1("check", (keys,))?.extract())
    }

    fn get(&self, key: &str) -> Result<Vec<u8>> {
        let key = key.to_owned();
        self.ask(move |store| store.call_method1("get", (key,))?.extract())
    }

    /// Not every store can: what stays does no harm.
    fn delete(&self, key: &str) -> Result<()> {
        let key = key.to_owned();
        self.ask(move |store| match store.call_method1("delete_key", (key,)) {
            Err(error) if !error.is_instance_of::<PyException>(store.py()) => Err(error),
            _ => Ok(()),
        })
    }

    fn deletion(&self, key: &str, value: &[u8]) -> Option<Deletion> {
        let (call, group, ..) = &self.making;
        let place = (call.clone(), group.clone());
        let (store, rank, key, value) =
            (Arc::clone(&self.store), self.rank, key.to_owned(), value.to_owned());
        Some(Box::new(move || {
            // Its deadline is `LEAST`.
            let store = Self::shared(store, (&place.0, &place.1), rank, Duration::ZERO, None);
            let outcome = store.ask(move |store| {
                let stored = |key: &str| store.call_method1("check", (vec![key],))?.extract::<bool>();
                if stored(&key)? && store.call_method1("get", (&key,))?.extract::<Vec<u8>>()? == value {
                    store.call_method1("delete_key", (&key,))?;
                }
                Ok(())
            });
            Python::attach(|_| drop(store));
            outcome
        }))
    }
}
