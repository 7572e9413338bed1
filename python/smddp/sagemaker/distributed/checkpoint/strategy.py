"""Save in three phases: plan and copy on the caller's thread, write in the background, finalize on all ranks.

Only the first and the last part communicate, and both run where the caller calls. The writing thread touches no
process group, so it cannot get between the collectives of training.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.distributed.checkpoint import SavePlanner as AnySavePlanner
from torch.distributed.checkpoint import StorageWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import WriteResult

from smddp.sagemaker.distributed.checkpoint import layout, places
from smddp.sagemaker.distributed.checkpoint.filesystem import DistributedFileSystemWriter
from smddp.sagemaker.distributed.checkpoint.participants import (
    CheckpointError,
    Failure,
    Participants,
    attempt,
    raise_failures,
)
from smddp.sagemaker.distributed.checkpoint.planner import SavePlanner

_log = logging.getLogger(__name__)
_NO_TOKEN = 2**62


class _Staged:
    """Planner interface for the writer, served from staged copies of the entries that this rank writes."""

    def __init__(self, plan: SavePlan, planner: AnySavePlanner) -> None:
        self._data = {item.index: planner.resolve_data(item) for item in plan.items}
        waits = False
        for index, data in self._data.items():
            if isinstance(data, torch.Tensor):
                data = data.detach()
                on_gpu = data.device.type == "cuda"
                copy = torch.empty_like(data, device="cpu", memory_format=torch.contiguous_format, pin_memory=on_gpu)
                self._data[index] = copy.copy_(data, non_blocking=on_gpu)
                waits |= on_gpu
        if waits:
            torch.cuda.current_stream().synchronize()

    def resolve_data(self, item: WriteItem) -> Any:
        """The copy of one entry."""
        return self._data[item.index]


class PendingSave:
    """A save whose data is being written.

    Attributes:
        where: the checkpoint, for messages.
        participants: the ranks of the save.
    """

    def __init__(
        self,
        where: str,
        participants: Participants,
        writer: StorageWriter,
        metadata: Metadata | None,
        written: Future,
        raise_errors: bool,
        timeout: float,
    ) -> None:
        self.where, self.participants = where, participants
        self._writer, self._metadata, self._written = writer, metadata, written
        self._raise, self._timeout = raise_errors, timeout

    def done(self) -> bool:
        """True if this rank has written its data, or failed to."""
        return self._written.done()

    def _results(self) -> list[WriteResult]:
        try:
            return self._written.result(self._timeout)
        except FutureTimeoutError:
            if self._written.done():
                raise
            raise CheckpointError(
                f"its data was not written to {self.where} within {self._timeout:g} s: check that file system, or "
                "raise PyTorchDistSaveShardedStrategy(write_timeout=...)"
            ) from None

    def finalize(self) -> None:
        """Waits for the data of this rank, then of all ranks, and publishes the checkpoint. Collective.

        Raises:
            CheckpointError, OSError, ...: on every rank, if any could not write; with the ranks and their errors.
        """
        results = attempt(self._results)
        self._written = Future()  # the copies may go
        gathered = self.participants.gather(results)
        failures: dict[int, Failure] = {}
        if gathered is not None:
            failures = {r: v for r, v in zip(self.participants.ranks, gathered) if isinstance(v, Failure)}
            if not failures:
                metadata = self._metadata
                assert metadata is not None  # on the coordinator
                written = [part for part in gathered if not isinstance(part, Failure)]
                finished = attempt(lambda: self._writer.finish(metadata, written))
                if isinstance(finished, Failure):
                    failures = {self.participants.rank: finished}
            if failures and isinstance(self._writer, DistributedFileSystemWriter):
                self._writer.abandon()
        failures = self.participants.broadcast(failures)
        if self._raise:
            raise_failures(f"saving {self.where}", failures)
        elif failures:
            _log.error("saving %s failed, the checkpoint is incomplete: %s", self.where, failures)


@dataclass
class _Known:
    """Reusable plan: this rank's local and final plan, and on the coordinator all final plans with the metadata."""

    asked: SavePlan
    assigned: SavePlan
    all_assigned: list[SavePlan] | None
    metadata: Metadata | None


