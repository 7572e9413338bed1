"""A cut in a file: JSON, the stage of each module by its name."""

from __future__ import annotations

import json
from typing import Any

from torch import nn

from smddp import files


def write(file: str, where: dict[str, int]) -> None:
    """Writes a cut for later jobs, as a whole."""
    files.write_text(file, json.dumps(where, indent=1))


def read(file: str, model: nn.Module, stages: int) -> dict[str, int]:
    """Read a cut that `write` saved.

    Raises ValueError for an invalid file, another model or more stages.
    """
    try:
        where: Any = json.loads(files.read_text(file))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"'partition_file' {file} is not valid JSON: {error}") from None
    if not isinstance(where, dict) or not where or not all(type(stage) is int for stage in where.values()):
        raise ValueError(f"'partition_file' {file} must hold an object of modules' names and stages")
    names = dict(model.named_modules())
    unknown = sorted(where.keys() - names.keys())
    if unknown:
        raise ValueError(f"'partition_file' {file} has a module {unknown[0]!r}, and {type(model).__name__} has none")
    for name, stage in where.items():
        if not 0 <= stage < stages:
            raise ValueError(f"'partition_file' {file} has {name!r} on stage {stage}; expected 0 to {stages - 1}")
    return where
