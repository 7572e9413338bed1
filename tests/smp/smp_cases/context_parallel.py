"""Context parallelism: attention over parts of sequences, cutting batches, and training against one process."""

import functools
import itertools

import smddp.sagemaker as tsm
import torch
import torch.distributed as dist
import torch.nn.functional as F
from smddp.sagemaker.context_parallel import attention, chunks, masks
from smddp.sagemaker.context_parallel.utils import get_batch_for_cp_rank, setup_transformer_engine_cp_groups
from smddp.sagemaker.tensor_parallel.transformer import TransformerLayer
from smp_cases.models import VOCABULARY, part_of, tiny
from smp_cases.parity import check_gradients, full, wrap1, wrap2
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)
from transformers import masking_utils

TOLERANCE = 1e-5
TOKENS = 16
SAMPLES = 4
WINDOW = 5
FUNCTIONS = {"p2p": attention.p2p, "all_gather": attention.all_gather}


# ---- one attention layer ----


class Layer(torch.nn.Module):
    """What an attention function is given as its module."""


def mask_functions() -> dict:
    window = masking_utils.sliding_window_causal_mask_function(WINDOW)
    both = getattr(masking_utils, "bidirectional_mask_function", None)
    return {"causal": masking_utils.causal_mask_function, "window": window, **({"both": both} if both else {})}


def whole_tokens(kind: str, group) -> masks.Tokens:
    """Two sequences: plain, with padding (one has no other tokens in its first chunk), or packed."""
    padding = segments = None
    if kind == "padded":
        padding = torch.ones(2, TOKENS, dtype=torch.bool)
        padding[0, :5] = False
        padding[1, 11:] = False
    if kind == "packed":
        segments = torch.tensor([[0] * 3 + [1] * 9 + [2] * 4, [0] * 16])
    return masks.Tokens(group, 2, TOKENS, padding, segments)


def visible(tokens: masks.Tokens, function) -> torch.Tensor:
    """(batch, 1, tokens, tokens), by the definition."""
    place = torch.arange(TOKENS)
    found = function(0, 0, place[:, None], place[None, :]).broadcast_to(2, 1, TOKENS, TOKENS)
    if tokens.padding is not None:
        found = found & tokens.padding[:, None, None, :]
    if tokens.segments is not None:
        found = found & (tokens.segments[:, None, :, None] == tokens.segments[:, None, None, :])
    return found


def by_definition(query, key, value, seen, softcap, sinks):
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(-1, -2) * 0.3
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    weights = torch.nan_to_num(torch.softmax(scores, -1))[..., :TOKENS]
    return weights @ value


def case_both_kinds_attend_as_one_process_whatever_the_mask():
    """Outputs and the gradients of queries, keys, values and sinks, in groups of two and of four."""
    groups = {2: dist.new_subgroups(2)[0], 4: dist.group.WORLD}
    options = itertools.product(("plain", "padded", "packed"), mask_functions().values(), ("", "softcap", "sinks"))
    for (size, group), comm, (kind, function, extra) in itertools.product(groups.items(), FUNCTIONS, options):
        generator = torch.Generator().manual_seed(3)
        shapes = ((2, 4, TOKENS, 6), (2, 2, TOKENS, 6), (2, 2, TOKENS, 5), (4,))
        wanted = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
        upstream = torch.randn(2, 4, TOKENS, 5, generator=generator)
        tokens, softcap = whole_tokens(kind, group), 2.0 if extra == "softcap" else None
        sinks = wanted[3] if extra == "sinks" else None
        out = by_definition(*wanted[:3], visible(tokens, function), softcap, sinks)
        # A query that sees nothing has output 0 here and 1/n of everything elsewhere: what it gives is nobody's.
        alive = visible(tokens, function).any(-1, keepdim=True)
        (out * upstream * alive).sum().backward()

        mine = [chunks.cut(t.detach(), group.rank(), size, 2).requires_grad_() for t in wanted[:3]]
        my_sinks = wanted[3].detach().clone().requires_grad_() if sinks is not None else None
        mask = masks.Mask(tokens, function, torch.device("cpu"))
        found, _ = FUNCTIONS[comm](Layer(), *mine, mask, scaling=0.3, softcap=softcap, s_aux=my_sinks)
        found = found.transpose(1, 2)
        part = functools.partial(chunks.cut, rank=group.rank(), size=size, dim=2)
        (found * part(upstream) * part(alive.broadcast_to(2, 1, TOKENS, 1))).sum().backward()
        where = (size, comm, kind, function, extra)
        pairs = [(found, part(out)), *((m.grad, part(w.grad)) for m, w in zip(mine, wanted))]
        if my_sinks is not None:
            dist.all_reduce(my_sinks.grad, group=group)
            pairs.append((my_sinks.grad, wanted[3].grad))
        for number, (got, right) in enumerate(pairs):
            alive_only = part(alive) if number == 0 else 1
            gap = ((got - right) * alive_only).abs().max()
            assert gap < TOLERANCE, (where, number, float(gap))
