"""Files of a job as text: a compressed archive in base64."""

from __future__ import annotations

import base64
import io
import os
import tarfile
from collections.abc import Sequence
from pathlib import Path


def packed(folder: Path, parts: Sequence[str] = (".",)) -> str:
    """Returns the parts of a folder, without following links."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as archive:
        for part in parts:
            archive.add(folder / part, part)
    return base64.b64encode(data.getvalue()).decode()


def unpack(files: str, folder: Path) -> None:
    """Writes the files of `packed` into a folder. The sender is trusted: it can run any command here."""
    folder.mkdir(parents=True, exist_ok=True)
    # Other users cannot read a file before it has its sender's mode.
    mask = os.umask(0o077)
    try:
        with tarfile.open(fileobj=io.BytesIO(base64.b64decode(files)), mode="r:gz") as archive:
            archive.extractall(folder, filter="fully_trusted")
    finally:
        os.umask(mask)
