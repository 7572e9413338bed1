//! Bound of a group's size.

use crate::error::{Error, Result};

/// Most ranks of a group. A larger number is a mistake, and would only exhaust memory.
pub const MAX_RANKS: usize = 1 << 17;

/// # Errors
/// [`Error::Invalid`] for a group that has more ranks than any machine.
pub fn check_size(name: &str, size: usize) -> Result<()> {
    if size <= MAX_RANKS {
        return Ok(());
    }
    Err(Error::Invalid(format!("group '{name}' has {size} ranks: expected at most {MAX_RANKS}")))
}
