"""The files of one save, which become the checkpoint of a tag together or not at all.

A save writes every file under a temporary name, and then the manifest, which lists the files and replaces the manifest
of the save before. From that moment the new files count: a reader takes the temporary one of a listed file while it
exists. Afterwards the files get their own names, and files that the manifest does not list are removed. A crash leaves
the older checkpoint before the manifest is replaced, and the newer one after it.
"""

from __future__ import annotations

import glob
import json
import os
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from smddp import files

# The user's content in the folder of a partial checkpoint.
CONTENT = "user_content.pt"
# Files of partial checkpoints, also under temporary names.
_PART = re.compile(r"(\.)?((model|optimizer)_[0-9_]+|user_content)\.pt(?(1)\.[0-9a-f]+)")
_TAIL_BYTES = 65536


def temporary(path: Path, save: str) -> Path:
    """Return the name under which the save with the identifier ``save`` writes the file ``path``."""
    return path.with_name(f".{path.name}.{save}")


@dataclass(frozen=True)
class SavedFiles:
    """The files of one checkpoint.

    Attributes:
        folder: the directory of the files.
        save: identifier of the save; "" for a checkpoint without a manifest, as earlier versions saved them.
        names: of the files.
        content: whether the save had content of the user; None without a manifest.
        marks: of files that another program may replace, `mark` at the time of the save.
    """

    folder: Path
    save: str
    names: frozenset[str]
    content: bool | None = None
    marks: dict[str, list[int]] = field(default_factory=dict)

    def path(self, name: str) -> Path:
        """Return the path of the file ``name``. Raises FileNotFoundError if it is unknown or missing."""
        path = self.folder / name
        if name not in self.names:
            raise FileNotFoundError(f"the checkpoint in {self.folder} has no file {name}")
        path = self.current(path)
        if not path.exists():
            raise FileNotFoundError(
                f"{path} is missing: the manifest in {self.folder} lists it as a file of the last save. Copy all files "
                "of a checkpoint, and load on ranks that can read all of them"
            )
        return path

    def current(self, path: Path) -> Path:
        """``path``, or its temporary file if the save ended before it was renamed."""
        unfinished = temporary(path, self.save)
        return unfinished if self.save and unfinished.exists() else path

    def replaced(self, name: str) -> bool:
        """True if the file ``name`` differs from the file that the save wrote."""
        path = self.current(self.folder / name)
        return name in self.marks and path.exists() and self.marks[name] != mark(path)

    def has(self, name: str) -> bool:
        """True if the file ``name`` belongs to the checkpoint and exists on this machine."""
        return name in self.names and self.current(self.folder / name).exists()


def mark(path: Path) -> list[int]:
    """Size in bytes and checksum of the end of a file, which in torch's files holds the checksum of every tensor."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL_BYTES))
        return [size, zlib.crc32(file.read())]


def write_manifest(
    manifest: Path, save: str, names: Iterable[str], content: bool, marks: dict[str, list[int]] | None = None
) -> None:
    """Makes the files ``names`` of ``save``, written under temporary names, the checkpoint."""
    manifest.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"save": save, "files": sorted(names), "user_content": content, "marks": marks or {}}, indent=1)
    files.write_text(manifest, text + "\n")
    for path in (manifest, manifest.parent):
        _sync(path)


def _sync(path: Path) -> None:
    """Waits until a file or a folder's entries are on the disk: parts of the save before are removed afterwards."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_manifest(manifest: Path, folder: Path) -> SavedFiles | None:
    """Read the files listed in ``manifest``; None if it does not exist. Raises ValueError if it is not a manifest."""
    try:
        found = json.loads(files.read_text(manifest))
        return SavedFiles(
            folder, found["save"], frozenset(found["files"]), found["user_content"], found.get("marks", {})
        )
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{manifest}: expected the manifest of a checkpoint ({type(error).__name__}: {error})"
        ) from None


def manifest_of(folder: Path, tag: str, partial: bool) -> Path:
    """Return the manifest of the checkpoint of ``tag`` in ``folder``."""
    return folder / f"{tag}_partial" / "files.json" if partial else folder / f"files_{tag}.json"


def of(folder: Path, tag: str, partial: bool) -> SavedFiles:
    """Return the files of the checkpoint of ``tag`` in ``folder``; all existing ones, if it has no manifest.

    Raises FileNotFoundError if a partial checkpoint of that tag does not exist, and ValueError for parts that another
    library wrote.
    """
    parts = folder / f"{tag}_partial" if partial else folder
    if not parts.is_dir():
        raise FileNotFoundError(f"no partial checkpoint {parts}{partial_tags(folder)}")
    found = read_manifest(manifest_of(folder, tag, partial), parts)
    if found is None:
        names = [path.name for path in parts.glob("*_*.pt")] if partial else [tag, f"optimizer_{tag}"]
        if foreign := sorted(name for name in names if partial and name.startswith("fp16_states_")):
            raise ValueError(
                f"{parts} is a partial checkpoint of another library: it has {foreign[0]}, and no files.json. Save the "
                "whole model there with partial=False, and load that with partial=False"
            )
        found = SavedFiles(parts, "", frozenset(names))
    return found


def newest(folder: Path) -> str:
    """Return the tag that was saved last. Raises FileNotFoundError if none was."""
    try:
        return files.read_text(folder / "newest", 4096).strip()
    except FileNotFoundError:
        raise FileNotFoundError(f"no checkpoint in {folder}: the file {folder / 'newest'} is missing") from None


def partial_tags(folder: Path) -> str:
    """Return the partial checkpoints in ``folder``, for a message; "" if there are none."""
    tags = sorted(found.name for found in folder.glob("*_partial"))
    return f"; there are {', '.join(tags)}" if tags else ""


def remove_other_parts(folder: Path, save: str, names: Iterable[str]) -> None:
    """Removes the parts in ``folder`` that older or interrupted saves have left."""
    kept = {each for name in names for each in (name, temporary(folder / name, save).name)}
    for path in folder.iterdir():
        if path.name not in kept and _PART.fullmatch(path.name):
            path.unlink(missing_ok=True)


def rename(paths: Iterable[Path], save: str) -> None:
    """Gives the files of ``save`` their own names; removes the temporary ones of interrupted saves."""
    for path in paths:
        os.replace(temporary(path, save), path)
        for other in path.parent.glob(f".{glob.escape(path.name)}.*"):
            # Not the files of another tag, such as `.ckpt.best.0123456789ab` beside the tag `ckpt`.
            if re.fullmatch(re.escape(f".{path.name}.") + "[0-9a-f]{12}", other.name):
                other.unlink(missing_ok=True)
