"""Metadata exchange between the ranks of a context group before each forward pass.

Two small all-gathers per pass. The first exchanges sizes, so that a mismatch raises on every rank. The second exchanges
the positions, padding and first label of each chunk, which masks and loss need.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from smddp.sagemaker.autograd_collectives import gathered
from smddp.sagemaker.checksum import checksum
from smddp.sagemaker.context_parallel import chunks, record
from smddp.sagemaker.context_parallel.masks import Tokens

IGNORED = -100  # the label that has no loss, as in torch's cross_entropy

_HEADER = (
    "wrong",
    "batch",
    "tokens",
    "with position_ids",
    "with attention_mask",
    "with labels",
    "counted",
    "sum",
)
_SAME = ("batch", "tokens", "with position_ids", "with attention_mask", "with labels")


@dataclass(frozen=True)
class Inputs:
    """One forward pass of this rank.

    Attributes:
        tokens: the whole batch's.
        positions: int (batch, this rank's tokens): each token's place in its sequence.
        padding: int (batch, this rank's tokens): the model's attention_mask.
        targets: the label that each token is to predict, (batch, this rank's tokens); None without labels.
        counted: labels with a loss, over all ranks of the group.
    """

    tokens: Tokens
    positions: torch.Tensor
    padding: torch.Tensor
    targets: torch.Tensor | None
    counted: int


def exchange(given: Mapping[str, Any], group: dist.ProcessGroup) -> Inputs:
    """Builds the model's keyword arguments from this rank's part of a batch. Collective over ``group``.

    Raises on every rank:
        ValueError: parts that do not split into two chunks, differ in shape, or are equal on all ranks.
        NotImplementedError: a mask with more than two dimensions, or positions with more than one.
    """
    part, error = None, None
    try:
        part = _Part(given, group)
    except (ValueError, NotImplementedError, TypeError) as wrong:
        error = wrong
    header = part.header() if part else [1] + [0] * (len(_HEADER) - 1)
    device = _device(given)
    everyone = gathered(torch.tensor([header], device=device), group)
    if error is not None:
        raise error
    assert part is not None  # else there is an error
    _check(part, [dict(zip(_HEADER, row)) for row in everyone.tolist()])
    rest = part.rest()
    shared = gathered(rest[None], group) if len(rest) else rest.expand(group.size(), 0)
    return part.whole(shared, [row[_HEADER.index("counted")] for row in everyone.tolist()])


def _device(given: Mapping[str, Any]) -> torch.device:
    ids = given.get("input_ids")
    tensor = ids if ids is not None else given.get("inputs_embeds")
    return tensor.device if isinstance(tensor, torch.Tensor) else torch.device("cpu")


def _check(part: _Part, headers: list[dict[str, int]]) -> None:
    """Raises the same error on every rank if the parts belong to different batches."""
    wrong = [rank for rank, header in enumerate(headers) if header["wrong"]]
    if wrong:
        raise ValueError(f"context parallelism: rank {wrong[0]} of this context group cannot use its inputs, see there")
    for what in _SAME:
        values = [header[what] for header in headers]
        if len(set(values)) > 1:
            raise ValueError(
                f"context parallelism: the ranks of a context group must hold parts of the same batch, but {what} "
                f"differs: {values}, by rank in the group. Sample by tsm.state.dp_rank of tsm.state.dp_size, and cut "
                "each batch with get_batch_for_cp_rank"
            )
    if len({header["sum"] for header in headers}) == 1:
        _check_cut(part)


def _check_cut(part: _Part) -> None:
    """Raises ValueError on every rank if ranks hold equal tokens at equal positions without a split batch."""
    here = torch.tensor([int(record.was_cut(part.ids, part.size))], device=part.ids.device)
    if not bool(gathered(here, part.group).all()):
        ranks = ", ".join(map(str, dist.get_process_group_ranks(part.group)))
        raise ValueError(
            f"context parallelism: ranks {ranks} of a context group were given the same {part.length} tokens"
            f"{'' if part.positions is None else ' and position_ids'}, and get_batch_for_cp_rank did not cut them in "
            "these processes. Cut each batch with context_parallel.utils.get_batch_for_cp_rank; where a data loader's "
            "workers cut text that repeats itself, pass position_ids, cut in the same way"
        )


class _Part:
    """This rank's part of a batch."""

    def __init__(self, given: Mapping[str, Any], group: dist.ProcessGroup) -> None:
        ids = given.get("input_ids")
        ids = ids if ids is not None else given.get("inputs_embeds")
        if not isinstance(ids, torch.Tensor):
            raise ValueError("context parallelism: the model was given neither input_ids nor inputs_embeds")
        self.ids = ids
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self.batch, self.length = self.ids.shape[:2]
        if self.length % 2:
            raise ValueError(
                f"context parallelism: {self.length} tokens a rank ({tuple(self.ids.shape)}) "
                "do not split into two chunks: "
                f"pad sequences to a multiple of 2 x context_parallel_degree={2 * self.size} and cut them with "
                "context_parallel.utils.get_batch_for_cp_rank"
            )
        cache = given.get("past_key_values")
        if given.get("use_cache") or (cache is not None and cache.get_seq_length()):
            raise ValueError(
                "context parallelism: use_cache must be False, since each rank has a part of the keys only"
            )
        self.positions = self._rows(given, "position_ids")
        self.padding = self._rows(given, "attention_mask")
        self.shifted = self._rows(given, "shift_labels")
        self.labels = self._rows(given, "labels") if self.shifted is None else self.shifted

    def _rows(self, given: Mapping[str, Any], name: str) -> torch.Tensor | None:
        """Returns the argument ``name`` as (batch, tokens)."""
        value = given.get(name)
        if value is None:
            return None
        if not isinstance(value, torch.Tensor) or value.dim() != 2:
            found = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise NotImplementedError(
                f"context parallelism: {name} must be this rank's part of a tensor (batch, sequence), got {found}"
            )
        if value.shape[0] not in (1, self.batch) or value.shape[1] != self.length:
            raise ValueError(
                f"context parallelism: {name} is {tuple(value.shape)}, and this rank's part of the batch "
                f"({self.batch}, {self.length}): cut it with context_parallel.utils.get_batch_for_cp_rank, too"
            )
        return value.expand(self.batch, -1)

    def header(self) -> list[int]:
        """Integers in the order of `_HEADER`."""
        total = record.contents(self.ids)
        if self.positions is not None:
            # Equal tokens at other places are parts of a text that repeats itself.
            total = checksum(torch.stack([total, record.contents(self.positions)]))
        return [
            0,
            self.batch,
            self.length,
            int(self.positions is not None),
            int(self.padding is not None),
            int(self.labels is not None) + int(self.shifted is not None),
            0 if self.labels is None else int((self.labels != IGNORED).sum()),
            int(total),
        ]

    def rest(self) -> torch.Tensor:
        """Concatenates the values that the other ranks need in the second exchange."""
        found = [rows.flatten() for rows in (self.positions, self.padding) if rows is not None]
        if self.labels is not None and self.shifted is None:
            found.append(self.labels[:, :: self.length // 2].T.flatten())  # of each chunk the first
        return torch.cat([part.long() for part in found]) if found else self.ids.new_empty(0, dtype=torch.long)

    def whole(self, shared: torch.Tensor, counts: list[int]) -> Inputs:
        """From every rank's `rest`."""
        here = self.ids.device
        taken = 0

        def take(columns: int, shape: tuple[int, ...]) -> list[torch.Tensor]:
            nonlocal taken
            taken += columns
            return [row.view(shape) for row in shared[:, taken - columns : taken]]

        rows = (self.batch, self.length)
        segments = padding = None
        if self.positions is not None:
            segments = _segments(chunks.join(take(self.batch * self.length, rows)))
        if self.padding is not None:
            padding = chunks.join(take(self.batch * self.length, rows)).bool()
            # Like transformers, derive the sequences from the mask and ignore positions.
            padding, segments = (None if bool(padding.all()) else padding), None
        targets, counted = self.shifted, sum(counts)
        if self.labels is not None and self.shifted is None:
            firsts = take(2 * self.batch, (2, self.batch))
            targets = self._targets(firsts)
            # Nothing predicts the first token of a sequence.
            counted -= int((firsts[0][0] != IGNORED).sum())
        length = self.length * self.size
        positions = self.positions
        if positions is None:
            positions = chunks.indices(self.rank, self.size, length, here).expand(self.batch, -1)
        local = self.padding if self.padding is not None else torch.ones(rows, dtype=torch.long, device=here)
        tokens = Tokens(self.group, self.batch, length, padding, segments)
        return Inputs(tokens, positions, local, targets, counted)

    def _targets(self, firsts: list[torch.Tensor]) -> torch.Tensor:
        """The labels, each chunk moved by one; its last is the first of the next chunk. ``firsts[r][i]``: (batch,) of
        rank r's chunk i."""
        assert self.labels is not None
        of_chunks = [early for early, _ in firsts] + [late for _, late in reversed(firsts)]
        of_chunks.append(torch.full_like(of_chunks[0], IGNORED))
        moved = []
        for half, chunk in zip(self.labels.chunk(2, 1), chunks.held_by(self.rank, self.size)):
            moved += [half[:, 1:], of_chunks[chunk + 1].to(half.dtype).unsqueeze(1)]
        return torch.cat(moved, 1)


def _segments(positions: torch.Tensor) -> torch.Tensor | None:
    """Returns each token's packed sequence, from gaps in the positions; None if all rows have one sequence.

    The same as transformers finds in ``position_ids`` given without a mask.
    """
    begins = torch.diff(positions, dim=1) != 1
    if not bool(begins.any()):
        return None
    return torch.nn.functional.pad(begins.cumsum(1), (1, 0))
