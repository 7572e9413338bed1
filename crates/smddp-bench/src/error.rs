//! Errors of the program.

use std::io;

pub(crate) type Result<T> = std::result::Result<T, Error>;

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The command line or the environment is invalid.
    #[error("{0}")]
    Usage(String),
    /// An error of the communication engine.
    #[error(transparent)]
    Core(#[from] smddp_core::Error),
    /// An operating-system call failed during the operation `what`.
    #[error("{what}: {source}")]
    Io { what: String, source: io::Error },
    /// The rendezvous of the ranks failed.
    #[error("{0}")]
    Rendezvous(String),
    #[error("cannot allocate a buffer of {0} bytes")]
    Allocation(usize),
    /// Data was wrong. The table is complete.
    #[error("{0} of the checks failed (wrong elements, or bytes written outside a buffer)")]
    WrongData(u64),
}

impl From<smddp_rendezvous::Error> for Error {
    fn from(error: smddp_rendezvous::Error) -> Self {
        use smddp_rendezvous::Error as E;
        match error {
            E::Usage(text) => Error::Usage(text),
            E::Core(error) => Error::Core(error),
            E::Io { what, source } => Error::Io { what, source },
            error => Error::Rendezvous(error.to_string()),
        }
    }
}

impl Error {
    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Error {
        let what = what.into();
        move |source| Error::Io { what, source }
    }
}
