"""Translation of state dicts between transformers' names and the original's: here both are the same."""

from __future__ import annotations

from typing import Any


def same(state_dict: dict[str, Any], *_more: Any, **_options: Any) -> dict[str, Any]:
    """``state_dict`` as it is: a pipeline's modules keep their names and shapes."""
    return state_dict
