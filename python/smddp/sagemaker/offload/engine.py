"""Schedule of stores to the host and loads back to the device.

One forward of the outermost ``OffloadWrapper`` is a *pass*; each checkpointed layer in it is a *group* of saved
tensors. A tensor saved inside a group is stored to the host at once. When backward requests the first tensor of group
g, the engine issues the loads of g-1 .. g-horizon. A requested group without an issued load is a *stall*. So with
a horizon k >= 1 a backward stalls once, for the last layer, and at most k+1 groups are on the device.

Autograd owns all records: graph -> Handle -> Record (host buffer) and Group -> pass. The engine references only the
running pass and the pending stores, so a released graph releases its host buffers.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from smddp.sagemaker.offload.movers import Mover, mover_for
from smddp.sagemaker.offload.parameters import parameter_storages
from smddp.sagemaker.offload.records import Group, Handle, Kept, Layout, Record, VersionWatch
from smddp.sagemaker.private_names import storage_key

# A smaller tensor costs more to track than its memory is worth.
SMALLEST = 1024  # bytes

# Maximum number of layers with pending stores during forward; beyond it, the computation waits for the oldest.
# Bounds the additional peak memory of offloading.
LAYERS_UNDER_WAY = 2


class Event(NamedTuple):
    """One entry of the log: save, store, release, stall, load or evict. ``pass_index`` counts the process's passes."""

    kind: str
    pass_index: int
    group: int
    nbytes: int


@dataclass(frozen=True)
class OffloadStatistics:
    """Counters since start or reset, then what is held now."""

    stalls: int  # times that backward waited for a group not yet asked for
    loads: int  # groups loaded, stalls included
    max_resident_groups: int  # most groups whose tensors were on the device for backward at once
    tensors_offloaded: int
    bytes_offloaded: int
    bytes_on_host: int  # now: of tensors that a graph still needs
    bytes_resident: int  # now: of copies loaded back to the device
    stores_under_way: int  # now: device tensors kept until their store ends
    pool_buffers: int  # host buffers made
    pool_reused: int  # times a buffer was used again
    pool_free_bytes: int  # now: of idle buffers


class _Pass:
    """One forward of the outermost wrapper: its groups, and which storages are parameters meanwhile."""

    def __init__(self, index: int, horizon: int, module: torch.nn.Module) -> None:
        self.index = index
        self.horizon = horizon
        self.device_type = next((p.device.type for p in module.parameters()), "cpu")
        self._module: torch.nn.Module | None = module
        self._groups: list[weakref.ref[Group]] = []
        self._parameters: set[int] = set()
        self._seen: dict[tuple, weakref.ref[Record]] = {}

    def open_group(self, layer: torch.nn.Module) -> Group:
        # FSDP gathers the root's parameters in its forward, and each layer's parameters in the layer's forward.
        if self._module is not None:
            self._parameters, self._module = parameter_storages(self._module), None
        else:
            self._parameters |= parameter_storages(layer)
        group = Group(self, len(self._groups))
        self._groups.append(weakref.ref(group))
        return group

    def is_parameter(self, tensor: torch.Tensor) -> bool:
        return storage_key(tensor) in self._parameters

    def group(self, index: int) -> Group | None:
        return self._groups[index]() if 0 <= index < len(self._groups) else None

    def groups(self) -> Iterator[Group]:
        return (group for ref in self._groups if (group := ref()) is not None)

    def seen(self, key: tuple) -> Record | None:
        """Returns the existing record of the same bytes, if a graph still references it."""
        ref = self._seen.get(key)
        return ref() if ref is not None else None

    def remember(self, key: tuple, record: Record) -> None:
        self._seen[key] = weakref.ref(record)

    def close(self) -> None:
        self._module = None
        self._parameters = set()
        self._seen = {}


class _UnderWay(NamedTuple):
    source: torch.Tensor  # without its grad_fn, which would keep the graph
    transfer: Any
    mover: Mover
    pass_index: int
    group: int
    nbytes: int


class _Local(threading.local):
    running: _Pass | None = None
    group: Group | None = None
    depth: int = 0  # of checkpointed layers inside one another


