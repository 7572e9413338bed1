"""`smp.init()`: from a configuration to the groups."""

from __future__ import annotations

from typing import Any

from smddp.modelparallel import ranks
from smddp.modelparallel.data_parallel import grad_norm, sharded
from smddp.modelparallel.state import state
from smddp.smp import v1_keys as configuration


def is_initialized() -> bool:
    """Return True after `init`."""
    return state.initialized


def init(config: dict[str, Any] | None = None) -> None:
    """Set up pipelines and their replicas for this process.

    Collective: every rank calls it, with the same configuration. Without a default process group it makes one, over
    "smddp", from the environment of torchrun or mpirun.

    Args:
        config: the keys of `smddp.smp.v1_keys.Config`. The launcher's SM_HP_MP_PARAMETERS overrides it.

    Raises:
        TypeError, ValueError: an invalid key or value, degrees that do not fit the world, or ranks that were
            given different configurations.
        NotImplementedError: a key for an unsupported feature.
        RuntimeError: no process group and no launcher's environment; or a second call with another configuration.
    """
    values = configuration.read(config)
    if state.cfg is not None:
        if values != state.cfg:
            raise RuntimeError(f"smp.init() ran already, with {state.cfg}; call smp.reset() before another")
        return
    made = ranks.make(values)
    sharded.check(values, made)
    state.ranks = made
    state.cfg = values
    state.at_reset(grad_norm.install())
