"""Inter-node bytes of expert and context groups on two nodes: smddp's counters against the formulas."""

import logging

import smddp
import smddp.sagemaker as tsm
import torch
import torch.distributed as dist
from smddp.sagemaker.expert_parallel.dispatch import AllToAll, NodeByNode, dispatcher
from smddp.sagemaker.expert_parallel.group import this_process
from smp_cases import context_parallel, expert_parity
from smp_cases.context_contract import HEAD, HEADS, LAYERS, initialized
from smp_cases.models import tiny

EXPERTS, K, TOKENS, HIDDEN = 2, 3, 24, 32  # on each rank; chosen by a token; of a rank


def _moved(collective: str) -> dict:
    """Returns the total bytes of a collective, by (nodes, size of the group)."""
    total: dict = {}
    for entry in smddp.traffic():
        if entry["collective"].startswith(collective):
            key = entry["nodes"], entry["size"]
            total[key] = total.get(key, 0) + entry["bytes"]
    return total


def _since(before: dict, collective: str) -> dict:
    found = {key: size - before.get(key, 0) for key, size in _moved(collective).items()}
    return {key: size for key, size in found.items() if size}


def _choices(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, the experts that they choose and their weights, of one rank."""
    generator = torch.Generator().manual_seed(rank)
    rows = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.double)
    chosen = torch.stack([torch.randperm(4 * EXPERTS, generator=generator)[:K] for _ in range(TOKENS)])
    return rows, chosen, torch.rand(TOKENS, K, generator=generator, dtype=torch.double)


def _to(homes: torch.Tensor, but: int | None = None) -> int:
    """Pairs of tokens and the places that any of their experts are at, of (tokens, k) places; -1 is none."""
    return sum(len(set(row) - {-1, but}) for row in homes.tolist())


def _experts(rows: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, first: int) -> torch.Tensor:
    """A stand-in for experts: each multiplies by its number and one."""
    factor = torch.where(experts >= 0, experts + first + 1, 0)
    return rows * (weights * factor).sum(1, keepdim=True)


def tokens_cross_once_for_each_node_that_needs_them():
    """docs/guides/smp/expert-parallelism.md: the bytes each way, and fewer of them than without nodes."""
    with initialized(expert=4):
        group, rank, b = this_process(), dist.get_rank(), 8
        node, first = rank // 2, rank * EXPERTS
        made = dispatcher(group, EXPERTS, True, None)
        assert isinstance(made, NodeByNode)
        every = [_choices(other) for other in range(4)]
        rows, chosen, weights = every[rank]
        results = {}
        for way in (made, AllToAll(group, EXPERTS)):
            inputs = [tensor.clone().requires_grad_() for tensor in (rows, weights)]
            before = _moved("all_to_all")
            arrived = way.send(inputs[0], chosen, inputs[1])
            back = arrived.back(_experts(arrived.rows, arrived.weights, arrived.experts, first))
            forward = _since(before, "all_to_all")
            before = _moved("all_to_all")
            gradients = torch.autograd.grad(back.square().sum(), inputs)
            results[type(way)] = (back.detach(), *gradients), forward, _since(before, "all_to_all")

        # Each row to this rank's peer on the other node, as often as its node needs it: once.
        leave = _to(chosen // (2 * EXPERTS), node)
        peer = (rank + 2) % 4
        come = _to(every[peer][1] // (2 * EXPERTS), 1 - node)
        _, forward, backward = results[NodeByNode]
        assert forward[2, 2] == 8 * 2 + leave * (HIDDEN * b + 4 * K + K * b) + come * HIDDEN * b, (forward, leave, come)
        assert backward[2, 2] == leave * HIDDEN * b + come * (HIDDEN * b + K * b), (backward, leave, come)
        # And on to the ranks of the node that need it.
        here = [torch.where(c // (2 * EXPERTS) == node, c // EXPERTS, -1) for _, c, _ in every]
        go = _to(here[rank]) + _to(here[peer])
        mate = rank ^ 1
        arrive = sum(int((c == rank).any(1).sum()) for c in (here[rank], here[peer], here[mate], here[mate ^ 2]))
        assert forward[1, 2] == 8 * 2 + go * (HIDDEN * b + 4 * K + K * b) + arrive * HIDDEN * b, (forward, go, arrive)
        assert backward[1, 2] == go * HIDDEN * b + arrive * (HIDDEN * b + K * b), (backward, go, arrive)

        # Without nodes a row crosses for each rank of the other node that has any of its experts.
        homes = chosen // EXPERTS
        unmerged = _to(torch.where(homes // 2 == node, -1, homes))
        assert leave < 0.75 * unmerged, (leave, unmerged)
        for found, wanted in zip(results[NodeByNode][0], results[AllToAll][0]):
            assert torch.allclose(found, wanted, rtol=1e-12, atol=1e-12)
        flat = results[AllToAll][1][2, 4]
        arrive_flat = sum(int((c // EXPERTS == rank).any(1).sum()) for _, c, _ in every)
        assert flat == 8 * 4 + _to(homes) * (HIDDEN * b + 4 * K + K * b) + arrive_flat * HIDDEN * b


def gradients_of_gradients_cross_nodes():
    with initialized(expert=4):
        group, rank = this_process(), dist.get_rank()
        found = []
        for way in (dispatcher(group, EXPERTS, True, None), AllToAll(group, EXPERTS)):
            rows, chosen, weights = _choices(rank)
            inputs = rows.requires_grad_(), weights.requires_grad_()
            arrived = way.send(inputs[0], chosen, inputs[1])
            out = arrived.back(_experts(arrived.rows.tanh(), arrived.weights, arrived.experts, rank * EXPERTS))
            once = torch.autograd.grad(out.pow(2).sum(), inputs, create_graph=True)
            found.append(torch.autograd.grad(sum(g.pow(2).sum() for g in once), inputs))
        for hierarchical, flat in zip(*found):
            assert torch.allclose(hierarchical, flat, rtol=1e-10, atol=1e-10)


# One combination of each family with experts over the nodes, and the other dispatchers.
ROWS = [
    {"family": "mixtral", "balancing": "sinkhorn", "fsdp": 2},
    {"family": "qwen3_moe", "balancing": "aux_loss", "fsdp": 1, "checkpointing": True},
    {"family": "deepseek_v3", "balancing": "none", "fsdp": 2, "dispatcher": "shuffled", "shard": 2},
    {"family": "gpt_oss", "balancing": "balanced", "fsdp": 1, "dispatcher": "all_gather", "shard": 1},
]


def experts_train_as_one_process(rows: list[dict]):
    expert_parity.train_all([{"expert": 4, **row} for row in rows])


def uneven_nodes_use_flat_dispatch_and_log_it():
    """Ranks that are numbered across nodes in turns, too: their places are then those of their numbers."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("smddp.sagemaker")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with initialized(expert=4):
            group = this_process()
            assert group.hierarchy is None and isinstance(dispatcher(group, EXPERTS, True, None), AllToAll)
            assert list(tsm.state.mesh["shard"].get_coordinate()) == [tsm.state.shard_process_group.rank()]
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    if dist.get_rank() == 0:
        assert sum("[0, 1, 2, 3] have different numbers of ranks on their nodes" in line for line in lines) == 1, lines
    experts_train_as_one_process(ROWS[:1])


def keys_and_values_cross_by_the_formula():
    """docs/guides/smp/context-parallelism.md: a ring crosses where its next rank is on the other node; a gather is one
    collective of a group that spans both."""
    with initialized(context=4):
        rank = dist.get_rank()
        given = context_parallel.part_of_batch(context_parallel.batch("causal", 0))
        keys = 2 * given["input_ids"].numel() * HEADS * HEAD * 4
        nodes = 2 if rank % 2 else 1  # ranks 1 and 3 are the last of their nodes
        ring = LAYERS * 3 * keys
        for comm, forward, backward in (
            ("p2p", {"send": {(nodes, 4): ring}}, {"send": {(nodes, 4): 2 * ring}}),
            ("all_gather", {"send": {}}, {"send": {}, "reduce_scatter": {(2, 4): LAYERS * 4 * keys}}),
        ):
            model = tsm.transform(tiny(), cp_comm_type=comm)
            before = {kind: _moved(kind) for kind in ("send", "all_gather", "reduce_scatter")}
            loss = model(**given).loss
            middle = {kind: _moved(kind) for kind in before}
            loss.backward()
            for kind, wanted in forward.items():
                assert _between(before[kind], middle[kind]) == wanted, (comm, kind, before, middle)
            for kind, wanted in backward.items():
                assert _since(middle[kind], kind) == wanted, (comm, kind, middle)
            header = 8 * 8 + 8 * 2 * len(given["input_ids"])  # sizes and labels, whatever the kind
            gathered = LAYERS * keys if comm == "all_gather" else 0
            assert _between(before["all_gather"], middle["all_gather"]) == {(2, 4): 4 * (gathered + header)}, comm


def _between(before: dict, after: dict) -> dict:
    return {key: size - before.get(key, 0) for key, size in after.items() if size != before.get(key, 0)}
