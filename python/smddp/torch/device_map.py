"""Groups whose devices have different backends, such as "cpu:gloo,cuda:smddp".

torch calls one creator per device, but a creator that returns a process group replaces the whole group, and torch
calls no other creator. A smddp group therefore creates the backends of the other devices itself.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from smddp._constants import NAME
from smddp.arrays import symmetric
from smddp.torch.compat import backend_plugins, c10d, warn_missing
from smddp.torch.dispatch import call_group
from smddp.torch.unsupported import answering

DEFAULT_DEVICES = {"cpu": NAME, "cuda": NAME}


@dataclass
class Request:
    """The arguments of the group that torch is creating."""

    # Backend name of each device type.
    backends: dict[str, str] = field(default_factory=lambda: dict(DEFAULT_DEVICES))
    # torch's own group with the backends created before ours; torch discards it.
    parent: Any = None
    # The device that the group is bound to.
    device_id: torch.device | None = None


#: Local variables of `torch.distributed.distributed_c10d._new_process_group_helper`: the parsed backend string, torch's
#: own group, and the device that the group is bound to.
HELPER_LOCALS = ("backend_config", "pg", "device_id")


def current_request() -> Request:
    """Reads the backend string from torch's frame that calls our creator.

    A creator receives only its own device. The calling function of torch, under any name, keeps the parsed string in a
    local variable. Warns if torch has no such variable: smddp then serves all devices.
    """
    by_torch = False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("torch.distributed."):
            by_torch = True
            names = frame.f_locals
            config: Any = names.get(HELPER_LOCALS[0])
            if hasattr(config, "get_device_backend_map"):
                backends = {str(device): str(backend) for device, backend in config.get_device_backend_map().items()}
                return Request(backends, names.get(HELPER_LOCALS[1]), names.get(HELPER_LOCALS[2]))
        frame = frame.f_back
    if by_torch and not _Warned.request:
        _Warned.request = True
        warn_missing(
            f"local variable {HELPER_LOCALS[0]!r} in the function that makes process groups",
            "smddp serves the CPU and CUDA devices of every group, also of one with several backends, such as "
            "'cpu:gloo,cuda:smddp'",
        )
    return Request()


class _Warned:
    """Warnings that this process has given."""

    request = False


def creates_without_timeout() -> bool:
    """Returns True if a caller in torch, such as `new_group`, received no timeout for the group that it creates."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        is_torch = frame.f_globals.get("__name__") == "torch.distributed.distributed_c10d"
        if is_torch and frame.f_locals.get("timeout", frame) is None:
            return True
        frame = frame.f_back
    return False


def mesh_siblings(ranks: Sequence[int]) -> list[list[int]]:
    """Returns the ranks of all groups of the mesh dimension for which torch is creating the group of `ranks`.

    torch's DeviceMesh keeps them in a local variable. Empty for other callers.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        is_mesh = frame.f_globals.get("__name__") == "torch.distributed.device_mesh"
        rows = frame.f_locals.get("pg_ranks_by_dim") if is_mesh else None
        if isinstance(rows, torch.Tensor):
            listed = rows.tolist()
            for groups in (listed, [sorted(group) for group in listed]):
                if list(ranks) in groups:
                    return groups
        frame = frame.f_back
    return []


def others(
    request: Request, store: Any, rank: int, size: int, timeout: timedelta, name: str, ranks: list[int]
) -> dict[str, Any]:
    """Returns the backends of the other devices by device type: torch's existing ones, and new ones.

    store: the group's store, without a device's prefix. Raises RuntimeError with device and backend if a backend cannot
    be created.
    """
    found: dict[str, Any] = {}
    made: dict[str, Any] = {}
    for device, backend in request.backends.items():
        if backend == NAME:
            continue
        found[device] = _registered(request.parent, device) or made.get(backend)
        if found[device] is None:
            try:
                found[device] = _make(backend, dist.PrefixStore(f"{device}/", store), rank, size, timeout, name, ranks)
            except Exception as error:
                raise RuntimeError(
                    f"smddp holds the backends of a group's other devices itself, and could not make "
                    f"{backend!r} for {device!r}: {error}; where this machine has no such device, leave "
                    f"'{device}:{backend}' out of the backend's name"
                ) from error
            made[backend] = found[device]
    return found


def _registered(group: Any, device: str) -> Any:
    try:
        return group._get_backend(torch.device(device)) if group is not None else None
    except RuntimeError:
        return None


def _make(backend: str, store: Any, rank: int, size: int, timeout: timedelta, name: str, ranks: list[int]) -> Any:
    """Creates one backend as torch's own helper does."""
    plugin = backend_plugins().get(backend.upper())
    if plugin is not None:
        if plugin.extended_api:
            options: Any = c10d._DistributedBackendOptions()
            options.store = store
            options.group_rank = rank
            options.group_size = size
            options.timeout = timeout
            options.group_id = name
            options.global_ranks_in_group = ranks
            made = plugin.creator_fn(options, None)
        else:
            made = plugin.creator_fn(store, rank, size, timeout)
        if made is None or isinstance(made, dist.ProcessGroup):
            raise RuntimeError("it is not a backend that can be part of a group")
        return made
    # Older torch creates its own backends without the table.
    if backend == "gloo":
        return c10d.ProcessGroupGloo(store, rank, size, timeout=timeout)
    if backend == "nccl":
        nccl: Any = c10d.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        nccl.global_ranks_in_group = ranks
        nccl.group_name = name
        return c10d.ProcessGroupNCCL(store, rank, size, nccl)
    raise RuntimeError("this torch has no way to make it")


