"""Optimizers of scripts that wrap a `torch.optim.Optimizer`, such as apex's FP16_Optimizer.

The script keeps its object, which steps, scales and clips. The methods of state dicts and of the parameters' numbers
are replaced by those of a `DistributedOptimizer` around the inner torch optimizer. After the cut the object may replace
parameters in the groups by copies. Under the key ``shard_optimizer_state`` the groups then hold this replica's share.
"""

from __future__ import annotations

from typing import Any

import torch

from smddp.modelparallel.data_parallel.optimizer_shards import Shares
from smddp.modelparallel.state import state

_LEVELS = 4
_METHODS = """state_dict local_state_dict load_state_dict save_optimizer_backcompat load_optimizer_backcompat
    _param_id_to_index param_name_to_index redefined_params""".split()


def torch_optimizer(optimizer: Any) -> Any:
    """Return ``optimizer``, or the torch optimizer that it holds as ``optimizer``.

    Raises TypeError without one.
    """
    found = optimizer
    for _ in range(_LEVELS):
        if isinstance(found, torch.optim.Optimizer):
            return found
        found = getattr(found, "optimizer", None)
    raise TypeError(
        "smp.DistributedOptimizer() takes a torch.optim.Optimizer, or an object with one as its attribute 'optimizer', "
        f"got {type(optimizer).__name__}"
    )


def override(script: Any, core: Any) -> Any:
    """Return ``script`` with the methods of ``core``, the DistributedOptimizer of the torch optimizer inside.

    Raises ValueError for keys under which the library itself must step.
    """
    cfg, _ = state.made("DistributedOptimizer()")
    for key in ("fp16", "sharded_data_parallel_degree"):
        if getattr(cfg, key) > 1 or getattr(cfg, key) is True:
            raise ValueError(
                f"smp.DistributedOptimizer(): {key!r}={getattr(cfg, key)} needs a torch.optim.Optimizer, got "
                f"{type(script).__name__}, which has its own step(): wrap its attribute 'optimizer' instead"
            )
    if core.shares is not None:
        script.step, script.zero_grad = _of_share(script.step, script.zero_grad, core.shares)
    script.orig_state_dict = script.state_dict
    for name in _METHODS:
        setattr(script, name, getattr(core, name))
    core.script = script
    return script


def _of_share(step: Any, zero_grad: Any, shares: Shares) -> tuple[Any, Any]:
    """Return ``step`` and ``zero_grad`` of an optimizer that holds this replica's share of a stage's parameters."""

    def step_and_spread(*args: Any, **options: Any) -> Any:
        found = step(*args, **options)
        shares.spread()
        return found

    def zero_all(*args: Any, **options: Any) -> None:
        zero_grad(*args, **options)
        for parameter in state.model.local_parameters():
            parameter.grad = None

    return step_and_spread, zero_all


def check_parameters(core: Any) -> None:
    """Raise ValueError for copies of parameters that a script's optimizer made before the model was cut."""
    _, ranks = state.made("DistributedOptimizer()")
    if core.script is core or ranks.mp_size == 1:
        return
    known = {id(parameter) for parameter in state.model.parameters()}
    odd = sum(id(parameter) not in known for group in core.param_groups for parameter in group["params"])
    if odd:
        raise ValueError(
            f"smp.DistributedOptimizer(): {odd} parameters of {type(core.script).__name__} are copies that it made "
            "before the first step cut the model. Make them in model.register_post_step_hook(), or use 'fp16': True"
        )
