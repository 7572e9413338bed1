//! Errors of the rendezvous.

use std::io;

/// Result with the rendezvous's [`enum@Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// Error of the rendezvous.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The environment or the arguments are invalid.
    #[error("{0}")]
    Usage(String),
    /// An error of the communication engine.
    #[error(transparent)]
    Core(#[from] smddp_core::Error),
    /// An operating-system call failed during the operation `what`.
    #[error("{what}: {source}")]
    Io {
        /// The operation, for example `resolving the host name 'node-1'`.
        what: String,
        /// Error of the call.
        source: io::Error,
    },
    /// The ranks cannot reach each other through the store.
    #[error("{0}")]
    Rendezvous(String),
}

impl Error {
    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Error {
        let what = what.into();
        move |source| Error::Io { what, source }
    }
}
