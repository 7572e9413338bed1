"""The running microbatch of this process: at most one at a time, on any thread including those of autograd."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smddp.modelparallel.pipeline.microbatch import Microbatch

microbatch: Microbatch | None = None
