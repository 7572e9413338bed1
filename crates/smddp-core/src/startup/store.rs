//! Interface to the store over which the ranks of a group start.

pub use crate::engine::shared::Deletion;
use crate::error::Result;

/// Store of small values by key, shared by the ranks of a group. Its errors are errors of this process.
pub trait Store {
    /// Writes a value.
    fn set(&self, key: &str, value: &[u8]) -> Result<()>;
    /// Returns true if all `keys` exist.
    fn has(&self, keys: &[String]) -> Result<bool>;
    /// Returns the value of a key that exists.
    fn get(&self, key: &str) -> Result<Vec<u8>>;
    /// Deletes a key.
    fn delete(&self, key: &str) -> Result<()>;
    /// Returns an action that deletes a key later if it still has this value. `None`: the store cannot outlive the startup.
    fn deletion(&self, _key: &str, _value: &[u8]) -> Option<Deletion> {
        None
    }
}
