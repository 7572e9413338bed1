//! Limit of a group's size.

use crate::error::{Error, Result};

/// Maximum number of ranks in a group. A larger number is a mistake and would exhaust memory.
pub const MAX_RANKS: usize = 1 << 17;

/// Checks that a group has at most [`MAX_RANKS`] ranks.
///
/// # Errors
/// [`Error::Invalid`] for a larger group.
pub fn check_size(name: &str, size: usize) -> Result<()> {
    if size <= MAX_RANKS {
        return Ok(());
    }
    Err(Error::Invalid(format!("group '{name}' has {size} ranks: expected at most {MAX_RANKS}")))
}
