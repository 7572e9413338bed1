//! Calls without compression between nodes, regardless of `SMDDP_WIRE_FORMAT`, for data that must remain exact.

use std::cell::Cell;

thread_local! {
    static LOSSLESS: Cell<bool> = const { Cell::new(false) };
}

/// Returns true if calls of this thread are not compressed.
pub(crate) fn is_lossless() -> bool {
    LOSSLESS.get()
}

/// Sets whether calls of this thread are lossless, and returns the previous value. All ranks of a call need the
/// same value; otherwise the call raises `MismatchError`.
pub fn set_lossless(lossless: bool) -> bool {
    LOSSLESS.replace(lossless)
}
