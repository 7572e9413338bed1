"""Hugging Face's safetensors files, written tensor by tensor and read slice by slice.

A file is eight bytes with the header's length, a JSON header with each tensor's type, shape and place, and the
tensors' bytes. The header is known before any tensor, so nothing but the tensor being written needs memory.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from smddp.text import parse_size as bytes_of

ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_TYPES = {name: dtype for dtype, name in _NAMES.items()}
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class Entry:
    """Name, dtype and shape of a tensor to write."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def parse_size(size: int | str) -> int:
    """Bytes of 5_000_000_000, "5GB" or "4GiB".

    Raises:
        ValueError, TypeError: none of these, or not positive.
    """
    if isinstance(size, str):
        size = bytes_of(size, _UNITS, "a number of bytes, or text such as '5GB' or '4GiB'")
    if type(size) is not int:
        raise TypeError(f"a size must be an int or text such as '5GB', got {size!r}")
    if size <= 0:
        raise ValueError(f"a size must be positive, got {size}")
    return size


def split(entries: Sequence[Entry], most_bytes: int) -> list[list[Entry]]:
    """Groups ``entries`` into files of at most ``most_bytes`` each; a larger tensor gets a separate file."""
    files: list[list[Entry]] = [[]]
    room = most_bytes
    for entry in entries:
        if files[-1] and entry.bytes > room:
            files.append([])
            room = most_bytes
        files[-1].append(entry)
        room -= entry.bytes
    # Wide types first, so that each tensor starts where its type may start.
    return [sorted(file, key=lambda e: -e.dtype.itemsize) for file in files]


def file_names(count: int) -> list[str]:
    """Returns transformers' names for ``count`` files."""
    if count == 1:
        return [ONE_FILE]
    return [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


class FileWriter:
    """Writes one file, tensor by tensor, in the order of ``entries``; it appears when `close` has run.

    Raises:
        TypeError: a type that safetensors does not have.
    """

    def __init__(self, path: str | os.PathLike, entries: Sequence[Entry]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for entry in entries:
            if entry.dtype not in _NAMES:
                raise TypeError(f"{entry.name}: safetensors has no {entry.dtype}")
            places = [at, at + entry.bytes]
            header[entry.name] = {"dtype": _NAMES[entry.dtype], "shape": entry.shape, "data_offsets": places}
            at += entry.bytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._path = Path(path)
        self._partial = self._path.with_name(self._path.name + ".part")
        self._stream = self._partial.open("wb")
        self._stream.write(struct.pack("<Q", len(text)) + text)

    def write(self, tensor: torch.Tensor) -> None:
        """The next tensor, whole."""
        flat = tensor.detach().to("cpu").contiguous().reshape(-1)
        if flat.numel():
            self._stream.write(flat.view(torch.uint8).numpy().data)

    def close(self) -> None:
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        os.replace(self._partial, self._path)


def write_index(directory: str | os.PathLike, files: Iterable[tuple[str, Sequence[Entry]]]) -> None:
    """Writes the index that maps tensors to files."""
    where = {entry.name: name for name, entries in files for entry in entries}
    total = sum(entry.bytes for _, entries in files for entry in entries)
    text = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    (Path(directory) / INDEX).write_text(json.dumps(text, indent=2) + "\n", encoding="utf-8")


def files_of(directory: str | os.PathLike) -> list[Path]:
    """Returns the safetensors files of a model.

    Raises:
        FileNotFoundError: the directory has none, or files of the index are missing.
    """
    directory = Path(directory)
    index = directory / INDEX
    if index.exists():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    else:
        names = [ONE_FILE]
    missing = [name for name in names if not (directory / name).exists()]
    if missing:
        raise FileNotFoundError(
            f"{directory} has no {', '.join(missing)}: expected {ONE_FILE}, or {INDEX} and its files"
        )
    return [directory / name for name in names]


def _header(path: Path) -> dict[str, Any]:
    with path.open("rb") as stream:
        (size,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(size))
    header.pop("__metadata__", None)
    return header


class SafetensorsReader(dcp.StorageReader):
    """DCP reader of a Hugging Face directory: each rank reads only its part of each tensor."""

    def __init__(self, directory: str | os.PathLike) -> None:
        self.path = Path(directory)
        self._file_of: dict[str, Path] = {}

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        if checkpoint_id is not None:
            self.path = Path(checkpoint_id)

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """Every tensor as one chunk.

        Raises:
            FileNotFoundError: as `files_of` does.
            ValueError: a type that torch does not have.
        """
        entries: dict[str, Any] = {}
        for path in files_of(self.path):
            for name, about in _header(path).items():
                if about["dtype"] not in _TYPES:
                    raise ValueError(f"{path}: {name} has type {about['dtype']}, which is not supported")
                size = torch.Size(about["shape"])
                chunk = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
                properties = TensorProperties(dtype=_TYPES[about["dtype"]])
                entries[name] = TensorStorageMetadata(properties, size, [chunk])
                self._file_of[name] = path
        return Metadata(entries, storage_data={MetadataIndex(n, e.chunks[0].offsets): n for n, e in entries.items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_args: Any, **_kwargs: Any) -> None:
        """Nothing."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copies the requested slices into their tensors, file by file."""
        from safetensors import safe_open

        by_file: dict[Path, list] = {}
        for item in plan.items:
            by_file.setdefault(self._file_of[item.storage_index.fqn], []).append(item)
        for path, items in by_file.items():
            with safe_open(str(path), framework="pt") as file:
                for item in items:
                    target = planner.resolve_tensor(item).detach()
                    if not target.numel():
                        continue
                    if item.lengths:
                        stored = file.get_slice(item.storage_index.fqn)
                        part = stored[tuple(slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths))]
                    else:
                        part = file.get_tensor(item.storage_index.fqn)
                    target.copy_(part.reshape(target.shape))
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return "://" not in os.fspath(checkpoint_id)
