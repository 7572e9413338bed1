"""A cut in a file: JSON, the stage of each module by its name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from torch import nn


def write(file: str, where: dict[str, int]) -> None:
    """Keep a cut for jobs to come. Whole or not at all: who reads never sees half of it."""
    path = Path(file)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(where, indent=1), encoding="utf-8")
    os.replace(unfinished, path)


def read(file: str, model: nn.Module, stages: int) -> dict[str, int]:
    """The cut that `write` kept.

    Raises ValueError for a file that is not such a cut, or one of another model or of more stages.
    """
    try:
        where: Any = json.loads(Path(file).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"'partition_file' {file} is no JSON: {error}") from None
    if not isinstance(where, dict) or not where or not all(type(stage) is int for stage in where.values()):
        raise ValueError(f"'partition_file' {file} must hold an object of modules' names and stages")
    names = dict(model.named_modules())
    unknown = sorted(where.keys() - names.keys())
    if unknown:
        raise ValueError(f"'partition_file' {file} has a module {unknown[0]!r}, and {type(model).__name__} has none")
    for name, stage in where.items():
        if not 0 <= stage < stages:
            raise ValueError(f"'partition_file' {file} has {name!r} on stage {stage}; there are 0 to {stages - 1}")
    return where
