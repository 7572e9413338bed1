"""Checkpoints in a directory (or under an `s3://` name): DCP's format with crash-consistent writes.

Each save writes data files under unique names, then replaces `.metadata`, the only list of valid files. Until then the
previous checkpoint loads. During a save, a record `.incomplete-TOKEN` names the files to write and the ranks that
write them.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import os
import pickle
import re
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from smddp.sagemaker.distributed.checkpoint import layout
from smddp.sagemaker.distributed.checkpoint.places import PART_DIRECTORY
from smddp.sagemaker.distributed.checkpoint.posix_filesystem import PARTIAL, PosixFileSystem
from smddp.sagemaker.distributed.checkpoint.s3_filesystem import S3FileSystem, is_s3_uri
from smddp.text import named_ranks

__all__ = [
    "DistributedFileSystemReader",
    "DistributedFileSystemWriter",
    "PosixFileSystem",
    "S3FileSystem",
    "is_s3_uri",
    "path_to_file_system",
]

METADATA = ".metadata"
INCOMPLETE = ".incomplete-"
# Saves that this process coordinates and that have not ended.
_under_way: set[str] = set()
_RANK_OF_FILE = re.compile(r"__(\d+)_")


@dataclasses.dataclass
class _Prefix:
    """Beginning of the names of a rank's files, as torch's `FileSystemWriter` reads it from a plan."""

    prefix: str


def path_to_file_system(
    path: str | os.PathLike, s3_region: str | None = None, s3client_config: Any = None
) -> PosixFileSystem | S3FileSystem:
    """Returns the file system that holds ``path``."""
    return S3FileSystem(s3_region, s3client_config) if is_s3_uri(path) else PosixFileSystem()


class DistributedFileSystemWriter(FileSystemWriter):
    """DCP's writer of one checkpoint.

    Args:
        path: directory or `s3://` name of the checkpoint.
        s3_region, s3client_config: as in `S3FileSystem`.
        pre_write_hooks, post_write_hooks: functions of the writer, called on each rank before and after it writes its
            data; in the background if the save is asynchronous.
        options: the other options of torch's `FileSystemWriter`.

    Raises:
        ImportError: an `s3://` name without s3fs.
    """

    fs: PosixFileSystem | S3FileSystem  # type: ignore[assignment]  # torch declares its own, for directories

    def __init__(
        self,
        path: str | os.PathLike,
        *,
        s3_region: str | None = None,
        s3client_config: Any = None,
        pre_write_hooks: Iterable[Callable[[Any], None]] = (),
        post_write_hooks: Iterable[Callable[[Any], None]] = (),
        **options: Any,
    ) -> None:
        super().__init__(path, **options)
        self.fs = path_to_file_system(path, s3_region, s3client_config)
        self.path = self.fs.init_path(path)
        self.pre_write_hooks, self.post_write_hooks = list(pre_write_hooks), list(post_write_hooks)
        self.is_coordinator = False
        # The save sets both: the layout stored in the metadata, and the global ranks in the group's order.
        self.layout: dict[str, Any] = {"kind": layout.SHARDED, "slices": 1}
        self.ranks: list[int] = []
        self._token = ""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        self.is_coordinator = is_coordinator

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self.fs.mkdir(self.path)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Names the files of this save and records its start. Called on the coordinator."""
        named = [self.named(plan, i, self.new_token()) for i, plan in enumerate(plans)]
        self.begin(named)
        return named

    def new_token(self) -> str:
        """Returns a new token that makes this save's file names unique."""
        self._token = self._token or uuid.uuid4().hex[:12]
        return self._token

    def named(self, plan: SavePlan, index: int, token: str) -> SavePlan:
        """``plan`` of the group's rank ``index``, with the prefix of its file names."""
        self._token = token
        return dataclasses.replace(plan, storage_data=_Prefix(f"__{index}_{token}_"))

    def begin(self, plans: Sequence[SavePlan]) -> None:
        """On the coordinator: records the files that ``plans`` will write."""
        files: dict[str, int] = {}
        for index, plan in enumerate(plans):
            rank = self.ranks[index] if index < len(self.ranks) else index
            count = self.thread_count if self.single_file_per_rank else len(plan.items)
            files |= {f"{plan.storage_data.prefix}{i}.distcp": rank for i in range(count)}
        self._remove_remains()
        _under_way.add(self._token)
        text = json.dumps({"ranks": self.ranks, "files": files}, indent=1)
        self.fs.replace_file(self.fs.concat_path(self.path, INCOMPLETE + self._token), text.encode())

    def abandon(self) -> None:
        """Marks the save as failed: the next save may remove its files."""
        _under_way.discard(self._token)

    def _remove_remains(self) -> None:
        """Removes the files of unfinished saves into this directory."""
        names = self.fs.ls(self.path)
        for record in [name for name in names if name.startswith(INCOMPLETE) and not name.endswith(PARTIAL)]:
            token = record[len(INCOMPLETE) :]
            if token not in _under_way:
                for name in [name for name in names if f"_{token}_" in name] + [record]:
                    with contextlib.suppress(OSError):
                        self.fs.rm_file(self.fs.concat_path(self.path, name))

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's files, between the hooks.

        Raises:
            OSError: something could not be written, also where one of several writing threads met it.
        """
        for hook in self.pre_write_hooks:
            hook(self)
        written = super().write_data(plan, planner)
        missing = len(plan.items) - len(written.value())
        if missing:
            raise OSError(f"{missing} of {len(plan.items)} entries could not be written to {self.path}")
        for hook in self.post_write_hooks:
            hook(self)
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publishes this save as the loadable checkpoint. Called on the coordinator after all data is written."""
        metadata = copy.copy(metadata)
        metadata.storage_data = {result.index: result.storage_data for part in results for result in part}
        metadata.storage_meta = self.storage_meta()
        layout.attach(metadata, self.layout)
        path = self.fs.concat_path(self.path, METADATA)
        before = self._files_of(path)
        self.fs.replace_file(path, pickle.dumps(metadata))
        _under_way.discard(self._token)
        after = {info.relative_path for info in metadata.storage_data.values()}
        for name in [INCOMPLETE + self._token, *(before - after)]:
            with contextlib.suppress(OSError):
                self.fs.rm_file(self.fs.concat_path(self.path, name))

    def _files_of(self, path: Any) -> set[str]:
        """Returns the data files of the existing checkpoint."""
        try:
            with self.fs.create_stream(path, "rb") as stream:
                return {info.relative_path for info in pickle.load(stream).storage_data.values()}
        except (OSError, pickle.UnpicklingError, EOFError):
            return set()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return is_s3_uri(checkpoint_id) or FileSystemWriter.validate_checkpoint_id(checkpoint_id)


