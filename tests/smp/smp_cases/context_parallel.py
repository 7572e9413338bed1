"""Context parallelism: attention over parts of sequences, cutting batches, and training against one process."""

import functools
import itertools

import smddp.sagemaker as tsm
import torch
import torch.distributed as dist
from smddp.sagemaker.context_parallel import attention, chunks, masks
from smddp.sagemaker.context_parallel.utils import get_batch_for_cp_rank
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
    """Module argument of an attention function."""


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
        # Exclude fully masked queries: their output is 0 here and the mean of all values in the reference.
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


# ---- whole models ----


def model_of(family: str) -> torch.nn.Module:
    """A tiny model; "window" is Mistral with a sliding window."""
    return tiny("mistral", sliding_window=WINDOW) if family == "window" else tiny(family)


def batch(kind: str, step: int) -> dict:
    """Arguments of a model for whole sequences; each sample has as many labels, so that all weigh the same."""
    generator = torch.Generator().manual_seed(2000 + step)
    ids = torch.randint(3, VOCABULARY, (SAMPLES, TOKENS), generator=generator)
    given = {"input_ids": ids, "labels": ids.clone()}
    if kind == "padded":  # every other on the left, where transformers' own places start with the padding
        mask = torch.ones_like(ids)
        mask[0::2, :3] = 0
        mask[1::2, -3:] = 0
        given["attention_mask"] = mask
        given["labels"] = ids.masked_fill(mask == 0, -100)
        given["labels"][0::2, 3] = -100  # nothing real predicts it
    if kind == "packed":
        lengths = ([3, 9, 4], [8, 5, 3], [1, 14, 1], [6, 6, 4])
        given["position_ids"] = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    return given


def part_of_batch(given: dict) -> dict:
    """This rank's part of the samples, and of their tokens."""
    mine = {key: part_of(value, tsm.state.dp_rank, tsm.state.dp_size) for key, value in given.items()}
    return get_batch_for_cp_rank(mine)


@functools.cache
def plain(family: str, kind: str) -> tuple[list[float], dict, dict]:
    """(losses of two steps, the parameters before the first, its gradients) of one process on whole batches."""
    model = model_of(family)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    losses = []
    for step in range(2):
        loss = model(**batch(kind, step), use_cache=False).loss
        losses.append(float(loss.detach()))
        if step == 0:
            loss.backward()
            gradients = {name: p.grad.clone() for name, p in model.named_parameters(remove_duplicate=False)}
            torch.optim.SGD(model.parameters(), lr=1.0).step()
    return losses, before, gradients


def configuration(row: dict) -> dict:
    return {
        "hybrid_shard_degree": row["shard"],
        "tensor_parallel_degree": row["tensor"],
        "context_parallel_degree": row["context"],
        "sm_activation_offloading": row["offload"],
    }


_IMPLEMENTATIONS = {"reentrant": CheckpointImpl.REENTRANT, "non_reentrant": CheckpointImpl.NO_REENTRANT}


def train(row: dict) -> None:
    """In an initialized world of the row's degrees."""
    losses, before, gradients = plain(row["family"], row["mask"])
    model = tsm.transform(model_of(row["family"]), cp_comm_type=row["comm"])
    model = wrap1(model, False) if row["fsdp"] == 1 else wrap2(model, False)
    if row["checkpointing"] != "none":
        wrapper = functools.partial(checkpoint_wrapper, checkpoint_impl=_IMPLEMENTATIONS[row["checkpointing"]])
        apply_activation_checkpointing(
            model, checkpoint_wrapper_fn=wrapper, check_fn=lambda module: isinstance(module, TransformerLayer)
        )
    outer = offload_wrapper(model) if row["offload"] else model
    optimizer = torch.optim.SGD(outer.parameters(), lr=1.0)
    for step in range(2):
        loss = outer(**part_of_batch(batch(row["mask"], step)), use_cache=False).loss
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        gap = abs(float(mean) / dist.get_world_size() - losses[step])
        assert gap < TOLERANCE, (step, gap, losses)
        if tsm.state.dp_size == 1:
            # Each rank's loss covers all tokens, not only local tokens.
            assert abs(float(loss.detach()) - losses[step]) < TOLERANCE, (step, float(loss.detach()), losses)
        if step == 0:
            loss.backward()
            optimizer.step()
            check_gradients(before, full(model), gradients)


def train_as_the_plain_model(**row) -> None:
    tsm.init(configuration(row))
    try:
        train(row)
    finally:
        tsm.state.reset()


def train_all(rows: list[dict]) -> None:
    """Trains every combination in ``rows`` and names the first failure. Combinations with equal groups share them."""
    for config, alike in itertools.groupby(
        sorted(rows, key=lambda row: list(configuration(row).values())), configuration
    ):
        tsm.init(config)
        try:
            for row in alike:
                try:
                    train(row)
                except Exception as error:
                    raise AssertionError(f"in the combination {row}") from error
        finally:
            tsm.state.reset()
