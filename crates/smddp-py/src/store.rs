//! Python stores with the interface of torch's stores, as stores of the core.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyCFunction};
use smddp_core::{Communicator, Deletion, Error, ParentGroup, Result, Store, after, interrupted, log};

use crate::errors::raise;

/// Interval between two checks for Ctrl-C and for dead ranks.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);
/// Time after which a missing reply is logged.
const SLOW_REPLY: Duration = Duration::from_secs(10);
/// Minimum time limit of a reply: after the deadline the store is still asked for the ranks that joined.
const MIN_TIMEOUT: Duration = Duration::from_secs(1);

/// Number of ranks whose death is checked while a reply is missing.
const MAX_WATCHED: usize = 8;

type Request = Box<dyn FnOnce() + Send>;

/// A Python object with `set`, `check`, `get` and `delete_key`. The exception that it raises becomes the cause of the group's
/// error.
///
/// torch's client waits for a reply as long as its connection lasts, which is forever if the store's host is unresponsive.
/// Therefore a separate thread sends the requests. After the deadline that thread is abandoned, and no more requests are sent.
pub(crate) struct PyStore {
    store: Arc<Py<PyAny>>,
    /// Call, group, timeout and deadline.
    call: (String, String, Duration, Instant),
    rank: usize,
    /// A group that contains the ranks, and their ranks in it. It detects dead ranks while the store does not reply.
    known: Option<(Communicator, Vec<usize>)>,
    raised: Mutex<Option<PyErr>>,
    sender: OnceLock<Sender<Request>>,
    /// Set when the request thread has ended.
    ended: Arc<AtomicBool>,
    /// Set after a timeout: no more requests are sent.
    abandoned: AtomicBool,
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
            call: (call.to_owned(), group.to_owned(), timeout, after(Instant::now(), timeout)),
            rank,
            raised: Mutex::default(),
            sender: OnceLock::new(),
            ended: Arc::default(),
            abandoned: AtomicBool::new(false),
        }
    }

    /// Returns the exception of a group that was not created. The store's exception becomes its cause. An exception of a signal
    /// handler that is not derived from `Exception` is returned unchanged.
    pub(crate) fn exception(&self, py: Python<'_>, error: Error) -> PyErr {
        let of_store = matches!(&error, Error::System { operation, .. } if *operation == self.operation());
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
        let (call, group, ..) = &self.call;
        format!("{call} on group `{group}` failed")
    }

    /// Returns the error of a failed request.
    fn failed(&self, reason: &str) -> Error {
        let (rank, host, pid) = (self.rank, smddp_core::host_name(), std::process::id());
        Error::System {
            operation: self.operation(),
            reason: format!(
                "rank {rank} (host {host}, pid {pid}) cannot use {} ({reason}). Has the process that serves the store ended? \
                 Existing groups go on. For new groups serve the store from a process that outlives the ranks (torchrun \
                 does), give a group other ranks with `reconfigure` and hints={{\"store\": \"HOST:PORT\"}}, or start the \
                 job again",
                self.description()
            ),
        }
    }

    fn request<T: Send + 'static>(
        &self,
        operation: impl FnOnce(&Bound<'_, PyAny>) -> PyResult<T> + Send + 'static,
    ) -> Result<T> {
        let (reply, replies) = channel();
        let store = Arc::clone(&self.store);
        self.submit(Box::new(move || {
            let outcome = Python::attach(|py| {
                let outcome = operation(store.bind(py));
                // A store that is dropped without the interpreter lock may keep its connection for some time.
                drop(store);
                outcome
            });
            // After the deadline the receiver is dropped.
            let _ = reply.send(outcome);
        }))?;
        let begun = Instant::now();
        let timeout = self.call.3.saturating_duration_since(begun).max(MIN_TIMEOUT);
        let mut slow = begun + SLOW_REPLY;
        loop {
            let left = timeout.saturating_sub(begun.elapsed());
            match replies.recv_timeout(left.min(CHECK_INTERVAL)) {
                Ok(Ok(value)) => return Ok(value),
                Ok(Err(error)) => {
                    // torch appends the C++ stack in further lines.
                    let reason = error.to_string().lines().next().unwrap_or_default().to_owned();
                    if let Ok(mut raised) = self.raised.lock() {
                        raised.get_or_insert(error);
                    }
                    return Err(self.dead_rank().unwrap_or_else(|| self.failed(&reason)));
                }
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(self.failed("the thread that sends its requests has ended"));
                }
                Err(RecvTimeoutError::Timeout) if interrupted() => {
                    self.abandon();
                    return Err(Error::Interrupted);
                }
                Err(RecvTimeoutError::Timeout) if left.is_zero() => {
                    self.abandon();
                    return Err(self.timeout_error());
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
            if let Some(error) = self.dead_rank() {
                self.abandon();
                return Err(error);
            }
            if Instant::now() >= slow {
                let (call, group, ..) = &self.call;
                let (description, after) = (self.description(), begun.elapsed().as_secs());
                log::say(
                    log::Level::Warn,
                    &format!("{call} on group `{group}`: {description} has not answered for {after} s"),
                );
                slow += 6 * SLOW_REPLY;
            }
        }
    }

    fn submit(&self, request: Request) -> Result<()> {
        if self.abandoned.load(Ordering::Relaxed) {
            return Err(self.timeout_error());
        }
        let refused = |reason: &dyn std::fmt::Display| self.failed(&reason.to_string());
        let sender = match self.sender.get() {
            Some(sender) => sender,
            None => {
                let (sender, requests) = channel::<Request>();
                // The thread ends when the sender is dropped.
                let ended = Arc::clone(&self.ended);
                let run = move || {
                    requests.into_iter().for_each(|request| request());
                    ended.store(true, Ordering::Release);
                };
                smddp_core::spawn("smddp-store", run).map_err(|error| refused(&error))?;
                self.sender.get_or_init(|| sender)
            }
        };
        sender.send(request).map_err(|error| refused(&error))
    }

    /// Returns an error if one of the first ranks is dead. If a rank serves the store, it is one of the first.
    fn dead_rank(&self) -> Option<Error> {
        let (group, ranks) = self.known.as_ref()?;
        let (call, name, ..) = &self.call;
        let first: Vec<usize> = (0..ranks.len().min(MAX_WATCHED)).collect();
        ParentGroup { group, ranks, siblings: &[] }.lost((call, name), &first)
    }

    /// Stops sending requests. The pending request of the thread ends at the latest with the process.
    fn abandon(&self) {
        self.abandoned.store(true, Ordering::Relaxed);
        let ended = Arc::clone(&self.ended);
        let left = Python::attach(|py| -> PyResult<()> {
            let port: Option<u16> =
                self.innermost(py).getattr("port").ok().and_then(|port| port.extract().ok());
            let ended = PyCFunction::new_closure(py, None, None, move |_, _| ended.load(Ordering::Acquire))?;
            py.import("smddp.exit_hooks.silent_store")?.call_method1("leave_behind", (port, ended)).map(drop)
        });
        if let Err(error) = left {
            log::say(
                log::Level::Warn,
                &format!("cannot end the thread that sends the store's requests: {error}"),
            );
        }
    }

    fn timeout_error(&self) -> Error {
        let (call, group, after, _) = &self.call;
        let detail = format!(
            "{} does not answer. Is the host that serves it up, and the network to it?",
            self.description()
        );
        Error::Timeout {
            operation: call.clone(),
            group: group.clone(),
            after: *after,
            missing: Vec::new(),
            detail,
        }
    }

    /// Returns the store below wrappers that only add key prefixes.
    fn innermost<'py>(&self, py: Python<'py>) -> Bound<'py, PyAny> {
        let mut store = self.store.bind(py).clone();
        while let Ok(under) = store.getattr("underlying_store") {
            store = under;
        }
        store
    }

    /// Describes the store, for example "the store (TCPStore at 10.0.0.1:29500)".
    fn description(&self) -> String {
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
        self.request(move |store| {
            store.call_method1("set", (key, PyBytes::new(store.py(), &value))).map(drop)
        })
    }

    fn has(&self, keys: &[String]) -> Result<bool> {
        let keys = keys.to_owned();
        self.request(move |store| store.call_method1("check", (keys,))?.extract())
    }

    fn get(&self, key: &str) -> Result<Vec<u8>> {
        let key = key.to_owned();
        self.request(move |store| store.call_method1("get", (key,))?.extract())
    }

    /// Deletes a key. Exceptions of the store are ignored: not every store supports deletion, and a remaining key is harmless.
    fn delete(&self, key: &str) -> Result<()> {
        let key = key.to_owned();
        self.request(move |store| match store.call_method1("delete_key", (key,)) {
            Err(error) if !error.is_instance_of::<PyException>(store.py()) => Err(error),
            _ => Ok(()),
        })
    }

    fn deletion(&self, key: &str, value: &[u8]) -> Option<Deletion> {
        let (call, group, ..) = &self.call;
        let place = (call.clone(), group.clone());
        let (store, rank, key, value) =
            (Arc::clone(&self.store), self.rank, key.to_owned(), value.to_owned());
        Some(Box::new(move || {
            // Its deadline is `MIN_TIMEOUT`.
            let store = Self::shared(store, (&place.0, &place.1), rank, Duration::ZERO, None);
            let outcome = store.request(move |store| {
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
