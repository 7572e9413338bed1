"""`tsm.state`: this process's ranks and groups, and the configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from smddp.smp.v2_keys import KEYS, check_value

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from smddp.sagemaker.parallel import Hierarchy, ParallelState

_DEGREES = ("hybrid_shard_degree", "tensor_parallel_degree", "context_parallel_degree", "expert_parallel_degree")


class Ranker:
    """Replication groups by global rank."""

    def __init__(self, state: State) -> None:
        self._state = state

    def get_rep_groups(self) -> list[list[int]]:
        """All replication groups: each lists the global ranks that hold the same shard, one from each copy."""
        return self._state._made("ranker.get_rep_groups()").replication_groups()

    def get_rep_rank(self, global_rank: int) -> int:
        """The index of ``global_rank`` in its replication group: which copy of the model it belongs to.

        Raises ValueError for a rank outside the world.
        """
        for group in self.get_rep_groups():
            if global_rank in group:
                return group.index(global_rank)
        raise ValueError(f"rank {global_rank} is not in this world of {self._state.world_size} ranks")


class State:
    """State set up by `tsm.init()`. One object for the lifetime of the process.

    Degrees may be assigned before `init`, which keeps them. Attributes that need the mesh raise RuntimeError before
    `init`.
    """

    # The configuration's keys, whose properties are made from its table below.
    hybrid_shard_degree: int
    sm_activation_offloading: bool
    activation_loading_horizon: int
    fsdp_cache_flush_warnings: bool
    allow_empty_shards: bool
    tensor_parallel_degree: int
    context_parallel_degree: int
    expert_parallel_degree: int
    random_seed: int

    def __init__(self) -> None:
        self._assigned: dict[str, int] = {}
        self._config: dict[str, Any] | None = None
        self._parallel: ParallelState | None = None
        self._at_reset: list[Callable[[], object]] = []
        self.ranker = Ranker(self)

    # ---- life cycle ----

    def _set(self, config: dict[str, Any], parallel: ParallelState) -> None:
        self._config, self._parallel = config, parallel

    def at_reset(self, undo: Callable[[], object]) -> None:
        """Registers a function that `reset` calls, the last registered first."""
        self._at_reset.append(undo)

    def reset(self) -> None:
        """Discard the configuration, the mesh and assigned degrees, and undo `init`'s patches of torch.

        The process groups remain open until torch destroys them; a new `init` creates new groups.
        """
        while self._at_reset:
            self._at_reset.pop()()
        self._assigned, self._config, self._parallel = {}, None, None

    def _made(self, what: str) -> ParallelState:
        if self._parallel is None:
            raise RuntimeError(f"tsm.state.{what} is known only after tsm.init()")
        return self._parallel

    @property
    def is_initialized(self) -> bool:
        return self._parallel is not None

    @property
    def config(self) -> dict[str, Any]:
        """Effective configuration values; the defaults before `init`."""
        if self._config is not None:
            return dict(self._config)
        return {**{key.name: key.default for key in KEYS.values()}, **self._assigned}

    # ---- the world ----

    @property
    def rank(self) -> int:
        """Global rank."""
        return _dist().get_rank()

    @property
    def world_size(self) -> int:
        return _dist().get_world_size()

    @property
    def world_process_group(self) -> dist.ProcessGroup:
        return _dist().group.WORLD

    # ---- the mesh and its groups ----

    @property
    def mesh(self) -> DeviceMesh | None:
        """DeviceMesh ("replicate", "shard", "tensor"), tensor innermost; None before `init`."""
        return self._parallel.mesh if self._parallel else None

    @property
    def native(self) -> bool:
        """True if FSDP is not patched: hybrid_shard_degree 0 without tensor parallelism."""
        return self._made("native").sizes.native

    @property
    def shard_size(self) -> int | None:
        """Number of ranks that shard each parameter under FSDP; None if FSDP is not patched."""
        sizes = self._made("shard_size").sizes
        return None if sizes.native else sizes.shard

    @property
    def rep_size(self) -> int:
        """Number of copies of the model; 1 if FSDP is not patched."""
        return self._made("rep_size").sizes.copies

    @property
    def rep_rank(self) -> int:
        """Index of this rank's copy of the model."""
        made = self._made("rep_rank")
        return made.data_rank // made.sizes.copy

    @property
    def rep_rank_process_group(self) -> dist.ProcessGroup | None:
        """All ranks of this rank's copy of the model (shard x tensor, or expert x tensor if that is more); None if FSDP
        is left native."""
        made = self._made("rep_rank_process_group")
        return None if made.sizes.native else made.one_copy

    @property
    def replication_process_group(self) -> dist.ProcessGroup:
        """The ranks that hold the same shard as this one."""
        return self._made("replication_process_group").group("replicate")

    @property
    def shard_rank(self) -> int:
        return self._made("shard_rank").place["shard"]

    @property
    def shard_process_group(self) -> dist.ProcessGroup:
        """The ranks that share this rank's parameters under FSDP."""
        return self._made("shard_process_group").group("shard")

    @property
    def dp_size(self) -> int:
        """Ranks that train on different samples: world / (tensor_parallel_degree * context_parallel_degree)."""
        sizes = self._made("dp_size").sizes
        return sizes.replicate * sizes.shard // sizes.context

    @property
    def dp_rank(self) -> int:
        """Index of this rank's part of each batch, less than `dp_size`."""
        made = self._made("dp_rank")
        return made.data_rank // made.sizes.context

    @property
    def tp_size(self) -> int:
        """The tensor parallel degree."""
        return self.tensor_parallel_degree

    @property
    def tp_rank(self) -> int:
        """Rank in the tensor group; 0 before `init`, as scripts ask for it where SMP is switched off."""
        return self._parallel.place["tensor"] if self._parallel else 0

    @property
    def tp_process_group(self) -> dist.ProcessGroup | None:
        """The ranks that share each layer; None without tensor parallelism."""
        if self._parallel is None or self._parallel.sizes.tensor == 1:
            return None
        return self._parallel.group("tensor")

    @property
    def expert_mesh(self) -> DeviceMesh | None:
        """DeviceMesh ("expert_replicate", "expert_shard", "expert", "tensor"); None without expert parallelism."""
        return self._parallel.expert_mesh if self._parallel else None

    @property
    def ep_size(self) -> int:
        """The expert parallel degree."""
        return self.expert_parallel_degree

    @property
    def ep_rank(self) -> int:
        """Rank in the expert group; 0 before `init`."""
        mesh = self.expert_mesh
        return 0 if mesh is None else mesh["expert"].get_local_rank()

    @property
    def ep_process_group(self) -> dist.ProcessGroup | None:
        """The ranks among which experts are spread; None without expert parallelism."""
        mesh = self.expert_mesh
        return None if mesh is None else mesh.get_group("expert")

    @property
    def expert_hierarchy(self) -> Hierarchy | None:
        """Node placement of the expert group, if it has several ranks on each of several nodes; else None."""
        return self._parallel.hierarchy if self._parallel else None

    @property
    def cp_size(self) -> int:
        """The context parallel degree: ranks that hold parts of the same samples."""
        return self.context_parallel_degree

    @property
    def cp_rank(self) -> int:
        """Rank in the context group; 0 before `init`, as scripts ask for it where SMP is switched off."""
        group = self.cp_process_group
        return 0 if group is None else group.rank()

    @property
    def cp_process_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold parts of the same samples; None without context parallelism."""
        return self._parallel.context if self._parallel else None

    @property
    def get_rng_state_tracker(self) -> Any:
        """A function that returns the tracker of random states inside tensor-parallel layers."""
        from smddp.sagemaker.rng import get_rng_state_tracker

        return get_rng_state_tracker

    def __repr__(self) -> str:
        if self._parallel is None:
            return f"State(before init; assigned {self._assigned})"
        sizes = self._parallel.sizes
        return (
            f"State(rank {self.rank} of {self.world_size}: replicate {sizes.replicate} x shard {sizes.shard}"
            f" x tensor {sizes.tensor}{f', context {sizes.context}' if sizes.context > 1 else ''}"
            f"{f', expert {sizes.expert}' if sizes.expert > 1 else ''}"
            f"{', FSDP native' if sizes.native else ''})"
        )


def _key(name: str) -> property:
    """A configuration key as an attribute; degrees may be assigned before `init`."""

    def get(self: State) -> int | bool:
        return self.config[name]

    def put(self: State, value: int) -> None:
        value = check_value(KEYS[name], name, value, "tsm.state")
        if self._config is None:
            self._assigned[name] = value
        elif self._config[name] != value:
            raise RuntimeError(
                f"tsm.state.{name} is {self._config[name]} since tsm.init(), and cannot become {value}: assign it "
                "before init(), or call tsm.state.reset() first"
            )

    return property(get, put if name in _DEGREES else None, doc=KEYS[name].meaning)


for _name in KEYS:
    setattr(State, _name, _key(_name))


def _dist() -> Any:
    import torch.distributed as dist

    return dist


state = State()
