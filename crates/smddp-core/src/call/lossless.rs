//! Calls that leave elements as they are between nodes, whatever `SMDDP_WIRE_FORMAT` says: what is gathered to be kept.

use std::cell::Cell;

thread_local! {
    static LOSSLESS: Cell<bool> = const { Cell::new(false) };
}

/// Whether calls that this thread makes are exact.
pub(crate) fn is_lossless() -> bool {
    LOSSLESS.get()
}

/// Has them be, or not; what they were. The ranks of a call must have the same, and a call in which they have not is a
/// `MismatchError`.
pub fn set_lossless(exact: bool) -> bool {
    LOSSLESS.replace(exact)
}
