"""Training settings of a mixture of experts."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

__all__ = ["LOAD_BALANCING", "MoEConfig"]

LOAD_BALANCING = ("aux_loss", "sinkhorn", "balanced", "none")  # each is explained in expert_parallel/balancing.py


@dataclass
class MoEConfig:
    """The ``config`` of `transform` for a model with experts.

    Attributes:
        smp_moe: spread the experts and balance their router; False leaves the model's own layers, at degree 1 only.
        random_seed: of the shuffle, >= 0. Experts' initial values are the model's own, at any degree.
        moe_load_balancing: how tokens are spread: "aux_loss", "sinkhorn", "balanced" or "none", see
            `expert_parallel/balancing.py`.
        global_token_shuffle: shuffle tokens within the expert group before they go to experts; no result changes.
        moe_all_to_all_dispatcher: send each token to the ranks that need it, by all-to-all; False: all tokens to all
            ranks of the expert group, by all-gather.
        moe_aux_loss_coeff: factor of the balancing loss, >= 0; with "aux_loss" alone.
        moe_z_loss_coeff: factor of the router's z-loss, >= 0; with every balancing. 0 and "none": as transformers.
        use_cpu_initialization: accepted; experts' initial values are the model's own, wherever it was made.

    Raises TypeError or ValueError for a value of the wrong type or outside its range.
    """

    smp_moe: bool = True
    random_seed: int = 12345
    moe_load_balancing: str = "sinkhorn"
    global_token_shuffle: bool = False
    moe_all_to_all_dispatcher: bool = True
    moe_aux_loss_coeff: float = 0.001
    moe_z_loss_coeff: float = 0.001
    use_cpu_initialization: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, bool):
                _check(isinstance(value, bool), TypeError, field.name, value, "True or False")
            elif isinstance(field.default, int):
                whole = isinstance(value, int) and not isinstance(value, bool)
                _check(whole, TypeError, field.name, value, "a whole number")
                _check(value >= 0, ValueError, field.name, value, ">= 0")
            elif isinstance(field.default, float):
                number = isinstance(value, (int, float)) and not isinstance(value, bool)
                _check(number, TypeError, field.name, value, "a number")
                _check(math.isfinite(value) and value >= 0, ValueError, field.name, value, "finite and >= 0")
        known = self.moe_load_balancing in LOAD_BALANCING
        _check(known, ValueError, "moe_load_balancing", self.moe_load_balancing, f"one of {', '.join(LOAD_BALANCING)}")


def _check(good: bool, error: type[Exception], name: str, value: object, allowed: str) -> None:
    if not good:
        raise error(f"MoEConfig({name}={value!r}): it must be {allowed}")