# Methods that torch may call on the backend of a device instead of the group.
_FORWARDED = (
    "allreduce allreduce_coalesced allreduce_sparse broadcast reduce allgather all_gather_single _allgather_base "
    "allgather_coalesced all_gather_single_coalesced allgather_into_tensor_coalesced gather gather_single "
    "gather_into_tensor scatter reduce_scatter reduce_scatter_single _reduce_scatter_base "
    "reduce_scatter_single_coalesced reduce_scatter_tensor_coalesced all_to_all_single alltoall_base alltoall send "
    "recv recv_anysource barrier monitored_barrier set_timeout get_error _get_sequence_number_for_group "
    "_set_sequence_number_for_group get_reconfigure_handle reconfigure _start_time_estimate _end_time_estimate"
).split()


def _forward(method: str) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return call_group(self.served_group(), method, args, kwargs)

    call.__name__ = method
    return call


@answering(c10d.Backend)
class SmddpDevice(c10d.Backend):
    """The backend of the group's devices, for torch's queries of names and capabilities.

    All calls go to the group through `dispatch.py`. Needs torch 2.14, see `device_backend`.
    """

    def __init__(self, group: Any, timeout: timedelta) -> None:
        super().__init__(group.rank(), group.size())
        self._group = weakref.ref(group)
        self._options = c10d.Backend.Options(NAME, timeout)

    def served_group(self) -> Any:
        """Returns the group. Raises RuntimeError after its destruction."""
        group = self._group()
        if group is None:
            raise RuntimeError("this smddp group was destroyed; create a new one with new_group or init_process_group")
        return group

    def getBackendName(self) -> str:
        return NAME

    name = getBackendName

    @property
    def options(self) -> Any:
        return self._options

    @property
    def supports_splitting(self) -> bool:
        return True

    @property
    def supports_reconfigure(self) -> bool:
        return bool(self.served_group().supports_reconfigure)

    @property
    def supports_shrinking(self) -> bool:
        return bool(self.served_group().supports_shrinking)

    def shrink(self, ranks_to_exclude: list[int], shrink_flags: int = 0, opts_override: Any = None) -> SmddpDevice:
        backend: SmddpDevice = self.served_group().shrink(ranks_to_exclude, shrink_flags, opts_override)._device
        return backend

    @property
    def supports_coalescing(self) -> bool:
        # Batched sends and receives need no block: each starts immediately, independent of the others.
        return False

    @property
    def _supports_time_estimate(self) -> bool:
        return True

    def supports_tensor_alloc(self, device: Any) -> bool:
        return torch.device(device).type == "cpu"

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: Any) -> torch.Tensor:
        """Returns a tensor of `size` elements in memory that all ranks of this host read directly, as for FSDP2.

        Raises ValueError for a device that is not the CPU, MemoryError without a free block of that size.
        """
        if not self.supports_tensor_alloc(device):
            raise ValueError(f"allocate_tensor: expected device cpu, got {device}; use torch.empty")
        return symmetric.tensor((size,), dtype)

    def eager_connect_single_device(self, device: Any = None) -> None:
        """Does nothing: groups connect when they are created."""

    def perform_nocolor_split(self, device: Any = None) -> None:
        """Does nothing: ranks outside a new group do not take part in its creation."""

    def abort(self) -> None:
        self.served_group().abort()

    def shutdown(self) -> None:
        group = self._group()
        if group is not None:
            group.shutdown()

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.served_group().set_timeout(timeout)


for _method in _FORWARDED:
    setattr(SmddpDevice, _method, _forward(_method))


def device_backend(group: Any, timeout: timedelta) -> Any:
    """Returns the backend to register for the devices that the group serves.

    torch before 2.14 accepts no backend in Python. There torch's no-op backend is a placeholder: torch only checks that
    it exists, and every call reaches the group's methods.
    """
    try:
        return SmddpDevice(group, timeout)
    except TypeError:
        return _placeholder_backend(group.rank(), group.size())


def _placeholder_backend(rank: int, size: int) -> Any:
    fake: Any = c10d.FakeProcessGroup
    create = getattr(fake, "_create_internal", fake)
    try:
        options = fake.Options()
        # An unexpected call must not appear to succeed.
        options.error_on_collective = True
    except (AttributeError, TypeError):
        return create(rank, size)
    return create(rank, size, options)
