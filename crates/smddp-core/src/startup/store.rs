//! The store over which the ranks of a new group exchange their addresses.

use crate::error::Result;

/// Small values by name. Errors are those of this process.
pub trait Store {
    fn set(&self, key: &str, value: &[u8]) -> Result<()>;
    /// Returns whether all keys are set.
    fn has(&self, keys: &[String]) -> Result<bool>;
    /// Returns the value of a key that is set.
    fn get(&self, key: &str) -> Result<Vec<u8>>;
    fn delete(&self, key: &str) -> Result<()>;
}
