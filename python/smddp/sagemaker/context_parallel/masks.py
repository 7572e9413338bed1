"""Attention masks of this rank's queries over the keys of the whole sequence.

transformers describes a mask by a function of the query and key positions. A rank evaluates it at the global positions
of its chunks, so masks are exact: causal, sliding window, chunked attention, bidirectional. Padding and packed
sequences cover the whole batch; `inputs.py` exchanges them between the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from smddp.sagemaker.context_parallel import chunks

# A part of the local queries, a part of the keys at hand, and what is visible between them; None: all.
Piece = tuple[slice, slice, "torch.Tensor | None"]

# transformers' mask functions that use positions only. Other mask functions index tensors by position, and a rank has
# only its part of those tensors.
_BY_PLACE = {
    "causal_mask_function",
    "bidirectional_mask_function",
    "sliding_window_overlay.<locals>.inner_mask",
    "sliding_window_bidirectional_overlay.<locals>.inner_mask",
}
_CHUNKED = {"chunked_overlay.<locals>.inner_mask", "_legacy_chunked_overlay.<locals>.inner_mask"}
_COMBINED = {"and_masks.<locals>.and_mask", "or_masks.<locals>.or_mask"}


@dataclass(frozen=True)
class Tokens:
    """Token metadata of one forward pass, exchanged within the context group.

    Attributes:
        group: the context group.
        batch: sequences.
        length: tokens of each sequence, summed over the ranks.
        padding: bool (batch, length), False for padding; None without padding.
        segments: int (batch, length), index of each token's packed sequence within its row; None without packing.
    """

    group: dist.ProcessGroup
    batch: int
    length: int
    padding: torch.Tensor | None
    segments: torch.Tensor | None

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def size(self) -> int:
        return self.group.size()


class Mask:
    """Mask of one kind of attention layers, passed in place of transformers' mask tensor and shared by the layers.

    Attributes:
        attended: the attention layers that have used it.
    """

    def __init__(self, tokens: Tokens, function: Callable[..., Any], device: torch.device) -> None:
        self.tokens = tokens
        self.attended: set[nn.Module] = set()
        self._function = function
        self._device = device
        self._causal = _names(function) == ["causal_mask_function"]
        self._plain = self._causal and tokens.padding is None and tokens.segments is None
        self._pieces: dict[int, list[Piece]] = {}
        self._spans: list[Piece] | None = None

    def pieces(self, source: int) -> list[Piece]:
        """Returns the blocks of scores between this rank's queries and rank ``source``'s keys to compute."""
        if source not in self._pieces:
            self._pieces[source] = self._found(source)
        return self._pieces[source]

    def spans(self) -> list[Piece]:
        """Returns the blocks against the keys of all ranks, in sequence order."""
        if self._spans is None:
            tokens = self.tokens
            everywhere = torch.arange(tokens.length, device=self._device)
            count = tokens.length // (2 * tokens.size)
            self._spans = []
            for half, chunk in enumerate(chunks.held_by(tokens.rank, tokens.size)):
                # Later keys than the last of the queries are not even looked at.
                keys = everywhere[: (chunk + 1) * count] if self._causal else everywhere
                self._spans += self._half(half, everywhere[chunk * count : (chunk + 1) * count], keys, count)
        return self._spans

    def _found(self, source: int) -> list[Piece]:
        tokens = self.tokens
        if self._plain and source != tokens.rank:
            count = tokens.length // (2 * tokens.size)
            # An earlier rank's second chunk follows both local chunks; the local second chunk follows a later rank's.
            first, last = (0, 1) if source < tokens.rank else (1, 2)
            return [(slice(first * count, 2 * count), slice(0, last * count), None)]
        queries = chunks.indices(tokens.rank, tokens.size, tokens.length, self._device)
        keys = chunks.indices(source, tokens.size, tokens.length, self._device)
        count = len(queries) // 2
        return [piece for half in (0, 1) for piece in self._half(half, queries.chunk(2)[half], keys, count)]

    def _half(self, half: int, queries: torch.Tensor, keys: torch.Tensor, count: int) -> Iterator[Piece]:
        """Returns the block of one query chunk against ``keys``, without fully masked key chunks."""
        visible = self._visible(queries, keys)
        of_chunks = visible.unflatten(-1, (-1, count))
        seen = of_chunks.any(dim=-1).flatten(0, -2).any(dim=0).nonzero().flatten().tolist()
        if not seen:
            return
        columns = slice(seen[0] * count, (seen[-1] + 1) * count)
        part = visible[..., columns]
        yield slice(half * count, (half + 1) * count), columns, None if bool(part.all()) else part.contiguous()

    def _visible(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """bool (batch or 1, 1, queries, keys)."""
        tokens = self.tokens
        rows = torch.arange(tokens.batch, device=self._device)[:, None, None, None]
        none = torch.zeros((), dtype=torch.long, device=self._device)
        visible = self._function(rows, none, queries[None, None, :, None], keys[None, None, None, :])
        if tokens.segments is not None:
            of_queries, of_keys = tokens.segments[:, queries], tokens.segments[:, keys]
            visible = visible & (of_queries[:, None, :, None] == of_keys[:, None, None, :])
        if tokens.padding is not None:
            visible = visible & tokens.padding[:, keys][:, None, None, :]
        return visible.broadcast_to(visible.shape[0], 1, len(queries), len(keys))


def _names(function: Callable[..., Any]) -> list[str]:
    """Returns the qualified names of the mask functions that transformers has combined into ``function``."""
    name = getattr(function, "__qualname__", repr(function))
    if name not in _COMBINED:
        return [name]
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
    return [name for part in cells["mask_functions"].cell_contents for name in _names(part)]


@dataclass(eq=False)
class Pass:
    """One forward pass of a model.

    Attributes:
        owner: the object that began it.
        tokens: of all ranks.
        made: its masks.
    """

    owner: object
    tokens: Tokens
    made: list[Mask] = field(default_factory=list)


# The forward passes that this thread or task is in, the innermost last.
_passes: ContextVar[tuple[Pass, ...]] = ContextVar("context_parallel_passes", default=())


def enter(present: Pass) -> None:
    """Use ``present`` for masks created until `leave`."""
    _passes.set((*_passes.get(), present))


def current(owner: object) -> Pass | None:
    """Returns the innermost pass of ``owner``; None outside a pass."""
    return next((each for each in reversed(_passes.get()) if each.owner is owner), None)


def leave(owner: object) -> Pass | None:
    """Ends the innermost pass of ``owner``, and passes inside it that raised; returns it."""
    present = current(owner)
    if present is not None:
        _passes.set(_passes.get()[: _passes.get().index(present)])
    return present


def make(*_: Any, mask_function: Callable[..., Any], attention_mask: torch.Tensor | None = None, **others: Any) -> Mask:
    """Mask factory that transformers' mask interface calls for the implementations of `attention.py`.

    Raises:
        RuntimeError: outside the forward pass of a model returned by `tsm.transform`.
        NotImplementedError: a mask that is not a function of positions.
    """
    present = _passes.get()[-1] if _passes.get() else None
    if present is None:
        raise RuntimeError(
            "context parallelism: a mask is made outside the forward pass of the model that tsm.transform() was given; "
            "call that model, not a part of it"
        )
    tokens = present.tokens
    for name in _names(mask_function):
        if name in _CHUNKED and tokens.padding is None and tokens.segments is None:
            continue
        if name in _CHUNKED:
            raise NotImplementedError(
                "context parallelism: attention in chunks with padding or packed sequences is not supported; set "
                "context_parallel_degree=1, or give batches without either"
            )
        if name not in _BY_PLACE:
            raise NotImplementedError(
                f"context parallelism: the mask {name} uses more than positions in the sequence, and this rank has "
                "only its part of that; set context_parallel_degree=1 for this model"
            )
    device = attention_mask.device if attention_mask is not None else torch.device(others.get("device", "cpu"))
    mask = Mask(tokens, mask_function, device)
    present.made.append(mask)
    return mask