class PyTorchDistSaveShardedStrategy:
    """Saves through torch's DCP planners, file format and writers.

    Data is written by one thread of the strategy, save after save. Each save under way holds a host copy of what
    its rank writes.

    Args:
        write_timeout: seconds that finalizing a save waits for this rank's data to be written.
    """

    def __init__(self, write_timeout: float = 7200.0) -> None:
        self._write_timeout = write_timeout
        self._known: dict[Any, _Known] = {}
        self._thread: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def begin(
        self,
        state_dict: dict[str, Any],
        writer: StorageWriter,
        planner: AnySavePlanner | None,
        participants: Participants,
        *,
        background: bool,
        wait_error_handling: bool = True,
        force_check_all_plans: bool = True,
    ) -> PendingSave:
        """Plans, copies and writes ``state_dict``. Collective over the participants.

        Args:
            state_dict: nested dictionaries of tensors and anything that pickles.
            background: write in a thread, from copies; otherwise before this returns.
            wait_error_handling: False: `PendingSave.finalize` logs errors instead of raising them.
            force_check_all_plans: False: if no rank's plan has changed since the last save of the same kind, use the
                last global plan; one all-reduce instead of a gather and a scatter of plans.

        Raises:
            ValueError, TypeError, OSError, ...: on every rank, if planning fails on any.
        """
        where = str(getattr(writer, "checkpoint_id", None) or getattr(writer, "path", writer))
        state_dict = {k: v.state_dict() if isinstance(v, Stateful) else v for k, v in state_dict.items()}
        saved = layout.record(state_dict, participants.ranks)
        if saved["kind"] == layout.LOCAL:
            state_dict = layout.to_local(state_dict)
        if isinstance(writer, DistributedFileSystemWriter):
            writer.layout, writer.ranks = saved, participants.ranks
        if planner is None:
            # One replica writes a local checkpoint: all replicas hold equal parts, and their disks may differ.
            planner = SavePlanner(lowest_rank=saved["kind"] == layout.LOCAL, whole=saved.get("slices", 1) == 1)

        def ask() -> SavePlan:
            places.check_part(writer, participants, saved.get("slices", 1))
            return self._ask(state_dict, writer, planner, participants)

        asked = attempt(ask)
        key = (tuple(participants.ranks), participants.coordinator, type(planner), saved["kind"])
        assigned, metadata = self._agree(where, asked, writer, planner, participants, key, force_check_all_plans)
        assigned = planner.finish_plan(assigned)
        source: AnySavePlanner | Failure = planner
        if background:
            # Writers request only data from a planner.
            source = attempt(lambda: cast(AnySavePlanner, _Staged(assigned, planner)))
        if isinstance(source, Failure):
            written: Future = Future()
            written.set_exception(source.kind(source.text))
        else:
            written = self._start(lambda: writer.write_data(assigned, source).value(), background)
        return PendingSave(where, participants, writer, metadata, written, wait_error_handling, self._write_timeout)

    @staticmethod
    def _ask(
        state_dict: dict[str, Any], writer: StorageWriter, planner: AnySavePlanner, participants: Participants
    ) -> SavePlan:
        planner.set_up_planner(state_dict, writer.storage_meta(), participants.is_coordinator)
        writer.set_up_storage_writer(participants.is_coordinator)
        return writer.prepare_local_plan(planner.create_local_plan())

    def _agree(
        self,
        where: str,
        asked: SavePlan | Failure,
        writer: StorageWriter,
        planner: AnySavePlanner,
        participants: Participants,
        key: Any,
        force: bool,
    ) -> tuple[SavePlan, Metadata | None]:
        """Returns the final plan of this rank, and on the coordinator the global metadata."""
        reusing = writer if isinstance(writer, DistributedFileSystemWriter) else None
        if reusing is not None and not force:
            known = self._known.get(key)
            same = known is not None and not isinstance(asked, Failure) and known.asked == asked
            token = int(reusing.new_token(), 16) if participants.is_coordinator else _NO_TOKEN
            all_same, token = participants.least([int(same), token])
            if all_same:
                assert known is not None  # this rank's plan is the same, too
                name = f"{token:012x}"
                if participants.is_coordinator:
                    assert known.all_assigned is not None
                    reusing.begin([reusing.named(plan, i, name) for i, plan in enumerate(known.all_assigned)])
                mine = participants.ranks.index(participants.rank)
                return reusing.named(known.assigned, mine, name), known.metadata

        metadata: Metadata | None = None
        all_assigned: list[SavePlan] | None = None
        gathered = participants.gather(asked)
        answer: list[Any] | None = None
        if gathered is not None:
            failures = {r: v for r, v in zip(participants.ranks, gathered) if isinstance(v, Failure)}
            if not failures:
                all_asked = [plan for plan in gathered if not isinstance(plan, Failure)]

                def plan_all() -> list[SavePlan]:
                    nonlocal metadata
                    plans, metadata = planner.create_global_plan(all_asked)
                    return writer.prepare_global_plan(plans)

                planned = attempt(plan_all)
                if isinstance(planned, Failure):
                    failures = {participants.rank: planned}
                else:
                    all_assigned = planned
            answer = [failures] * participants.size if failures else all_assigned
        assigned = participants.scatter(answer)
        if isinstance(assigned, dict):
            raise_failures(f"planning the save of {where}", assigned)
        assert not isinstance(asked, Failure)  # all ranks have raised it
        if reusing is not None:
            self._known[key] = _Known(asked, assigned, all_assigned, metadata)
        return assigned, metadata

    def _start(self, write: Callable[[], list[WriteResult]], background: bool) -> Future:
        if background:
            with self._lock:
                self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="checkpoint-writer")
            return self._thread.submit(write)
        written: Future = Future()
        try:
            written.set_result(write())
        except Exception as error:
            written.set_exception(error)
        return written
