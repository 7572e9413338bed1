"""Features whose interface may change in any release, because they use private names of torch's FSDP2.

Imports `observability` and `torch`.
"""

from smddp.experimental.error_feedback_fsdp import FsdpErrorFeedback, error_feedback_fsdp
from smddp.experimental.fsdp_overlap import overlap_fsdp

__all__ = ["FsdpErrorFeedback", "error_feedback_fsdp", "overlap_fsdp"]
