"""Telling attention layers which ranks hold the rest of the sequence."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import nn


def setup_transformer_engine_cp_groups(model: nn.Module, ranks: Sequence[int], pg: dist.ProcessGroup | None) -> None:
    """Nothing to do with one rank per sequence: ``pg`` is None (as `tsm.state.cp_process_group` then is) or of size 1.

    Raises NotImplementedError for a larger group.
    """
    if pg is not None and pg.size() > 1:
        raise NotImplementedError(
            f"context parallelism over {pg.size()} ranks ({list(ranks)}) does not run yet: set "
            f"context_parallel_degree to 1"
        )
