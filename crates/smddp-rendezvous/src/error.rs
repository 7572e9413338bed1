//! Why ranks do not meet, each as one sentence.

use std::io;

pub type Result<T> = std::result::Result<T, Error>;

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The environment, or what was asked for, does not make sense.
    #[error("{0}")]
    Usage(String),
    /// The engine's own message.
    #[error(transparent)]
    Core(#[from] smddp_core::Error),
    /// An operating-system call failed; `what` says during what.
    #[error("{what}: {source}")]
    Io { what: String, source: io::Error },
    /// The ranks did not find each other.
    #[error("{0}")]
    NotMet(String),
}

impl Error {
    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Error {
        let what = what.into();
        move |source| Error::Io { what, source }
    }
}
