//! Threads of this library.

use std::io;
use std::thread::{Builder, JoinHandle};

/// Starts a thread. The error names the thread and the limits that can prevent a new thread.
///
/// # Errors
/// The error of the operating system.
pub fn spawn<T: Send + 'static>(
    name: &str,
    run: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    Builder::new().name(name.to_owned()).spawn(run).map_err(|error| {
        io::Error::new(
            error.kind(),
            format!(
                "cannot start the thread {name}: {error}; raise the limit of threads (ulimit -u, or the container's pids limit) or \
                 of memory (ulimit -v)"
            ),
        )
    })
}
