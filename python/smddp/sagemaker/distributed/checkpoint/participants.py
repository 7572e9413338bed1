"""Ranks of one save or load, with error propagation: an error of one rank is raised on all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from smddp.sagemaker.private_names import DEFAULT_STORE
from smddp.text import named_ranks

T = TypeVar("T")

# An error of one type on all failing ranks keeps its type, so that scripts can distinguish the causes.
_KEPT = (FileNotFoundError, FileExistsError, TypeError, ValueError, KeyError, ImportError, NotImplementedError)


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read.

    Attributes:
        failures: what went wrong, by global rank.
    """

    def __init__(self, message: str, failures: dict[int, str] | None = None) -> None:
        super().__init__(message)
        self.failures = failures or {}


@dataclass(frozen=True)
class Failure:
    """A serializable exception of one rank."""

    kind: type[Exception]
    text: str

    @staticmethod
    def of(error: BaseException) -> Failure:
        kind = next((kept for kept in _KEPT if isinstance(error, kept)), CheckpointError)
        text = str(error) if isinstance(error, (*_KEPT, CheckpointError)) else f"{type(error).__name__}: {error}"
        return Failure(kind, text)


def raise_failures(step: str, failures: dict[int, Failure]) -> None:
    """Raises one error for ``failures`` (by global rank), each text once with its ranks; no effect if empty."""
    if not failures:
        return
    by_text: dict[str, list[int]] = {}
    for rank, failure in sorted(failures.items()):
        by_text.setdefault(failure.text, []).append(rank)
    parts = [f"{named_ranks(ranks)}: {text}" for text, ranks in by_text.items()]
    message = f"{step} failed on {'; on '.join(parts)}"
    kinds = {failure.kind for failure in failures.values()}
    kind = kinds.pop() if len(kinds) == 1 else CheckpointError
    if kind is CheckpointError:
        raise CheckpointError(message, {rank: failure.text for rank, failure in failures.items()})
    raise kind(message)


def attempt(function: Callable[[], T]) -> T | Failure:
    """Returns the result of ``function``, or its error as a `Failure`."""
    try:
        return function()
    except Exception as error:
        return Failure.of(error)


class Participants:
    """Ranks of ``group`` (None: the default group; without process groups: this process only).

    Args:
        group: process group of the save or load.
        coordinator_rank: global rank that plans the save and writes the files that exist once. The default 0 selects
            the group's first rank if the group does not contain rank 0.

    Raises:
        TypeError, ValueError: the coordinator or this rank is not a member of the group.
    """

    def __init__(self, group: dist.ProcessGroup | None, coordinator_rank: int = 0) -> None:
        self.alone = not (dist.is_available() and dist.is_initialized())
        self.given = group is not None
        if not self.alone and group is None:
            group = dist.group.WORLD
        if not self.alone and dist.get_rank(group) < 0:
            raise ValueError(
                f"rank {dist.get_rank()} is not in the process group given; only the group's members may save or load "
                "with it"
            )
        self.group = None if self.alone else group
        self.ranks: list[int] = [0] if self.alone else dist.get_process_group_ranks(self.group)
        if type(coordinator_rank) is not int:
            raise TypeError(f"coordinator_rank must be an int, a global rank, got {coordinator_rank!r}")
        if coordinator_rank not in self.ranks:
            if coordinator_rank != 0:
                raise ValueError(
                    f"coordinator_rank={coordinator_rank} is not in the process group, which holds the global ranks "
                    f"{self.ranks}: give one of them, for example min({self.ranks})"
                )
            coordinator_rank = self.ranks[0]
        self.coordinator = coordinator_rank
        self.rank = 0 if self.alone else dist.get_rank()
        self.is_coordinator = self.rank == self.coordinator

    @property
    def size(self) -> int:
        return len(self.ranks)

    def leave_copies(self) -> bool:
        """Restricts a group of copies to this rank, if the caller passed FSDP's group at a shard degree of 1.

        Scripts save by the ranks of the first copy only, so the group's other ranks do not take part. Without a group
        all ranks save, because experts are spread over them.

        Returns:
            False for a rank of another copy, which has nothing to write.
        """
        from smddp.sagemaker.state_handler import state

        if not self.given or not state.is_initialized or state.native or state.shard_size != 1:
            return True
        # FSDP's group contains the copies, or only this rank.
        if self.group not in (state.replication_process_group, state.shard_process_group):
            return True
        if state.ranker.get_rep_rank(self.rank) != 0:
            return False
        self.ranks, self.coordinator, self.is_coordinator = [self.rank], self.rank, True
        return True

    def meet(self, where: str, seconds: float) -> None:
        """Waits until all ranks reach ``where``, a name used once.

        Raises:
            CheckpointError: the group is closed, or some ranks did not arrive within ``seconds``; the message names
                them.
        """
        if self.size == 1:
            return
        try:
            dist.get_process_group_ranks(self.group)
        except (KeyError, ValueError):
            raise CheckpointError("the process group of the save is destroyed") from None
        store = DEFAULT_STORE.get()()
        store.set(f"{where}/{self.rank}", "")
        try:
            store.wait([f"{where}/{rank}" for rank in self.ranks], timedelta(seconds=seconds))
        except RuntimeError as error:
            late = [rank for rank in self.ranks if not store.check([f"{where}/{rank}"])]
            raise CheckpointError(f"ranks {late} did not reach {where} within {seconds:g} s") from error

    def gather(self, value: T) -> list[T] | None:
        """Returns all ranks' values on the coordinator, in the group's order; None on other ranks."""
        if self.size == 1:
            return [value]
        # Places that torch fills.
        values: list[Any] | None = [None] * self.size if self.is_coordinator else None
        dist.gather_object(value, values, dst=self.coordinator, group=self.group)
        return values

    def scatter(self, values: Sequence[T] | None) -> T:
        """Sends one of the coordinator's ``values`` to each rank."""
        given: list[T] | None = None
        if self.is_coordinator:
            assert values is not None
            given = list(values)
            if self.size == 1:
                return given[0]
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, given, src=self.coordinator, group=self.group)
        return mine[0]

    def broadcast(self, value: T) -> T:
        """Returns the coordinator's ``value``."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=self.coordinator, group=self.group)
        return values[0]

    def exchange(self, step: str, function: Callable[[], T]) -> list[T]:
        """Calls ``function`` on every rank and returns all results in the group's order; raises any rank's error."""
        mine = attempt(function)
        if self.size == 1:
            results: list[Any] = [mine]
        else:
            results = [None] * self.size
            dist.all_gather_object(results, mine, group=self.group)
        raise_failures(step, {r: v for r, v in zip(self.ranks, results) if isinstance(v, Failure)})
        return results

    def least(self, numbers: Sequence[int]) -> list[int]:
        """Returns the elementwise minimum of the ranks' ``numbers``, by one all-reduce."""
        return least(numbers, None if self.size == 1 else self.group)


def least(numbers: Sequence[int], group: dist.ProcessGroup | None) -> list[int]:
    """The elementwise minimum over ``group``; no communication where there is none."""
    if group is None:
        return list(numbers)
    values = torch.tensor(numbers, dtype=torch.int64, device=device_of(group))
    dist.all_reduce(values, op=dist.ReduceOp.MIN, group=group)
    return values.tolist()


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Returns the device for small tensors sent over ``group``: the CPU, unless the group supports GPUs only."""
    try:
        group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
