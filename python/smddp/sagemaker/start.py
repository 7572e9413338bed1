"""`tsm.init()`: from a configuration to the mesh, the groups and the patches."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
from typing import Any

import torch.distributed as dist

from smddp.sagemaker import config as configuration
from smddp.sagemaker import patching
from smddp.sagemaker.parallel import ParallelState, layout, order_by_node
from smddp.sagemaker.state_handler import state

log = logging.getLogger("smddp.sagemaker")

# Where each launcher says which rank this is, of how many.
_LAUNCHERS = (("RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"))


def is_initialized() -> bool:
    """Whether `init` has run."""
    return state.is_initialized


def init(config: dict[str, Any] | str | os.PathLike | None = None) -> None:
    """Set up hybrid sharding, tensor, context and expert parallelism and activation offloading for this process.

    Collective: every rank calls it, with the same configuration. Call it after `dist.init_process_group`; without
    a process group it makes one, over "smddp", from the launcher's environment.

    Args:
        config: the keys of `smddp.sagemaker.config.KEYS` as a dict, or the path of a JSON file. The launcher's
            SM_HP_MP_PARAMETERS wins over it; degrees assigned to `tsm.state` before win over both.

    Raises:
        TypeError, ValueError: a key or value that is wrong, degrees that do not divide the world, or ranks that
            were given different configurations.
        RuntimeError: no process group and no launcher's environment; or a second call with another configuration.
    """
    values = configuration.read(config, state._assigned)
    if state.is_initialized:
        if values != state.config:
            raise RuntimeError(f"tsm.init() ran already, with {state.config}; call tsm.state.reset() before another")
        return
    if not dist.is_initialized():
        _make_process_group()
    nodes = _agree(values)
    sizes = layout(
        dist.get_world_size(),
        values["hybrid_shard_degree"],
        values["tensor_parallel_degree"],
        values["context_parallel_degree"],
        values["expert_parallel_degree"],
    )
    parallel = ParallelState(sizes, nodes)
    state._set(values, parallel)
    try:
        patching.apply_init(values, sizes)
    except BaseException:
        state.reset()
        raise
    if dist.get_rank() == 0:
        where = (len(set(nodes)), dist.get_backend(), parallel.mesh.device_type)
        log.info("%r over %d nodes, backend %s, on %s", state, *where)
        if not sizes.native and (spanned := parallel.nodes_of_shard_group(nodes)) > 1:
            log.info("each shard group of %d ranks spans %d nodes", sizes.shard, spanned)
        if parallel.ranks.flatten().tolist() != order_by_node(nodes):
            log.info(
                "ranks are numbered across nodes in turns, and groups that span nodes have to follow: start them node "
                "by node, and smaller groups stay inside a node"
            )
        if parallel.uneven:
            log.info(
                "expert groups like that of ranks %s have different numbers of ranks on their nodes, or in turns: a "
                "token crosses there between nodes once for each rank that needs it, not once for each node",
                parallel.uneven[0],
            )


def _make_process_group() -> None:
    for rank, size in _LAUNCHERS:
        if rank in os.environ and size in os.environ and "MASTER_ADDR" in os.environ:
            dist.init_process_group("smddp", rank=int(os.environ[rank]), world_size=int(os.environ[size]))
            return
    raise RuntimeError(
        "tsm.init() found neither a process group nor a launcher's environment (RANK, WORLD_SIZE, MASTER_ADDR, "
        "MASTER_PORT): start the script with `torchrun --nproc-per-node 8 script.py`, or call "
        'dist.init_process_group("smddp", ...) first'
    )


def _nodes(hosts: list[str]) -> list[str]:
    """Every rank's node: as smddp's own group knows it, else by ``hosts``, the names that the ranks' machines have."""
    communicator = getattr(dist.group.WORLD, "communicator", None)
    return hosts if communicator is None else [str(node) for node in communicator.nodes()]


def _agree(values: dict[str, Any]) -> list[str]:
    """Every rank's node, after all have been found to hold the same ``values``."""
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (socket.gethostname(), digest))
    if len({other for _, other in found}) > 1:
        everything: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everything, values)
        raise ValueError(f"tsm.init() was given different configurations: {_differences(everything)}")
    return _nodes([host for host, _ in found])


def _differences(everything: list[dict[str, Any]]) -> str:
    """The keys on which the ranks' configurations differ, with the ranks that hold each value."""
    texts = []
    for key in everything[0]:
        ranks: dict[Any, list[int]] = {}
        for rank, given in enumerate(everything):
            ranks.setdefault(given[key], []).append(rank)
        if len(ranks) > 1:
            # The first of many name a value well enough.
            held = (
                f"{value!r} on rank {', '.join(map(str, who[:8]))}{', ...' * (len(who) > 8)}"
                for value, who in ranks.items()
            )
            texts.append(f"{key} is {' and '.join(held)}")
    return "; ".join(texts)
