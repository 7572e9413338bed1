"""Random numbers under tensor parallelism.

Outside tensor-parallel regions (embedding and residual dropout) all ranks of a tensor group draw the same numbers
from the device's default generator, exactly as without tensor parallelism. Inside a region each rank works on other
heads or columns, so each must draw its own.

What equals the run without tensor parallelism, from the same seed: every draw outside regions, as long as nothing
is drawn inside one. So with attention dropout 0 and residual dropout on, losses are those of the plain model. What
does not: dropout inside a region (attention probabilities) draws other numbers, because each rank draws for its own
heads only; the distribution is the same. Both are the same from run to run, and when a checkpointed layer is
recomputed.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator

import torch
import torch.distributed as dist

TENSOR_PARALLEL = "model-parallel-rng"


def _get_state(device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return torch.get_rng_state()
    return getattr(torch, device.type).get_rng_state(device)


def _set_state(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        getattr(torch, device.type).set_rng_state(state, device)


def _default_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _state_of_seed(device: torch.device, seed: int) -> torch.Tensor:
    return torch.Generator(device).manual_seed(seed).get_state()


class RngStateTracker:
    """Named random states besides the default state; `fork` switches to one of them temporarily.

    The interface that transformer-engine and Megatron-style checkpointing expect from a tracker.
    """

    def __init__(self) -> None:
        self._states: dict[str, torch.Tensor] = {}
        self._seeds: set[int] = set()

    def reset(self) -> None:
        """Remove all states."""
        self._states, self._seeds = {}, set()

    def get_states(self) -> dict[str, torch.Tensor]:
        """Returns a copy of the states by name."""
        return dict(self._states)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Replace all states by a result of `get_states`."""
        self._states = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Add a new state with this name.

        Raises ValueError if the name or the seed is taken: equal seeds would give equal dropout masks.
        """
        if name in self._states:
            raise ValueError(f"the tracker has a state {name!r} already")
        if seed in self._seeds:
            raise ValueError(f"the tracker has a state with seed {seed} already; its numbers would repeat")
        self._seeds.add(seed)
        self._states[name] = _state_of_seed(_default_device(), seed)

    @contextlib.contextmanager
    def fork(self, name: str = TENSOR_PARALLEL) -> Iterator[None]:
        """Use state ``name`` inside the context, and restore the default state on exit.

        Raises ValueError for a name that was not added.
        """
        if name not in self._states:
            raise ValueError(f"the tracker has no state {name!r}; it has {sorted(self._states) or 'none'}: add() it")
        device = _default_device()
        outside = _get_state(device)
        _set_state(device, self._states[name])
        try:
            yield
        finally:
            self._states[name] = _get_state(device)
            _set_state(device, outside)


_TRACKER = RngStateTracker()


def get_rng_state_tracker() -> RngStateTracker:
    """The process's tracker. `transform` adds "model-parallel-rng" to it, seeded random_seed + tp_rank."""
    return _TRACKER


def share_default_state(group: dist.ProcessGroup, device: torch.device) -> None:
    """Broadcast the first rank's default states of the CPU and ``device`` to the tensor group ``group``.

    So scripts that seed by the rank draw what all ranks of a group must have in common, too. Collective over the group.
    """
    cpu = torch.device("cpu")
    for generator in [cpu] if device == cpu else [cpu, device]:
        mine = _get_state(generator)
        common = mine.to(device)
        dist.broadcast(common, dist.get_global_rank(group, 0), group=group)
        _set_state(generator, common.to(mine.device))


class RegionRandomness:
    """Rank-specific random numbers in a tensor group, between `enter` and `leave`.

    The state inside derives from the default state, the seed and the rank. So restoring the default state, as
    activation checkpointing does, reproduces the numbers.
    """

    def __init__(self, seed: int, rank: int) -> None:
        self._salt = f"{seed + rank}".encode()
        self._outside: tuple[torch.device, torch.Tensor, torch.Tensor] | None = None

    def enter(self, device: torch.device) -> None:
        """Switch to this rank's state; no effect if already inside."""
        if self._outside is not None:
            return
        outside = _get_state(device)
        digest = hashlib.blake2b(outside.numpy().tobytes(), digest_size=7, key=self._salt).digest()
        inside = _state_of_seed(device, int.from_bytes(digest, "little"))
        self._outside = (device, outside, inside)
        _set_state(device, inside)

    def leave(self) -> None:
        """Switch back to the default state; no effect if already outside.

        Where something was drawn, the default state moves on by one draw, so that the next region differs.
        """
        if self._outside is None:
            return
        device, outside, inside = self._outside
        self._outside = None
        drew = not torch.equal(_get_state(device), inside)
        _set_state(device, outside)
        if drew:
            torch.rand((), device=device)
