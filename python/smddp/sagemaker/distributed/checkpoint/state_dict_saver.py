"""Saves state dicts of any layout: sharded, local or plain."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import SavePlanner, StorageWriter

from smddp.sagemaker.distributed.checkpoint import places
from smddp.sagemaker.distributed.checkpoint.async_utils import DEFAULT_ASYNC_REQUEST_QUEUE, AsyncCallsQueue
from smddp.sagemaker.distributed.checkpoint.filesystem import DistributedFileSystemWriter
from smddp.sagemaker.distributed.checkpoint.participants import CheckpointError, Participants
from smddp.sagemaker.distributed.checkpoint.strategy import PendingSave, PyTorchDistSaveShardedStrategy

__all__ = [
    "DEFAULT_ASYNC_REQUEST_QUEUE",
    "AsyncCallsQueue",
    "CheckpointError",
    "PyTorchDistSaveShardedStrategy",
    "async_save",
    "maybe_finalize_async_calls",
    "save",
]

_default_strategy = PyTorchDistSaveShardedStrategy()


def save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,
    wait_error_handling: bool = True,
    force_check_all_plans: bool = True,
    s3_region: str | None = None,
    s3client_config: Any = None,
) -> None:
    """Saves ``state_dict`` and returns when the checkpoint is complete. Collective over ``process_group``.

    Args:
        state_dict: nested dictionaries; DTensors and ShardedTensors are saved part by part, each part once.
        checkpoint_id: directory or `s3://` name. What is there already stays the checkpoint that loads until the new
            one is whole.
        storage_writer: instead of (or with) ``checkpoint_id``; any DCP writer.
        planner: DCP save planner; ours if None.
        process_group: the ranks that save. The default group if None. Given FSDP's own at a shard degree of 1, the
            first copy of the model writes, and the others return at once. A group that holds one part of the model
            saves into a directory named `tp{r}_ep{r}`.
        coordinator_rank: global rank that plans and writes `.metadata`. The default 0 means the group's first rank
            where the group does not hold rank 0.
        wait_error_handling: False: a failed save is logged on every rank instead of raised, and leaves an incomplete
            checkpoint that will not load.
        force_check_all_plans: False: reuse the last global plan if no rank's plan has changed.
        s3_region, s3client_config: for `s3://` names; see `S3FileSystem`.

    Raises:
        ValueError: neither ``checkpoint_id`` nor ``storage_writer``; ranks that name different directories; a
            coordinator outside the group; parts that do not make whole tensors; a part of the model in a directory
            that is not named after it.
        CheckpointError, OSError: on every rank, if any could not write.
    """
    call = _begin(
        _default_strategy,
        False,
        state_dict,
        checkpoint_id,
        storage_writer,
        planner,
        process_group,
        coordinator_rank,
        wait_error_handling,
        force_check_all_plans,
        s3_region,
        s3client_config,
    )
    if call is not None:
        call.finalize()


def async_save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,
    queue: AsyncCallsQueue | None = None,
    sharded_strategy: PyTorchDistSaveShardedStrategy | None = None,
    wait_error_handling: bool = True,
    force_check_all_plans: bool = True,
    s3_region: str | None = None,
    s3client_config: Any = None,
) -> None:
    """Copies ``state_dict`` to the host and returns; a thread writes it while training goes on.

    The tensors may change as soon as this returns. The checkpoint is whole, and loads, once
    `maybe_finalize_async_calls` has finalized it. Collective over ``process_group`` for the planning only; the
    writing communicates with no one.

    Args:
        queue: where the save waits for its finalization; `DEFAULT_ASYNC_REQUEST_QUEUE` if None.
        sharded_strategy: how it is saved; a `PyTorchDistSaveShardedStrategy` if None.
        others: as in `save`.

    Raises:
        As `save` does, for what goes wrong before the writing; the rest comes out of `maybe_finalize_async_calls`.
    """
    if queue is not None and not isinstance(queue, AsyncCallsQueue):
        raise TypeError(f"queue must be an AsyncCallsQueue, got {type(queue).__name__}")
    call = _begin(
        sharded_strategy or _default_strategy,
        True,
        state_dict,
        checkpoint_id,
        storage_writer,
        planner,
        process_group,
        coordinator_rank,
        wait_error_handling,
        force_check_all_plans,
        s3_region,
        s3client_config,
    )
    if call is not None:
        (DEFAULT_ASYNC_REQUEST_QUEUE if queue is None else queue).add(call)


def maybe_finalize_async_calls(blocking: bool = True, process_group: dist.ProcessGroup | None = None) -> list[int]:
    """Finalizes saves of the default queue; see `AsyncCallsQueue.maybe_finalize_async_calls`."""
    return DEFAULT_ASYNC_REQUEST_QUEUE.maybe_finalize_async_calls(blocking, process_group)


def _begin(
    strategy: PyTorchDistSaveShardedStrategy,
    background: bool,
    state_dict: dict[str, Any],
    checkpoint_id: str | os.PathLike | None,
    writer: StorageWriter | None,
    planner: SavePlanner | None,
    group: dist.ProcessGroup | None,
    coordinator_rank: int,
    wait_error_handling: bool,
    force_check_all_plans: bool,
    s3_region: str | None,
    s3client_config: Any,
) -> PendingSave | None:
    """Starts a save and returns it; None on ranks without data to write."""
    if not isinstance(state_dict, dict):
        raise TypeError(f"state_dict must be a dictionary, got {type(state_dict).__name__}")
    if writer is None:
        if checkpoint_id is None:
            raise ValueError("give checkpoint_id (a directory or an s3:// name) or storage_writer")
        writer = DistributedFileSystemWriter(checkpoint_id, s3_region=s3_region, s3client_config=s3client_config)
    else:
        writer.reset(checkpoint_id)
        if isinstance(writer, DistributedFileSystemWriter):
            writer._token = ""
    participants = Participants(group, coordinator_rank)
    if not participants.leave_copies():
        return None
    places.agree(writer, participants)
    places.check_same(writer, participants)
    return strategy.begin(
        state_dict,
        writer,
        planner,
        participants,
        background=background,
        wait_error_handling=wait_error_handling,
        force_check_all_plans=force_check_all_plans,
    )
