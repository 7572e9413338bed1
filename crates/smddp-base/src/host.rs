//! Identity of this host.

/// Returns the name of this host. Reads no file.
pub fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}
