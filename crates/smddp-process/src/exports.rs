//! Exports of a process: bytes and descriptors that other processes of its node request by number.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

use smddp_base::lock;

/// Exported bytes and descriptors.
#[derive(Debug, Default)]
pub struct MemoryExport {
    /// Bytes of the export, at most [`Self::MOST_BYTES`].
    pub bytes: Vec<u8>,
    /// Descriptors of the export, at most [`Self::MOST_FDS`].
    pub fds: Vec<OwnedFd>,
}

impl MemoryExport {
    /// Maximum number of bytes per request.
    pub const MOST_BYTES: usize = 32 << 10;
    /// Maximum number of descriptors per request.
    pub const MOST_FDS: usize = 250;
}

/// Creates the export for each request, on a thread of the library.
pub type Exporter = Box<dyn Fn() -> io::Result<MemoryExport> + Send + Sync>;

#[derive(Default)]
pub struct Exports {
    state: Mutex<(u64, HashMap<u64, Arc<Exporter>>)>,
}

impl Exports {
    pub fn export(&self, exporter: Exporter) -> u64 {
        let mut state = lock(&self.state);
        state.0 += 1;
        let token = state.0;
        state.1.insert(token, Arc::new(exporter));
        token
    }

    pub fn withdraw(&self, token: u64) {
        lock(&self.state).1.remove(&token);
    }

    pub fn create(&self, token: u64) -> io::Result<MemoryExport> {
        let exporter = lock(&self.state).1.get(&token).cloned();
        let exporter = exporter.ok_or_else(|| io::Error::other(format!("no export has number {token}")))?;
        let exported = exporter()?;
        if exported.bytes.len() > MemoryExport::MOST_BYTES || exported.fds.len() > MemoryExport::MOST_FDS {
            return Err(io::Error::other(format!(
                "an export of {} bytes and {} descriptors exceeds the limit of {} bytes or {} descriptors",
                exported.bytes.len(),
                exported.fds.len(),
                MemoryExport::MOST_BYTES,
                MemoryExport::MOST_FDS,
            )));
        }
        Ok(exported)
    }
}
