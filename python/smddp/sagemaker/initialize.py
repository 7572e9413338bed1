"""`tsm.init()`: creates the mesh and groups of a configuration, and applies the patches."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch.distributed as dist

from smddp.sagemaker import config as configuration
from smddp.sagemaker import torch_patches
from smddp.sagemaker.parallel import ParallelState, layout, order_by_node
from smddp.sagemaker.state_handler import state
from smddp.torch.bootstrap import agree, make_default_group

log = logging.getLogger("smddp.sagemaker")


def is_initialized() -> bool:
    """Returns True after `init`."""
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
        make_default_group("tsm.init()")
    nodes = _nodes(agree(values, "tsm.init()"))
    sizes = layout(
        dist.get_world_size(),
        values["hybrid_shard_degree"],
        values["tensor_parallel_degree"],
        values["context_parallel_degree"],
        values["expert_parallel_degree"],
    )
    parallel = ParallelState(sizes, nodes)
    state._set(values, parallel)
    state.at_reset(torch_patches.undo_init)
    try:
        torch_patches.apply_init(values, sizes)
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
                "by node, and smaller groups remain inside a node"
            )
        if parallel.uneven:
            log.info(
                "expert groups like that of ranks %s have different numbers of ranks on their nodes, or in turns: a "
                "token crosses there between nodes once for each rank that needs it, not once for each node",
                parallel.uneven[0],
            )


def _nodes(hosts: list[str]) -> list[str]:
    """Every rank's node: as smddp's own group knows it, else by ``hosts``, the names that the ranks' machines have."""
    communicator = getattr(dist.group.WORLD, "communicator", None)
    return hosts if communicator is None else [str(node) for node in communicator.nodes()]
