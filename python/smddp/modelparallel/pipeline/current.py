"""The microbatch at work in this process. At any time at most one is, on whatever thread: autograd has its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smddp.modelparallel.pipeline.microbatch import Microbatch

microbatch: Microbatch | None = None
