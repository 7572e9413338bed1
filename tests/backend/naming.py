"""Whether an error names both of two calls that differ, as the core words them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

from backend.calls import Call

_OPS = {"PRODUCT": "prod"}


def _matches(call: Call, name: str, details: str) -> bool:
    """Whether these words are this call: its name, and all of elements, type, operation and root that it has."""
    # The coalesced form is a call of each tensor's own.
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


# Those that say how many elements. all_to_all's ranks may give different numbers, and a coalesced call has several.
_COUNTED = ("all_reduce", "reduce", "broadcast", "gather", "scatter", "all_gather", "reduce_scatter")


def _count(sizes: Any) -> int:
    """Of a block, or of all blocks where they differ."""
    if isinstance(sizes, int):
        return sizes
    return sizes[0] if len(set(sizes)) == 1 else sum(sizes)


def names_both(text: str, usual: Sequence[Call], odd: Sequence[Call]) -> bool:
    """Whether `text` names a call of each sequence, at one place where they differ, and tells them apart."""
    return any(_named(text, one, other) for one, other in zip(usual, odd) if one.key != other.key)


def _named(text: str, usual: Call, odd: Call) -> bool:
    said = re.findall(r"rank \d+ (?:\(host [^)]*\) )?calls (\w+)\(([^)]*)\)", text)
    if len(said) == 2 and said[0] != said[1]:
        return any(_matches(usual, *one) and _matches(odd, *other) for one, other in (said, said[::-1]))
    sizes = re.search(r"expects (\d+) elements .* from rank \d+ .*, which sends (\d+) ", text)
    if sizes and usual.key[0] == odd.key[0] and f"{usual.key[0]} #" in text:
        one, other = map(_sizes, (usual, odd))
        expected, sent = map(int, sizes.groups())
        either = (expected in one and sent in other) or (expected in other and sent in one)
        return expected != sent and either
    return False


def _sizes(call: Call) -> set[int]:
    """How many elements one rank gives another in this call."""
    sizes = call.key[1]
    return {sizes} if isinstance(sizes, int) else set(sizes)
