"""Machines of the whole-stack tests: ranks with fake devices that can or cannot access each other's memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from ranks.pool import CASE_SECONDS, Pool


@dataclass(frozen=True)
class Machine:
    """ranks: number of processes. path: its name in the core. nodes: number of simulated nodes."""

    ranks: int
    path: str
    environment: dict[str, str] = field(default_factory=dict)
    nodes: int = 1

    def pool(self, library: str) -> Pool:
        def environment(rank: int) -> dict[str, str]:
            return {
                "SMDDP_CUDA_LIBRARY": library,
                "SMDDP_NODE": f"node{rank * self.nodes // self.ranks}",
                "SMDDP_TEST_PATH": self.path,
                "SMDDP_TEST_NODES": str(self.nodes),
                "FAKE_CUDA_DEVICES": "2",
                **self.environment,
            }

        return Pool(self.ranks, environment, "device.simulated:install")


MACHINES = {
    "reference": Machine(3, "by reference", {"FAKE_CUDA_SEED": "7"}),
    "host": Machine(
        2, "through pinned host memory", {"FAKE_CUDA_SEED": "8", "SMDDP_CUDA_PATH": "host", "SMDDP_TEST_SHORT": "0"}
    ),
    "nodes": Machine(4, "by reference", nodes=2),
}


def checked(case: Callable[[], None]) -> Callable[[], None]:
    """Returns the case, which also fails if memory could not be freed."""

    def run() -> None:
        from device import simulated

        simulated.failures.clear()
        case()
        assert not simulated.failures, simulated.failures

    return run


def on_machines(*names: str, seconds: float = CASE_SECONDS) -> Callable[[Callable[[], None]], Any]:
    """Decorator: runs the function on each rank of each machine."""

    def wrap(case: Callable[[], None]) -> Any:
        @pytest.mark.parametrize("machine", names)
        def test(machine: str, machines: Callable[[str], Pool]) -> None:
            machines(machine).run(case.__module__, case.__name__, seconds)

        test.__name__ = case.__name__
        test.__doc__ = case.__doc__
        test.case = checked(case)
        return test

    return wrap
