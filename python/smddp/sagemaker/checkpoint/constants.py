"""Keys of the non-tensor entries in a checkpoint, as training scripts use them."""

from __future__ import annotations

# True in a checkpoint of one rank's part, absent or False in a full one.
SMP_IS_PARTIAL_KEY = "smp_is_partial"
# Set in a state dict with load instructions instead of values.
SMP_IS_LOAD_INFO_KEY = "smp_is_load_info"
