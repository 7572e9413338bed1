"""Ranks on two nodes simulated by SMDDP_NODE: TCP between nodes, shared memory within. Counts inter-node bytes."""

from __future__ import annotations

import os

import pytest
from ranks.pool import Pools, client_pool

HERE = os.path.dirname(os.path.abspath(__file__))
EVEN, IN_TURNS, UNEVEN = (0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 1)


@pytest.fixture(scope="module")
def on():
    """A function that gives a pool of ranks on the nodes of a list."""

    def pool(nodes: tuple[int, ...]):
        # The counters are smddp's, so these run on it alone.
        return client_pool(len(nodes), HERE, "smddp", environment=lambda rank: {"SMDDP_NODE": f"node{nodes[rank]}"})

    with Pools(pool) as pools:
        yield pools.of


@pytest.mark.parametrize(
    ("nodes", "module", "case"),
    [
        (EVEN, "hybrid", "on_two_nodes_gathers_avoid_the_network"),
        (EVEN, "nodes", "tokens_cross_once_for_each_node_that_needs_them"),
        (EVEN, "nodes", "gradients_of_gradients_cross_nodes"),
        (EVEN, "nodes", "keys_and_values_cross_by_the_formula"),
        (IN_TURNS, "hybrid", "on_two_nodes_shard_groups_fill_a_node_for_any_rank_order"),
        (IN_TURNS, "nodes", "uneven_nodes_use_flat_dispatch_and_log_it"),
        pytest.param(UNEVEN, "nodes", "uneven_nodes_use_flat_dispatch_and_log_it", marks=pytest.mark.slow),
    ],
)
def test_two_nodes(on, nodes, module, case):
    on(nodes).run(f"smp_cases.{module}", case, seconds=180.0)


def test_experts_across_nodes_train_as_one_process(on):
    from smp_cases.nodes import ROWS

    on(EVEN).run("smp_cases.nodes", "experts_train_as_one_process", seconds=180.0, rows=ROWS)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_experts_across_nodes_with_tensor_parallelism_train_as_one_process(on):
    """Each tensor rank's expert group has two ranks on each of two nodes."""
    rows = [
        {"family": "mixtral", "balancing": "sinkhorn", "tensor": 2, "fsdp": 2, "checkpointing": True},
        {"family": "qwen2_moe", "balancing": "none", "tensor": 2, "fsdp": 1, "shard": 2},
    ]
    on((0,) * 4 + (1,) * 4).run("smp_cases.nodes", "experts_train_as_one_process", seconds=500.0, rows=rows)
