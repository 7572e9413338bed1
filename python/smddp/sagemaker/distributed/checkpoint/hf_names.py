"""Mapping of a transformed model's tensors to Hugging Face's tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from smddp.sagemaker.distributed.checkpoint.safetensors_files import Entry
from smddp.sagemaker.tensor_parallel.shards import Relayout
from smddp.sagemaker.tensor_parallel.state_dict import records


@dataclass(frozen=True)
class Target:
    """One tensor in Hugging Face's form.

    Attributes:
        name: its name there.
        sources: the names in the model of what makes it up.
        plain: it is the model's tensor as it is.
        join: from whole tensors of the model to this one.
        split: from this one, or from all that are made of the same sources, in order, to the model's.
    """

    name: str
    sources: tuple[str, ...]
    join: Callable[[list[torch.Tensor]], torch.Tensor]
    split: Callable[..., Sequence[torch.Tensor]]
    plain: bool = False

    def entry(self, state: dict[str, Any]) -> Entry:
        """Returns its dtype and shape, from the model's ``state``."""
        parts = [torch.empty(state[n].size(), dtype=state[n].dtype, device="meta") for n in self.sources]
        joined = self.join(parts)
        return Entry(self.name, joined.dtype, tuple(joined.shape))


def _join(record: Relayout, index: int) -> Callable[[list[torch.Tensor]], torch.Tensor]:
    return lambda parts: record.join_all(*parts)[index]


def targets(model: nn.Module, state: dict[str, Any]) -> list[Target]:
    """Returns the Hugging Face targets of the tensors in ``state`` (by unwrapped names), in the model's order."""
    found: list[Target] = []
    of: dict[str, list[Target]] = {}
    for prefix, record in records(model):
        sources = tuple(prefix + name for name in record.stored)
        if all(source in state for source in sources):
            made = [
                Target(prefix + name, sources, _join(record, index), record.split_all)
                for index, name in enumerate(record.sources)
            ]
            of |= dict.fromkeys(sources, made)
    for name in state:
        made = of.get(name) or [Target(name, (name,), lambda parts: parts[0], lambda whole: [whole], True)]
        if made[0].sources[0] == name:
            found += made
    return found
