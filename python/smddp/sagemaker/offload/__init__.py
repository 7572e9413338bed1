"""Activation offloading with prefetch during backward, behind torch's ``offload_wrapper``.

The inputs of each checkpointed layer leave for host memory while the forward goes on, and come back
``activation_loading_horizon`` layers before backward needs them. One engine serves the whole process.

- ``engine.py``   what is stored and loaded, and when
- ``records.py``  one saved tensor and where its bytes are
- ``movers.py``   how bytes travel: plain copies on the CPU, side streams and events on an accelerator
- ``pool.py``     host buffers, used again
- ``parameters.py``  what must never be offloaded
- ``wrapper.py``  the forward that ``OffloadWrapper`` gets while the feature is on
"""

from __future__ import annotations

from smddp.sagemaker.offload.engine import OffloadStatistics, engine
from smddp.sagemaker.offload.wrapper import forget_layers, prefetching_forward

__all__ = ["OffloadStatistics", "engine", "forget_layers", "prefetching_forward", "reset", "statistics"]


def statistics() -> OffloadStatistics:
    """Counters of the process's engine since start or :func:`reset`, and its current memory."""
    return engine().statistics()


def reset() -> None:
    """Zero the statistics, free idle host buffers, and remove the hooks of the layers.

    Graphs whose backward is still to come keep what they stored.
    """
    forget_layers()
    engine().reset()
