"""One save, and one search for a checkpoint, of all ranks together."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from smddp import files
from smddp.modelparallel.checkpointing import saved_files
from smddp.modelparallel.checkpointing.objects import allgather
from smddp.modelparallel.checkpointing.saved_files import SavedFiles
from smddp.modelparallel.state import state

T = TypeVar("T")


class Save:
    """One save of all ranks, see `saved_files`. Collective: creation and `finish`.

    Raises ValueError on every rank if the ranks save to different paths or under different tags.
    """

    def __init__(self, path: Path, tag: str, partial: bool) -> None:
        self._path, self._tag, self._partial = path, tag, partial
        self._folder = path / f"{tag}_partial" if partial else path
        self._written: list[Path] = []
        self._error: Exception | None = None
        wanted = f"path={os.fspath(path)!r}, tag={tag!r}, partial={partial}"
        of_all = allgather((wanted, uuid.uuid4().hex[:12]))
        different = {given: rank for rank, (given, _) in reversed(list(enumerate(of_all)))}
        if len(different) > 1:
            given = "; ".join(f"rank {rank}: {each}" for each, rank in sorted(different.items(), key=lambda x: x[1]))
            raise ValueError(
                f"smp.save_checkpoint(): the ranks save to different places, {given}. Choose them on one rank"
            )
        self._id = of_all[0][1]

    def add(self, value: Any, name: str) -> None:
        """Write a file of this rank under a temporary name; `finish` raises its errors."""
        path = self._folder / name
        self._written.append(path)
        if self._error is None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with open(saved_files.temporary(path, self._id), "wb") as file:
                    torch.save(value, file)
                    file.flush()
                    os.fsync(file.fileno())
            except Exception as error:
                self._error = error

    def finish(self, user_content: Any, afterwards: Callable[[], None] | None = None) -> None:
        """Make the files of all ranks the checkpoint, and its tag the newest; then run `afterwards` on rank 0.

        Raises OSError on every rank if one rank could not write; the checkpoint before this save then still loads.
        """
        _, ranks = state.made("save_checkpoint()")
        has_content = user_content is not None
        if has_content and ranks.rank == 0:
            self.add(user_content, saved_files.CONTENT if self._partial else f"user_content_{self._tag}")
        names = [path.relative_to(self._folder).as_posix() for path in self._written]
        try:
            of_all = self._exchange((names, has_content))
        except OSError:
            for path in self._written:
                saved_files.temporary(path, self._id).unlink(missing_ok=True)
            raise
        names = [name for of_rank, _ in of_all for name in of_rank]
        # Nodes without a common file system have a manifest of the parts each.
        if ranks.rank == 0 or (self._partial and ranks.local_rank == 0):
            manifest = saved_files.manifest_of(self._path, self._tag, self._partial)
            self._attempt(lambda: saved_files.write_manifest(manifest, self._id, names, of_all[0][1], self._marks()))
        self._exchange(None)
        self._attempt(lambda: saved_files.rename(self._written, self._id))
        self._exchange(None)
        if ranks.local_rank == 0 and self._partial:
            self._attempt(lambda: saved_files.remove_other_parts(self._folder, self._id, names))
        if ranks.rank == 0:
            self._attempt(lambda: files.write_text(self._path / "newest", self._tag))
            if afterwards is not None:
                self._attempt(afterwards)
        self._exchange(None)

    def _marks(self) -> dict[str, list[int]]:
        """Return the mark of the whole model's file, which scripts may replace with torch.save."""
        path = self._folder / self._tag
        if self._partial or path not in self._written:
            return {}
        return {self._tag: saved_files.mark(saved_files.temporary(path, self._id))}

    def _attempt(self, function: Callable[[], None]) -> None:
        try:
            function()
        except OSError as error:
            self._error = error

    def _exchange(self, value: T) -> list[T]:
        """Return the values of all ranks. Raises OSError on every rank if one has failed."""
        of_all = allgather((value, None if self._error is None else f"{type(self._error).__name__}: {self._error}"))
        failed = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(of_all) if text is not None]
        if failed:
            raise OSError(
                f"smp.save_checkpoint() of tag {self._tag!r} in {self._path} failed on {'; '.join(failed)}"
            ) from self._error
        return [value for value, _ in of_all]


def find(folder: Path, tag: str | None, partial: bool) -> tuple[SavedFiles, str]:
    """(the files of the checkpoint, its tag). Collective.

    Raises RuntimeError on every rank if the ranks find files of different saves.
    """
    saved, error = None, None
    try:
        tag = saved_files.newest(folder) if tag is None else tag
        saved = saved_files.of(folder, tag, partial)
    except (OSError, ValueError) as wrong:
        error = wrong
    of_all = allgather((tag, saved.save if saved else None, None if error is None else str(error)))
    if error is not None:
        raise error
    failed = [f"rank {rank}: {text}" for rank, (_, _, text) in enumerate(of_all) if text is not None]
    if failed:
        raise FileNotFoundError(f"smp.resume_from_checkpoint() found no checkpoint on {'; '.join(failed)}")
    if len(set(of_all)) > 1:
        raise RuntimeError(
            "smp.resume_from_checkpoint(): the ranks found different saves, (tag, save) by rank: "
            f"{[each[:2] for each in of_all]}. Give every rank the same tag, and the files of the same save"
        )
    assert saved is not None and tag is not None  # else there is an error
    return saved, tag
