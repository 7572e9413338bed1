"""Conversion of state dicts between Hugging Face's and a transformed model's names and layouts.

Only what `transform` stored otherwise is touched; for most families nothing was, and both functions are the
identity. Values may be tensors of any kind that can be reshaped: parameters, gradients, optimizer moments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from smddp.sagemaker.fsdp.fsdp1_views import REFERENCES
from smddp.sagemaker.names import plain_name
from smddp.sagemaker.tensor_parallel.shards import RELAID, Relayout


def records(model: nn.Module) -> Iterator[tuple[str, Relayout]]:
    """(prefix of the names, what was stored otherwise) of each module whose parameters `transform` has re-laid out."""
    for name, module in model.named_modules():
        prefix = plain_name(f"{name}.")
        for record in vars(module).get(RELAID, {}).values():
            yield prefix, record


def tied_names(model: nn.Module) -> Iterator[tuple[str, str]]:
    """(name, name of the parameter that it refers to) of entries that `fsdp1_views.refer_to_first` removed."""
    names = {id(module): plain_name(f"{name}.") for name, module in model.named_modules()}
    for name, module in model.named_modules():
        for attribute, (owner, there) in vars(module).get(REFERENCES, {}).items():
            yield plain_name(f"{name}.") + attribute, names[id(owner)] + there


def translate_state_dict_to_hf(model: nn.Module, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Converts the ``state_dict`` of the transformed ``model`` (full tensors) to Hugging Face's names and layouts.

    Keeps unknown names. Raises ValueError if only some parts of a combined tensor are present.
    """
    result = dict(state_dict)
    for prefix, record in records(model):
        ours = [prefix + name for name in record.stored]
        present = [name for name in ours if name in result]
        if not present:
            continue
        if len(present) < len(ours):
            raise ValueError(f"{prefix}{record.source} is made of {', '.join(ours)}; only {present[0]} is there")
        theirs = record.join_all(*(result.pop(name) for name in ours))
        if len(theirs) > 1:  # copies, as what is saved must not carry the others' memory
            theirs = tuple(tensor.clone() for tensor in theirs)
        result.update(zip((prefix + name for name in record.sources), theirs))
    for name, owner in tied_names(model):
        if owner in result:
            result[name] = result[owner]
    return result


def translate_hf_state_dict(model: nn.Module, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Converts a Hugging Face ``state_dict`` (full tensors) to the transformed ``model``'s names and layouts."""
    result = dict(state_dict)
    for prefix, record in records(model):
        theirs = [prefix + name for name in record.sources]
        if all(name in result for name in theirs):
            ours = record.split_all(*(result.pop(name) for name in theirs))
            result.update(zip((prefix + name for name in record.stored), ours))
    for name, _ in tied_names(model):
        result.pop(name, None)
    return result
