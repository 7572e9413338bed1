//! torch's stores, as the core asks them.

use std::sync::Mutex;

use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use smddp_core::{Error, Result, Store};

const ASKING: &str = "asking the store";

/// An object with `set`, `check`, `get` and `delete_key`. What it raises is kept for whoever asked.
pub(crate) struct PyStore {
    store: Py<PyAny>,
    raised: Mutex<Option<PyErr>>,
}

impl PyStore {
    pub(crate) fn new(store: Py<PyAny>) -> Self {
        Self { store, raised: Mutex::default() }
    }

    /// What the store raised, where that is why the core gave up. (It may be gone by the time a rank that failed tidies up.)
    pub(crate) fn raised(&self, error: &Error) -> Option<PyErr> {
        let asked = matches!(error, Error::System { what, .. } if what == ASKING);
        self.raised.lock().ok()?.take().filter(|_| asked)
    }

    fn ask<T>(&self, what: impl FnOnce(&Bound<'_, PyAny>) -> PyResult<T>) -> Result<T> {
        Python::attach(|py| {
            what(self.store.bind(py)).map_err(|error| {
                let why = error.to_string();
                if let Ok(mut raised) = self.raised.lock() {
                    raised.get_or_insert(error);
                }
                Error::System { what: ASKING.to_owned(), why }
            })
        })
    }
}

impl Store for PyStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.ask(|store| store.call_method1("set", (key, PyBytes::new(store.py(), value))).map(drop))
    }

    fn has(&self, keys: &[String]) -> Result<bool> {
        self.ask(|store| store.call_method1("check", (keys,))?.extract())
    }

    fn get(&self, key: &str) -> Result<Vec<u8>> {
        self.ask(|store| store.call_method1("get", (key,))?.extract())
    }

    /// Not every store can: what stays does no harm. Ctrl-C gets through.
    fn delete(&self, key: &str) -> Result<()> {
        self.ask(|store| match store.call_method1("delete_key", (key,)) {
            Err(error) if !error.is_instance_of::<PyException>(store.py()) => Err(error),
            _ => Ok(()),
        })
    }
}
