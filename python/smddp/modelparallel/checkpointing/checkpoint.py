"""Checkpoints of model and optimizer: `smp.save_checkpoint` and `smp.resume_from_checkpoint`.

    PATH/newest                             the newest tag
    PATH/TAG_partial/model_{pp}_{tp}.pt     a stage's part of the model
    PATH/TAG_partial/optimizer_{pp}_{tp}.pt
    PATH/TAG_partial/user_content.pt        the script's own content
    PATH/TAG_partial/files.json             the files of the last save
    PATH/TAG                                the whole model, a plain torch file
    PATH/optimizer_TAG                      the whole optimizer, a plain torch file
    PATH/user_content_TAG                   the script's own content
    PATH/files_TAG.json                     the files of the last save

Parts are found by the names and numbers in them, so that a checkpoint resumes under another cut.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from smddp.modelparallel.checkpointing import model_state, sharded_state
from smddp.modelparallel.checkpointing import tensor_shards as of_tensors
from smddp.modelparallel.checkpointing.optimizer_state import HELD
from smddp.modelparallel.checkpointing.saved_files import CONTENT, SavedFiles, partial_tags
from smddp.modelparallel.checkpointing.saving import Save, find
from smddp.modelparallel.data_parallel import sharded
from smddp.modelparallel.state import state

log = logging.getLogger("smddp.modelparallel")

# File that transformers writes for the requested name pytorch_model.bin.
_SAFE = {"pytorch_model.bin": "model.safetensors"}


def save_checkpoint(
    path: str | os.PathLike[str],
    tag: str,
    partial: bool = True,
    model: Any = None,
    optimizer: Any = None,
    user_content: Any = None,
    translate_if_full: bool = True,
    num_kept_partial_checkpoints: int | None = None,
) -> None:
    """Save model and optimizer under ``path`` as ``tag``. Collective over all processes.

    Args:
        partial: a file for each stage; else one plain torch file each for the whole model and the whole optimizer.
        model: by default the script's DistributedModel.
        optimizer: by default the script's DistributedOptimizer.
        user_content: anything that pickle takes; `resume_from_checkpoint` returns it.
        translate_if_full: accepted; modules keep their names, so there is nothing to translate.
        num_kept_partial_checkpoints: number of partial checkpoints to keep; None keeps all.
    """
    _, ranks = state.made("save_checkpoint()")
    model = state.model if model is None else model
    optimizer = state.optimizer if optimizer in (None, state.script_optimizer) else optimizer
    if model is None:
        raise RuntimeError("smp.save_checkpoint() needs a smp.DistributedModel")
    if num_kept_partial_checkpoints is not None and num_kept_partial_checkpoints < 1:
        raise ValueError(f"num_kept_partial_checkpoints={num_kept_partial_checkpoints} must be at least 1, or None")
    save = Save(Path(path), tag, partial)
    if partial:
        own = model_state.local(model)
        writes = sharded.writes(ranks, model)
        if writes:
            save.add(own, f"model_{_own(model)}")
        if optimizer is not None and (writes or optimizer.shares is not None):
            save.add(optimizer.local_state_dict(gather_if_shard=False), f"optimizer_{_own(model, optimizer)}")
    else:
        whole = model_state.whole(model)
        if ranks.rank == 0:
            save.add(whole, tag)
        del whole
        if optimizer is not None:
            values = optimizer.state_dict()
            if ranks.rank == 0:
                save.add(values, f"optimizer_{tag}")
    kept = num_kept_partial_checkpoints
    save.finish(user_content, None if kept is None or not partial else lambda: _keep(Path(path), kept))


def _own(model: Any, optimizer: Any = None) -> str:
    """Return the suffix of this rank's model or optimizer file in a partial checkpoint."""
    _, ranks = state.made("save_checkpoint()")
    shared, shares = sharded.of(model), optimizer.shares if optimizer is not None else None
    share = f"_{shared.rank}" if shared is not None else f"_{shares.replica}" if shares is not None else ""
    return f"{ranks.pp_rank}_{ranks.tp_rank}{share}.pt"


