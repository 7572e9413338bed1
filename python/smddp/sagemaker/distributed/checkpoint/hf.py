"""Full checkpoints in Hugging Face's format, interchangeable with plain transformers."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from smddp.formats import exact
from smddp.sagemaker.distributed.checkpoint import safetensors_files as files
from smddp.sagemaker.distributed.checkpoint.hf_names import Target, targets
from smddp.sagemaker.distributed.checkpoint.participants import (
    Failure,
    Participants,
    attempt,
    device_of,
    raise_failures,
)
from smddp.sagemaker.distributed.checkpoint.reshaped import fill
from smddp.sagemaker.distributed.checkpoint.state_dict_loader import load
from smddp.sagemaker.fsdp.full_state import whole
from smddp.sagemaker.hf import is_pretrained
from smddp.sagemaker.names import plain_name
from smddp.sagemaker.private_names import SHARDED_GROUP, TIED_KEYS, is_sharded_tensor


@exact()
def save_pretrained(model: nn.Module, directory: str | os.PathLike, max_shard_size: int | str = "5GB") -> None:
    """Writes the whole model so that `AutoModelForCausalLM.from_pretrained(directory)` loads it. Collective.

    Global rank 0 writes `model.safetensors` (or several files and their index), `config.json` and
    `generation_config.json`. Tensors are gathered one after the other, so no rank holds more than its part and one
    of them. Tied weights are written once.

    Args:
        model: a transformers model: plain, FSDP1, FSDP2, tensor-parallel, or a mix; every rank of the world calls.
        directory: made if missing; a model that is there is replaced.
        max_shard_size: most bytes of a file, or text such as "5GB" or "4GiB".

    Raises:
        TypeError, ValueError: not a transformers model, or an invalid size.
        OSError, CheckpointError: on every rank, if rank 0 could not write.
    """
    most = files.parse_size(max_shard_size)
    inner = _transformers_model(model)
    world = Participants(None)
    state: dict[str, Any] = get_model_state_dict(model)
    stored = {target.name: target for target in targets(model, state) if not _is_tied(inner, target.name)}
    parts = files.split([target.entry(state) for target in stored.values()], most)
    named = list(zip(files.file_names(len(parts)), parts))
    directory = Path(directory)

    # Every rank gathers to the end, whatever happens to rank 0's disk. What several targets are made of, once.
    held: tuple[str, ...] = ()
    parts_held: list[torch.Tensor] = []
    failure = _failure(lambda: directory.mkdir(parents=True, exist_ok=True))
    for name, part in named:
        writer: files.FileWriter | None = None
        if world.is_coordinator and failure is None:
            opened = attempt(partial(files.FileWriter, directory / name, part))
            if isinstance(opened, Failure):
                failure = opened
            else:
                writer = opened
        for entry in part:
            target = stored[entry.name]
            if target.sources != held:
                parts_held.clear()
                held, parts_held = target.sources, [_gathered(state[source]) for source in target.sources]
            tensor = target.join(parts_held)
            if writer is not None and failure is None:
                failure = _failure(partial(writer.write, tensor))
            del tensor
        if writer is not None and failure is None:
            failure = _failure(writer.close)
    if world.is_coordinator and failure is None:
        failure = _failure(lambda: _write_rest(inner, directory, named))
    failure = world.broadcast(failure)
    if failure is not None:
        raise_failures(f"saving {directory}", {world.coordinator: failure})


def _failure(action: Callable[[], object]) -> Failure | None:
    """Returns the error that ``action`` raises; None without an error."""
    result = attempt(action)
    return result if isinstance(result, Failure) else None


def load_pretrained(model: nn.Module, directory: str | os.PathLike) -> None:
    """Loads a Hugging Face directory of safetensors into ``model``, in place. Collective.

    Each rank reads, of each tensor, only the part it holds.

    Args:
        model: as in `save_pretrained`, with parameters allocated, of the class that the directory holds.
        directory: `model.safetensors`, or `model.safetensors.index.json` and its files.

    Raises:
        TypeError: not a transformers model.
        ValueError: names or sizes that are not the model's, with the nearest.
        FileNotFoundError: no safetensors there.
    """
    inner = _transformers_model(model)
    state: dict[str, Any] = get_model_state_dict(model)
    wanted: dict[str, torch.Tensor] = {}
    joined: list[Target] = []
    for target in targets(model, state):
        if _is_tied(inner, target.name):
            continue
        if target.plain:
            wanted[target.name] = state[target.name]
        else:
            entry = target.entry(state)
            joined.append(target)
            wanted[target.name] = torch.empty(entry.shape, dtype=entry.dtype)
    try:
        load(wanted, storage_reader=files.SafetensorsReader(directory))
    except ValueError as error:
        raise ValueError(
            f"{error}. If transformers renames or joins this model's weights as it loads them, load it on rank 0 with "
            "from_pretrained and spread it: tsm.transform(model, load_state_dict_from_rank0=True)"
        ) from None
    together: dict[tuple[str, ...], list[Target]] = {}
    for target in joined:
        together.setdefault(target.sources, []).append(target)
    for sources, made in together.items():
        for source, part in zip(sources, made[0].split(*(wanted.pop(target.name) for target in made))):
            fill(state[source], part)
    first = inner.get_input_embeddings()
    embedding = next((f"{name}.weight" for name, module in inner.named_modules() if module is first), "")
    for name in state:
        if _is_tied(inner, name):
            state[name] = state[_tied_to(inner, name) or plain_name(embedding)]
    set_model_state_dict(model, state)


def _transformers_model(model: nn.Module) -> Any:
    for module in model.modules():
        if hasattr(module, "config") and hasattr(module.config, "save_pretrained"):
            return module
    raise TypeError(f"a transformers model is needed, with a config; {type(model).__name__} holds none")


def _ties(inner: Any) -> Any:
    """The names that transformers ties, as it lists them: names or patterns, in newer versions with what each is."""
    if not getattr(inner.config, "tie_word_embeddings", False):
        return {}
    if not hasattr(inner, TIED_KEYS.attribute):
        # A script's module around a model has no list; transformers without one is an error.
        for model in filter(is_pretrained, inner.modules()):
            TIED_KEYS.of(model)
        return {}
    return TIED_KEYS.of(inner) or {}


def _tied_to(inner: Any, name: str) -> str | None:
    """Returns the parameter that ``name`` is tied to, if this version of transformers reports it."""
    ties = _ties(inner)
    return ties.get(name) if isinstance(ties, dict) else None


def _is_tied(inner: Any, name: str) -> bool:
    """Returns True for a name that `from_pretrained` fills from a tied tensor."""
    return any(name == tie or re.fullmatch(tie, name) for tie in _ties(inner))


def _gathered(tensor: Any) -> torch.Tensor:
    """Returns the full tensor. Collective over the ranks that shard it."""
    if not is_sharded_tensor(tensor):
        return whole(tensor)
    # FSDP1 without a mesh: some rows per rank, none at the end. ShardedTensor.gather insists on a GPU where the backend
    # could use one.
    group = SHARDED_GROUP.of(tensor)
    device = device_of(group)
    mine = [(shard.metadata.shard_offsets[0], shard.tensor.to(device)) for shard in tensor.local_shards()]
    size = tensor.size()
    most = -(-size[0] // dist.get_world_size(group))
    sent = torch.zeros((most, *size[1:]), dtype=tensor.dtype, device=device)
    place = torch.zeros(2, dtype=torch.int64, device=device)
    for offset, rows in mine:
        sent[: len(rows)] = rows
        place[0], place[1] = offset, len(rows)
    parts = [torch.empty_like(sent) for _ in range(dist.get_world_size(group))]
    places = [torch.empty_like(place) for _ in parts]
    dist.all_gather(places, place, group=group)
    dist.all_gather(parts, sent, group=group)
    out = torch.empty(size, dtype=tensor.dtype, device=device)
    for part, (offset, count) in zip(parts, (p.tolist() for p in places)):
        out[offset : offset + count] = part[:count]
    return out


def _class_of(inner: Any) -> type:
    """Returns the model's class, without the class that FSDP2 derives from it."""

    def is_torchs(kind: type) -> bool:
        return any(base.__module__.startswith("torch.distributed") for base in kind.__mro__)

    return next(kind for kind in type(inner).__mro__ if not is_torchs(kind))


def _write_rest(inner: Any, directory: Path, named: list[tuple[str, list[files.Entry]]]) -> None:
    config = copy.deepcopy(inner.config)
    config.architectures = [_class_of(inner).__name__]
    dtypes = {entry.dtype for _, part in named for entry in part if entry.dtype.is_floating_point}
    if len(dtypes) == 1:
        config.dtype = str(dtypes.pop()).removeprefix("torch.")
    config.save_pretrained(directory)
    if getattr(inner, "generation_config", None) is not None:
        inner.generation_config.save_pretrained(directory)
    keep = {name for name, _ in named}
    if len(named) > 1:
        files.write_index(directory, named)
    else:
        (directory / files.INDEX).unlink(missing_ok=True)
    # An earlier model of other sizes must not be found instead of this one.
    for path in directory.glob("model*.safetensors"):
        if path.name not in keep:
            path.unlink()