class DistributedFileSystemReader(FileSystemReader):
    """DCP reader of one checkpoint, which rejects incomplete checkpoints.

    Reads a directory `tp{r}_ep{r}` or `tp{degree}-{r}` with one tensor rank's part of the model together with its
    siblings. So it loads into any tensor-parallel degree, also with more tensor ranks than sibling directories.

    Args:
        path: directory or `s3://` name of the checkpoint.
        s3_region, s3client_config: as in `S3FileSystem`.

    Raises:
        ImportError: an `s3://` name without s3fs.
    """

    fs: PosixFileSystem | S3FileSystem  # type: ignore[assignment]  # torch declares its own, for directories

    def __init__(
        self, path: str | os.PathLike, *, s3_region: str | None = None, s3client_config: Any = None, **options: Any
    ) -> None:
        super().__init__(path, **options)
        self.fs = path_to_file_system(path, s3_region, s3client_config)
        self.path = self.fs.init_path(path)
        # Of many ranks that read the same checkpoint, one looks at all its files.
        self.checks_files = True
        self._metadata: Metadata | None = None

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        super().reset(checkpoint_id)
        self._metadata = None

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """DCP's metadata of the checkpoint; read and checked once.

        Raises:
            FileNotFoundError: the checkpoint is absent, its save did not end, or files are missing; the message names
                the files and the ranks that wrote them.
        """
        if self._metadata is None:
            self._metadata = self._read(self._parts())
        return self._metadata

    def _parts(self) -> list[str]:
        """Returns the directories of the checkpoint, relative to the path."""
        name = os.path.basename(os.fspath(self.path).rstrip("/"))
        if not PART_DIRECTORY.fullmatch(name):
            return ["."]
        own = self._load(".")
        if own is not None and layout.of(own).get("slices", 1) == 1:
            return ["."]
        parent = self.fs.concat_path(self.path, "..")
        siblings = {f"../{n}": self._load(f"../{n}") for n in self.fs.ls(parent) if PART_DIRECTORY.fullmatch(n)}
        whole = [part for part, metadata in siblings.items() if metadata and layout.of(metadata).get("slices", 1) == 1]
        if own is None and whole and len(siblings) == 1 and not self.fs.ls(self.path):
            # The run has more tensor ranks than the save: its only directory holds the whole checkpoint.
            return whole
        counts = {layout.of(metadata).get("slices", 1) for metadata in siblings.values() if metadata}
        if len(counts) > 1 or (counts and len(siblings) > max(counts)):
            raise ValueError(
                f"the directories in {parent} are of different saves, some with another tensor-parallel degree: "
                f"{', '.join(part[3:] for part in siblings)}. Save into a new directory each time"
            )
        if counts and len(siblings) < max(counts):
            raise ValueError(
                f"{parent} holds {len(siblings)} of the {max(counts)} parts of a checkpoint that tensor-parallel ranks "
                f"saved, and not all of them are here: {', '.join(part[3:] for part in siblings)}"
            )
        return list(siblings) or ["."]

    def _load(self, part: str) -> Metadata | None:
        path = self.fs.concat_path(self.fs.concat_path(self.path, part), METADATA)
        if not self.fs.exists(path):
            return None
        with self.fs.create_stream(path, "rb") as stream:
            return pickle.load(stream)

    def _read(self, parts: list[str]) -> Metadata:
        whole: Metadata | None = None
        for part in parts:
            metadata = self._load(part)
            if metadata is None:
                raise FileNotFoundError(self._why_incomplete(part))
            if self.checks_files:
                self._check_files(part, metadata)
            if part != ".":
                for info in metadata.storage_data.values():
                    info.relative_path = f"{part}/{info.relative_path}"
            whole = metadata if whole is None else _union(whole, metadata)
        assert whole is not None  # there is at least one part
        storage_meta = getattr(whole, "storage_meta", None)
        if storage_meta is not None:
            storage_meta.load_id = self.load_id
        return whole

    def _check_files(self, part: str, metadata: Metadata) -> None:
        least: dict[str, int] = {}
        for info in metadata.storage_data.values():
            least[info.relative_path] = max(least.get(info.relative_path, 0), info.offset + info.length)
        directory = self.fs.concat_path(self.path, part)
        wrong = []
        for name, size in least.items():
            path = self.fs.concat_path(directory, name)
            if not self.fs.exists(path):
                wrong.append(f"{name} is missing")
            elif self.fs.size(path) < size:
                wrong.append(f"{name} has {self.fs.size(path)} bytes of {size}")
        if wrong:
            ranks = layout.of(metadata).get("ranks", [])
            writers = sorted({_writer(name.split(" ")[0], ranks) for name in wrong})
            raise FileNotFoundError(
                f"the checkpoint in {directory} is damaged: {', '.join(wrong)} (written by "
                f"{', '.join(writers)}); load another checkpoint"
            )

    def _why_incomplete(self, part: str) -> str:
        directory = self.fs.concat_path(self.path, part)
        names = self.fs.ls(directory)
        records = [name for name in names if name.startswith(INCOMPLETE) and not name.endswith(PARTIAL)]
        if not records:
            where = self.fs.ls(self.fs.concat_path(directory, ".."))
            siblings = ", ".join([n for n in where if not n.startswith(".")][:8]) or "nothing"
            problem = "has no .metadata file, so it does not hold a checkpoint" if names else "does not exist"
            return f"{directory} {problem}; its parent directory contains: {siblings}"
        details = []
        for record in records:
            with self.fs.create_stream(self.fs.concat_path(directory, record), "rb") as stream:
                files: dict[str, int] = json.loads(stream.read())["files"]
            missing = {name: rank for name, rank in files.items() if name not in names}
            ranks = set(missing.values())
            if missing:
                details.append(f"no data of {named_ranks(ranks)} (missing: {', '.join(missing)})")
            else:
                details.append("all ranks wrote their data, but the save was not finalized")
        problems = "; ".join(details)
        return f"the checkpoint in {directory} is incomplete, its save did not end: {problems}. Load an earlier one"

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return is_s3_uri(checkpoint_id) or FileSystemReader.validate_checkpoint_id(checkpoint_id)


def _writer(name: str, ranks: list[int]) -> str:
    found = _RANK_OF_FILE.match(name)
    index = int(found[1]) if found else -1
    return f"rank {ranks[index]}" if 0 <= index < len(ranks) else "an unknown rank"


def _union(one: Metadata, other: Metadata) -> Metadata:
    """Merges the entries of both checkpoints into ``one``, which takes precedence."""
    for name, entry in other.state_dict_metadata.items():
        mine = one.state_dict_metadata.setdefault(name, entry)
        if mine is not entry and isinstance(mine, TensorStorageMetadata):
            assert isinstance(entry, TensorStorageMetadata)  # a tensor in one part is a tensor in all parts
            known = {tuple(chunk.offsets) for chunk in mine.chunks}
            mine.chunks.extend(chunk for chunk in entry.chunks if tuple(chunk.offsets) not in known)
    # Every part holds the unsharded entries; keep those of the first part.
    one.planner_data = {**(other.planner_data or {}), **(one.planner_data or {})}
    one.storage_data = {**other.storage_data, **one.storage_data}
    return one