def _keep(folder: Path, number: int) -> None:
    parts = sorted(folder.glob("*_partial"), key=lambda each: each.stat().st_mtime_ns)
    for interrupted in folder.glob(".*_partial.removed"):
        try:
            shutil.rmtree(interrupted)
        except OSError as error:
            log.warning("save_checkpoint: the removed checkpoint %s remains: %s", interrupted, error)
    for old in parts[:-number]:
        # Rename it first: a partly removed folder must not be read as a checkpoint.
        shutil.rmtree(old.rename(old.with_name(f".{old.name}.removed")))
        tag = old.name.removesuffix("_partial")
        if not (folder / tag).exists():  # of earlier versions, which had one for both forms
            (folder / f"user_content_{tag}").unlink(missing_ok=True)


def resume_from_checkpoint(
    path: str | os.PathLike[str],
    tag: str | None = None,
    partial: bool = True,
    strict: bool = True,
    load_optimizer: bool = True,
    load_sharded_optimizer_state: bool = True,
    translate_function: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> Any:
    """Load what `save_checkpoint` saved into the script's model and optimizer; parts wait for the cut.

    Call it on every process, after DistributedModel and DistributedOptimizer were made. The cut may be another than
    that of the checkpoint. What is loaded of ``user_content`` is unpickled: resume only from files that you trust.

    Args:
        tag: the newest by default.
        partial: which of the two forms.
        strict: whether names that are missing or unexpected raise.
        load_optimizer: false leaves the optimizer as it is. A whole checkpoint may have no optimizer's state: then only
            the model is loaded.
        load_sharded_optimizer_state: under the key ``shard_optimizer_state``, false loads of an optimizer's parts the
            masters and the loss scale alone.
        translate_function: applied to a whole model's state before it is loaded.

    Returns:
        The user's content, or None.
    """
    state.made("resume_from_checkpoint()")
    model, optimizer = state.model, state.optimizer if load_optimizer else None
    if model is None or (load_optimizer and partial and optimizer is None):
        what = "DistributedModel" if model is None else "DistributedOptimizer (or load_optimizer=False)"
        raise RuntimeError(f"smp.resume_from_checkpoint() needs a smp.{what}")
    folder = Path(path)
    saved, tag = find(folder, tag, partial)
    if not partial:
        return _load_whole(saved, tag, model, optimizer, strict, translate_function)
    shares = load_sharded_optimizer_state or optimizer is None or optimizer.shares is None
    _when_cut(model, lambda: _load_parts(saved, model, optimizer, strict, shares))
    return _content(saved, CONTENT if CONTENT in saved.names else f"../user_content_{tag}")


def _load_whole(
    saved: SavedFiles, tag: str, model: Any, optimizer: Any, strict: bool, translate: Callable[..., Any] | None
) -> Any:
    """Load a whole model, and the optimizer's state if the same save wrote it. Returns the user's content."""
    values = _read_whole(saved, tag)
    model_state.load(model, values if translate is None else translate(values), strict)
    name = f"optimizer_{tag}"
    if saved.replaced(tag):
        log.warning(
            "smp.resume_from_checkpoint(): %s is not the file that smp.save_checkpoint() wrote, so neither %s nor the "
            "user's content, which belong to that one, are loaded",
            saved.folder / tag,
            name,
        )
        return None
    if optimizer is not None and name not in saved.names:
        log.warning("smp.resume_from_checkpoint(): %s was saved without an optimizer's state", saved.folder / tag)
    elif optimizer is not None and not (saved.save or saved.has(name)):
        log.warning("smp.resume_from_checkpoint(): there is no %s: the optimizer keeps its state", saved.folder / name)
    elif optimizer is not None:
        values = _read(saved.path(name), mmap=False)
        try:
            optimizer.load_state_dict(values)
            if not saved.save:
                log.warning("smp.resume_from_checkpoint(): no list of files says that %s belongs to %s", name, tag)
        except ValueError as error:
            if saved.save:
                raise
            log.warning("smp.resume_from_checkpoint(): %s is of another run and not loaded: %s", name, error)
    return _content(saved, f"user_content_{tag}")


def _content(saved: SavedFiles, name: str) -> Any:
    """Return the user's content in the file ``name``; None if the save had none."""
    path = saved.current(saved.folder / name)
    # The script's own objects, of any class.
    return (
        torch.load(path, map_location="cpu", weights_only=False)
        if saved.content is not False and path.exists()
        else None
    )


def _when_cut(model: Any, load: Callable[[], None]) -> None:
    assert state.ranks is not None  # as there is a model
    if model.partitioned or state.ranks.pp_size == 1:
        load()
    else:
        model.register_post_partition_hook(lambda *_: load())


def _read(file: Path, mmap: bool = True) -> Any:
    """Read a file of tensors and plain values. ``mmap`` reads only data that is copied from it."""
    return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)


