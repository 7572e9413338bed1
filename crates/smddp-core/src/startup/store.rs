//! Interface to the store over which the ranks of a group start.

pub use crate::engine::shared::Deletion;
use crate::error::Result;

/// Store of small values by key, shared by the ranks of a group. Its errors are errors of this process.
pub trait Store {
    /// Writes a value.
    ///
    /// # Errors
    /// [`Error::System`](crate::Error::System) if the store rejects the request or its connection is lost,
    /// [`Error::Timeout`](crate::Error::Timeout) if the deadline of the group's creation passes.
    fn set(&self, key: &str, value: &[u8]) -> Result<()>;
    /// Returns true if all `keys` exist.
    ///
    /// # Errors
    /// As for [`Store::set`].
    fn has(&self, keys: &[String]) -> Result<bool>;
    /// Returns the value of a key that exists.
    ///
    /// # Errors
    /// As for [`Store::set`]; also if the key is missing at the store's time limit.
    fn get(&self, key: &str) -> Result<Vec<u8>>;
    /// Deletes a key.
    ///
    /// # Errors
    /// As for [`Store::set`]. A missing key is not an error.
    fn delete(&self, key: &str) -> Result<()>;
    /// Returns an action that deletes a key later if it still has this value. `None`: the store cannot outlive the startup.
    fn deletion(&self, _key: &str, _value: &[u8]) -> Option<Deletion> {
        None
    }
}
