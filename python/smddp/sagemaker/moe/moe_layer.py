"""The class that scripts test a model's experts against."""

from __future__ import annotations

from typing import Any

from torch import nn


class MoELayer(nn.Module):
    """A layer of experts spread over ranks. Scripts name it in checks; it cannot be made yet.

    Raises NotImplementedError when constructed.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            "MoELayer needs expert parallelism, which does not run yet: set expert_parallel_degree to 1 and keep the "
            "model's own experts"
        )
