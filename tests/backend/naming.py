"""Checks that an error names both of two mismatched calls in the core's words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

from backend.calls import Call

_OPS = {"PRODUCT": "prod"}


def _matches(call: Call, name: str, details: str) -> bool:
    """Returns whether the words describe the call: its name, elements, type, operation and root."""
    # A coalesced call is one call for each tensor.
    if name != str(call.key[0]).removesuffix("_coalesced"):
        return False
    return all(word in details.split(", ") for word in _details(call))


def _details(call: Call) -> list[str]:
    name, *rest = call.key
    words = []
    for part in rest:
        if isinstance(part, str):
            op = part.partition(":")[0]
            words.append(part.replace("=", " ") if "root=" in part else _OPS.get(op, op.lower()))
    dtype = next((part for part in rest if isinstance(part, torch.dtype)), None)
    count = _count(rest[0]) if rest and name in _COUNTED else None
    if count is not None:
        words.append(f"{count} elements of {str(dtype).removeprefix('torch.')}")
    return words


# Collectives whose description has the number of elements. In an all_to_all it may differ between ranks.
_COUNTED = ("all_reduce", "reduce", "broadcast", "gather", "scatter", "all_gather", "reduce_scatter")


def _count(sizes: Any) -> int:
    """Returns the elements of a block, or of all blocks if they differ."""
    if isinstance(sizes, int):
        return sizes
    return sizes[0] if len(set(sizes)) == 1 else sum(sizes)


def names_both(text: str, usual: Sequence[Call], odd: Sequence[Call]) -> bool:
    """Returns whether `text` names the calls of both sequences at a position where they differ."""
    return any(_named(text, one, other) for one, other in zip(usual, odd) if one.key != other.key)


def _named(text: str, usual: Call, odd: Call) -> bool:
    described = re.findall(r"rank \d+ (?:\(host [^)]*\) )?calls (\w+)\(([^)]*)\)", text)
    if len(described) == 2 and described[0] != described[1]:
        return any(_matches(usual, *one) and _matches(odd, *other) for one, other in (described, described[::-1]))
    sizes = re.search(r"expects (\d+) elements .* from rank \d+ .*, which sends (\d+) ", text)
    if sizes and usual.key[0] == odd.key[0] and f"{usual.key[0]} #" in text:
        one, other = map(_sizes, (usual, odd))
        expected, sent = map(int, sizes.groups())
        either = (expected in one and sent in other) or (expected in other and sent in one)
        return expected != sent and either
    return False


def _sizes(call: Call) -> set[int]:
    """Returns the possible numbers of elements that a rank sends to another in this call."""
    sizes = call.key[1]
    return {sizes} if isinstance(sizes, int) else set(sizes)