def _read_whole(saved: SavedFiles, tag: str) -> dict[str, Any]:
    folder = saved.folder
    if not saved.has(tag) and (safe := folder / _SAFE.get(tag, "")).is_file():
        from safetensors.torch import load_file

        return load_file(safe)
    if not saved.has(tag):
        raise FileNotFoundError(f"no checkpoint {folder / tag}{partial_tags(folder)}")
    return _read(saved.path(tag))


def _joined(saved: SavedFiles, what: str, mmap: bool) -> dict[str, Any]:
    """Join the states of all files: first shards and replicas, then tensor groups, then stages."""
    stages: dict[int, dict[int, list[Any]]] = {}
    for name in sharded_state.in_order(name for name in saved.names if name.startswith(f"{what}_")):
        stage, tensor, *_ = map(int, name.removesuffix(".pt").split("_")[1:])
        stages.setdefault(stage, {}).setdefault(tensor, []).append(_read(saved.path(name), mmap))
    if what == "model":
        of_shards, of_tensor_group = sharded_state.joined_model, of_tensors.joined_models
    else:
        of_shards, of_tensor_group = sharded_state.joined_optimizer, of_tensors.joined_optimizers
    return of_shards([of_tensor_group(list(map(of_shards, tensors.values()))) for tensors in stages.values()])


def _load_parts(saved: SavedFiles, model: Any, optimizer: Any, strict: bool, shares: bool) -> None:
    """Load this rank's part, put together from several files where the cut was another.

    ``shares``: the optimizer's state, too, and not only its masters and loss scale.
    """
    assert state.ranks is not None  # as there is a model
    own, shared, wanted = _own(model), sharded.of(model), model_state.held(model)
    tensor_ranks = state.ranks.tp_size

    def as_saved(part: dict[str, Any]) -> bool:
        return sharded_state.fits(part, shared) and of_tensors.fits(part, tensor_ranks)

    values = _read(saved.path(f"model_{own}")) if saved.has(f"model_{own}") else {}
    same = as_saved(values)
    if not wanted <= values.keys() or not same:
        values = _joined(saved, "model", mmap=True)
    model_state.load_now(model, values, True, strict)
    if optimizer is None:
        return
    if not any(name.startswith("optimizer_") for name in saved.names):
        raise FileNotFoundError(f"no optimizer in {saved.folder}: load_optimizer=False resumes without")
    # The optimizer keeps the tensors that it is given, so they are read and not mapped.
    mine = f"optimizer_{_own(model, optimizer)}"
    found = _read(saved.path(mine), mmap=False) if saved.has(mine) else None
    if found is not None and HELD not in found:
        raise ValueError(
            f"{saved.path(mine)}: expected the optimizer's part of smp.save_checkpoint() with the key {HELD!r}, found "
            f"{', '.join(map(str, found))}. load_optimizer=False resumes the model alone"
        )
    if found is None or not set(optimizer.stepped) <= set(found[HELD]) or not (same and as_saved(found)):
        found = _joined(saved, "optimizer", mmap=False)
    if not shares:
        found = {**found, "state": {}}
    optimizer.load_state_dict(found)