class Engine:
    """Packs and unpacks saved tensors; ``movers`` makes the mover of a device."""

    def __init__(self, movers: Callable[[torch.device], Mover] = mover_for) -> None:
        self._make_mover = movers
        self._movers: dict[torch.device, Mover] = {}
        self._lock = threading.RLock()  # backward unpacks on autograd's own threads
        self._local = _Local()
        self._records: weakref.WeakSet[Record] = weakref.WeakSet()
        self._resident: weakref.WeakSet[Group] = weakref.WeakSet()
        self._under_way: deque[_UnderWay] = deque()
        self._passes = 0
        self._stalls = self._loads = self._tensors = self._bytes = self._max_resident = 0
        self.log: list[Event] | None = None  # a list here collects the events

    # -- the forward -------------------------------------------------------------------------------------------

    @contextmanager
    def forward_pass(self, module: torch.nn.Module, horizon: int) -> Iterator[None]:
        """Offload the tensors saved by groups inside. ``horizon``: number of groups that backward prefetches, >= 0."""
        local = self._local
        local.running, local.group, local.depth = _Pass(self._passes, horizon, module), None, 0
        self._passes += 1
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            local.running.close()
            local.running, local.group, local.depth = None, None, 0
            with self._lock:
                self._release_all()

    def in_pass(self) -> bool:
        """Returns True if this thread is inside :meth:`forward_pass`."""
        return self._local.running is not None

    def enter_layer(self, layer: torch.nn.Module) -> None:
        """Enter a checkpointed layer; only the outermost of nested layers is a group."""
        local = self._local
        if local.running is not None:
            local.depth += 1
            if local.depth == 1:
                local.group = local.running.open_group(layer)

    def leave_layer(self) -> None:
        """Leave the innermost layer, also after an exception."""
        local = self._local
        if local.running is not None and local.depth > 0:
            local.depth -= 1
            if local.depth == 0:
                local.group = None
                with self._lock:
                    self._release_stored()

    # -- autograd's two hooks ----------------------------------------------------------------------------------

    def _pack(self, tensor: torch.Tensor) -> Handle | Kept:
        group = self._local.group
        if group is None:
            return Kept(tensor)  # outside the layers: needed first in backward, or as small as token ids
        self._note("save", group, tensor.nbytes if tensor.layout == torch.strided else 0)
        plain, rebuild = _plain(tensor)
        if plain is None or not _movable(plain, group.owner) or group.owner.is_parameter(plain):
            return Kept(tensor)
        with self._lock, torch.no_grad():
            return Handle(self._record(plain, tensor, group), group, rebuild)

    def _unpack(self, packed: Handle | Kept) -> torch.Tensor:
        if isinstance(packed, Kept):
            return packed.get()
        with self._lock, torch.no_grad():
            self._reached(packed.group)
            if packed.record.load():
                self._note("load", packed.group, packed.record.layout.nbytes)
            tensor = packed.record.get()
            return tensor if packed.rebuild is None else packed.rebuild(tensor)

    # -- storing -----------------------------------------------------------------------------------------------

    def _record(self, plain: torch.Tensor, saved: torch.Tensor, group: Group) -> Record:
        layout = Layout.of(plain)
        key = (storage_key(plain), plain.storage_offset(), layout, saved._version)
        record = group.owner.seen(key)
        if record is None:
            record = self._store(plain, VersionWatch(saved), layout, group)
            group.owner.remember(key, record)
        if all(ref() is not group for ref in record.groups):
            group.add(record)
        return record

    def _store(self, plain: torch.Tensor, watch: VersionWatch, layout: Layout, group: Group) -> Record:
        mover = self._mover(plain.device)
        buffer, busy = mover.pool.take(layout.nbytes)
        record = Record(mover, layout, buffer, StorageWeakRef(plain.untyped_storage()), watch, busy)
        record.stored = mover.store(layout.moving_part(plain), layout.on_host(buffer), busy)
        self._records.add(record)
        self._under_way.append(
            _UnderWay(plain.detach(), record.stored, mover, group.owner.index, group.index, layout.nbytes)
        )
        self._tensors += 1
        self._bytes += layout.nbytes
        self._note("store", group, layout.nbytes)
        return record

    def _mover(self, device: torch.device) -> Mover:
        if device not in self._movers:
            self._movers[device] = self._make_mover(device)
        return self._movers[device]

    def _release_stored(self) -> None:
        """Drop the device tensors with finished stores; wait for the stores of all but the last few layers."""
        while self._under_way:
            oldest, newest = self._under_way[0], self._under_way[-1]
            late = oldest.pass_index != newest.pass_index or newest.group - oldest.group >= LAYERS_UNDER_WAY
            if not oldest.mover.done(oldest.transfer):
                if not late:
                    return
                oldest.mover.wait(oldest.transfer)
            self._under_way.popleft()
            self._released(oldest)

    def _release_all(self) -> None:
        """Release all device tensors at the end of the pass, without blocking the computation."""
        while self._under_way:
            each = self._under_way.popleft()
            if not each.mover.done(each.transfer):
                each.mover.part_with(each.source)
            self._released(each)

    def _released(self, each: _UnderWay) -> None:
        if self.log is not None:
            self.log.append(Event("release", each.pass_index, each.group, each.nbytes))

    # -- loading -----------------------------------------------------------------------------------------------

    def _reached(self, group: Group) -> None:
        """Load ``group``, which backward has reached, and start the loads of the next groups."""
        owner = group.owner
        ahead = range(group.index - 1, group.index - 1 - owner.horizon, -1)
        for other in owner.groups():
            if other.resident and other is not group and other.index not in ahead:
                self._evict(other)
        if not group.resident:
            self._stalls += 1
            self._note("stall", group, 0)
            self._load(group)
        for index in ahead:
            other = owner.group(index)
            if other is not None and not other.resident:
                self._load(other)

    def _load(self, group: Group) -> None:
        nbytes = sum(record.layout.nbytes for record in group.records() if record.load())
        group.resident = True
        self._resident.add(group)
        self._loads += 1
        self._max_resident = max(self._max_resident, len(self._resident))
        self._note("load", group, nbytes)

    def _evict(self, group: Group) -> None:
        group.resident = False
        self._resident.discard(group)
        for record in group.records():
            # Keep a tensor saved by several layers, such as a mask, while any of these groups is resident.
            if not any((other := ref()) is not None and other.resident for ref in record.groups):
                record.evict()
        self._note("evict", group, 0)

    # -- looking in --------------------------------------------------------------------------------------------

    def _note(self, kind: str, group: Group, nbytes: int) -> None:
        if self.log is not None:
            self.log.append(Event(kind, group.owner.index, group.index, nbytes))

    def statistics(self) -> OffloadStatistics:
        """Counters and what is held now."""
        with self._lock:
            records = list(self._records)
            pools = [mover.pool for mover in self._movers.values()]
            return OffloadStatistics(
                stalls=self._stalls,
                loads=self._loads,
                max_resident_groups=self._max_resident,
                tensors_offloaded=self._tensors,
                bytes_offloaded=self._bytes,
                bytes_on_host=sum(r.layout.nbytes for r in records),
                bytes_resident=sum(r.layout.nbytes for r in records if r.loaded is not None),
                stores_under_way=len(self._under_way),
                pool_buffers=sum(pool.allocated for pool in pools),
                pool_reused=sum(pool.reused for pool in pools),
                pool_free_bytes=sum(pool.free_bytes() for pool in pools),
            )

    def reset(self) -> None:
        """Zero the counters and free idle host buffers. Buffers of live graphs remain."""
        with self._lock:
            self._stalls = self._loads = self._tensors = self._bytes = self._max_resident = 0
            for mover in self._movers.values():
                mover.pool.clear()


def _plain(tensor: torch.Tensor) -> tuple[torch.Tensor | None, Callable | None]:
    """Returns the plain tensor with the bytes of ``tensor``, and a function that restores its type; or (None, None)."""
    if type(tensor) is torch.Tensor:
        return tensor, None
    if type(tensor) is not DTensor:
        return None, None
    local: Any = tensor._local_tensor
    if hasattr(local, "trigger_wait"):  # the result of a functional collective
        local = local.wait()
    if type(local) is not torch.Tensor:
        return None, None
    mesh, placements, shape, stride = tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride()

    def rebuild(loaded: torch.Tensor) -> torch.Tensor:
        return DTensor.from_local(loaded, mesh, placements, run_check=False, shape=shape, stride=stride)

    return local, rebuild


def _movable(tensor: torch.Tensor, owner: _Pass) -> bool:
    return (
        tensor.layout == torch.strided
        and tensor.device.type == owner.device_type  # a host tensor beside a model on the GPU is where it should be
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and tensor.nbytes >= SMALLEST
    )


_engine = Engine()


def engine() -> Engine:
    """The process's engine."""
    return _engine
