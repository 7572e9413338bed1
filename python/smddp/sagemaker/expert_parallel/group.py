"""Ranks that share the experts."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from smddp.sagemaker.parallel import Hierarchy


class ExpertGroup:
    """Ranks that share the experts; a single rank has no process group. Copies of a model share this object.

    ``hierarchy``: placement of the ranks on nodes, if hierarchical dispatch applies.
    """

    def __init__(self, mesh: DeviceMesh | None, hierarchy: Hierarchy | None = None) -> None:
        self.mesh, self.hierarchy = mesh, hierarchy
        self.rank = 0 if mesh is None else mesh.get_local_rank()
        self.size = 1 if mesh is None else mesh.size()

    @property
    def process_group(self) -> dist.ProcessGroup:
        """Of more than one rank."""
        assert self.mesh is not None
        return self.mesh.get_group()

    def __deepcopy__(self, memo: dict) -> ExpertGroup:
        return self

    def __reduce__(self) -> tuple:
        return this_process, ()


def this_process() -> ExpertGroup:
    """The expert group of this process. Raises RuntimeError before `tsm.init()`."""
    from smddp.sagemaker.state_handler import state

    if state.mesh is None:
        raise RuntimeError("a model with spread experts can be made or unpickled only after tsm.init()")
    mesh = state.expert_mesh
    return ExpertGroup(None if mesh is None else mesh["expert"], state.expert_hierarchy)
