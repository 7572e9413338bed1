"""Hybrid sharding where the four ranks are on two nodes, by SMDDP_NODE: tcp between them, shared memory within."""

from __future__ import annotations

import os

import pytest

HERE = os.path.dirname(os.path.abspath(__file__))


def pool(nodes: list[int]):
    from ranks import Ranks

    # The counters are smddp's, so these run on it alone.
    return Ranks(4, "smddp", path=HERE, environments=[{"SMDDP_NODE": f"node{node}"} for node in nodes])


@pytest.mark.parametrize(
    ("nodes", "case"),
    [
        ([0, 0, 1, 1], "on_two_nodes_gathers_stay_off_the_network"),
        ([0, 1, 0, 1], "on_two_nodes_shard_groups_fill_a_node_whatever_the_numbering"),
    ],
    ids=["traffic", "numbering"],
)
def test_two_nodes(nodes, case):
    ranks = pool(nodes)
    try:
        ranks.run("smp_cases.hybrid", case, seconds=180.0)
    finally:
        ranks.close()
