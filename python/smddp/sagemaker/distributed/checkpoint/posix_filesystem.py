"""DCP file system with atomic, durable writes: a file appears only when it is complete and synced to disk."""

from __future__ import annotations

import contextlib
import io
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from torch.distributed.checkpoint.filesystem import FileSystem

PARTIAL = ".part"


def _opened(path: Path, mode: str) -> io.IOBase:
    return cast(io.IOBase, path.open(mode))  # typeshed's IO, its type of all files, is not an IOBase


class PosixFileSystem(FileSystem):
    """torch's file system with atomic writes."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[io.IOBase]:
        """Opens ``path``; what is written appears only if the block ends without an error."""
        path = Path(path)
        if "w" not in mode:
            with _opened(path, mode) as stream:
                yield stream
            return
        partial = path.with_name(path.name + PARTIAL)
        try:
            with _opened(partial, mode) as stream:
                yield stream
                # DCP's writer has synced and closed it.
                if not stream.closed:
                    stream.flush()
                    os.fsync(stream.fileno())
            os.replace(partial, path)
        except BaseException:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise

    def concat_path(self, path: str | os.PathLike, suffix: str) -> Path:
        return Path(os.path.normpath(Path(path) / suffix))

    def size(self, path: str | os.PathLike) -> int:
        """Bytes of the file at ``path``."""
        return os.stat(path).st_size

    def ls(self, path: str | os.PathLike) -> list[str]:
        """Names directly under ``path``; none if nothing is there."""
        try:
            return sorted(os.listdir(path))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def replace_file(self, path: str | os.PathLike, data: bytes) -> None:
        """Writes ``data`` to ``path`` atomically, and waits until it is synced to disk."""
        path = Path(path)
        partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}{PARTIAL}")
        with partial.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, path)
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
