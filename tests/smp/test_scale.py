"""Messages of a job with 1,024 ranks in torch's fake process group: one process, exact counts of rank 0."""

from __future__ import annotations

import json
import textwrap

import pytest
from ranks import forked

RANKS = 1024
SHARD = 8

COUNT = textwrap.dedent(
    """
    import json
    import torch, torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils._python_dispatch import TorchDispatchMode
    from transformers import LlamaConfig, LlamaForCausalLM
    import torch.sagemaker as tsm

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    tsm.init(CONFIG)
    sizes = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4,
                        num_attention_heads=4, num_key_value_heads=2)
    model = LlamaForCausalLM(sizes)
    whole = sum(p.numel() for p in model.parameters()) * 4
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)

    class Count(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.found = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            name = function.__name__ if hasattr(function, "__name__") else str(function)
            if str(function).startswith("c10d."):
                tensors = [t for a in args for t in (a if isinstance(a, list) else [a]) if isinstance(t, torch.Tensor)]
                group = next(dist.ProcessGroup.unbox(a) for a in args if isinstance(a, torch.ScriptObject)
                             and "ProcessGroup" in str(a._type()))
                members = dist.get_process_group_ranks(group)
                self.found.append((str(function), max(t.numel() * t.element_size() for t in tensors), members))
            return function(*args, **(kwargs or {}))

    ids = torch.randint(0, 256, (1, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(input_ids=ids, labels=ids).loss.backward()
    with Count() as count:
        model(input_ids=ids, labels=ids).loss.backward()
    print(json.dumps({"whole": whole, "calls": count.found}))
    """
)


def calls(config: dict) -> tuple[int, list[tuple[str, int, list[int]]]]:
    """The model's bytes, and (operation, bytes of the larger buffer, members) of each collective in one step."""
    pytest.importorskip("transformers", reason="the models are transformers'")
    done = forked.run(f"RANKS, CONFIG = {RANKS}, {config}\n{COUNT}")
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    return found["whole"], found["calls"]


def between_nodes(found: list, node: int = SHARD) -> dict[str, float]:
    """Bytes that rank 0 sends to other nodes in a step, by kind of collective; a node is ``node`` ranks.

    A ring's or any other minimal schedule's traffic: a rank of N sends (N - 1)/N of the whole buffer in an
    all-gather or reduce-scatter, twice that in an all-reduce.
    """
    total: dict[str, float] = {}
    for name, size, members in found:
        if len({rank // node for rank in members}) == 1:
            continue
        kind = "all_reduce" if "allreduce" in name else "all_gather" if "allgather" in name else "reduce_scatter"
        sent = size * (len(members) - 1) / len(members) * (2 if kind == "all_reduce" else 1)
        total[kind] = total.get(kind, 0) + sent
    return total


@pytest.mark.timeout(300)
def test_only_the_all_reduce_of_one_shard_crosses_nodes():
    whole, found = calls({"hybrid_shard_degree": SHARD})
    sent = between_nodes(found)
    copies = RANKS // SHARD
    formula = 2 * (copies - 1) / copies * whole / SHARD
    assert set(sent) == {"all_reduce"}
    # A little more than the formula where a parameter does not divide by the degree.
    assert formula <= sent["all_reduce"] < formula * 1.02

    _, found = calls({})
    plain = between_nodes(found)
    assert set(plain) == {"all_gather", "reduce_scatter"}
    assert sum(plain.values()) / sum(sent.values()) > 10
