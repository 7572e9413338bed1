"""The arguments of an estimator that decide how its ranks start."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from smddp import files
from smddp.estimator import machines
from smddp.smp import v2_keys as v2

#: Keys of SMP v1 for the number of stages.
V1_DEGREES = ("pipeline_parallel_degree", "partitions")


@dataclass(frozen=True)
class Given:
    """The arguments of an estimator that rules and commands depend on."""

    distribution: Any
    instance_type: str | None = None
    instance_count: int | None = 1
    framework: str = "pytorch"
    framework_version: str | None = None
    py_version: str | None = None
    image_uri: str | None = None
    entry_point: str | None = None
    instance_groups: Sequence[Any] | None = None
    #: Ranks of each host, where neither mpi nor the instance type decides.
    ranks: int | None = None

    def on(self, name: str) -> bool:
        """Returns whether a strategy is enabled; libraries by "smdistributed.dataparallel"."""
        part: Any = self.distribution
        for key in name.split("."):
            part = part.get(key, {})
        return bool(part.get("enabled", False))

    def of(self, name: str) -> dict[str, Any]:
        part: Any = self.distribution
        for key in name.split("."):
            part = part.get(key, {})
        return dict(part)

    @property
    def starts(self) -> list[str]:
        """Returns the strategies that start ranks: torchrun starts those of the data parallel library, if enabled."""
        found = [name for name in ("mpi", "torch_distributed", "pytorchddp") if self.on(name)]
        if self.on("smdistributed.dataparallel") and not self.on("torch_distributed"):
            found.append("smdistributed.dataparallel")
        return found

    @property
    def parameters(self) -> dict[str, Any]:
        """Returns modelparallel's parameters, read from a file where they are its path.

        Raises ValueError for a missing file, and for one without a JSON object.
        """
        if not self.on("smdistributed.modelparallel"):
            return {}
        found = self.of("smdistributed.modelparallel").get("parameters", {})
        if isinstance(found, str):
            if not os.path.exists(found):
                raise ValueError(f"file {found!r} does not exist: give a dict or the path of a JSON file")
            text = files.read_text(found)
            try:
                found = json.loads(text)
            except (json.JSONDecodeError, RecursionError) as error:
                raise ValueError(f"the file {found!r} is not JSON ({error})") from None
        if not isinstance(found, dict):
            raise ValueError(f"parameters is {found!r}: expected a dict or the path of a JSON file")
        return found

    @property
    def is_v1(self) -> bool:
        """Returns whether the modelparallel parameters are those of SMP v1.

        They are under mpi, unless keys of v2 are there, and with a number of stages.
        """
        parameters = self.parameters
        if any(name in parameters for name in V1_DEGREES):
            return True
        return self.on("mpi") and not any(name in v2.KEYS and name not in v2.V1_ONLY for name in parameters)

    @property
    def processes_per_host(self) -> int | None:
        """Returns the number of ranks of a host: mpi's, else the instance's GPUs, as the toolkit counts; else None."""
        if self.on("mpi"):
            asked = self.of("mpi").get("processes_per_host")
            if asked is not None:
                return int(asked)
        return self.ranks or machines.gpus(self.instance_type)
