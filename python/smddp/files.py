"""Files that are read within a limit and replaced as a whole."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from pathlib import Path

#: Bytes of the largest file that is read into memory: a dump of many groups has some ten MiB.
LIMIT = 256 << 20


def read_text(path: str | os.PathLike[str], limit: int = LIMIT) -> str:
    """Returns the text of a regular file.

    Raises OSError for a file that cannot be opened, ValueError for a device, pipe or folder, for more than `limit`
    bytes, and for text that is not UTF-8. A pipe without a writer does not block.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise ValueError(f"{os.fspath(path)} is not a regular file")
        # The size may grow meanwhile, and is 0 for files of /proc.
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"{os.fspath(path)} has more than {limit} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{os.fspath(path)} is not UTF-8 text ({error.reason} at byte {error.start})") from None


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes a file as a whole: after an error, such as a full disk, the old file is still there.

    The text goes into a temporary file beside it, which is renamed. A device, a pipe, and a file in a folder that
    takes no new files are written in place. Raises OSError.
    """
    target = Path(os.path.realpath(path))
    try:
        before: os.stat_result | None = os.stat(path)
    except FileNotFoundError:
        before = None
    if before is not None and not stat.S_ISREG(before.st_mode):
        _write(os.open(path, os.O_WRONLY), text)
        return
    part = target.with_name(f".smddp-{secrets.token_hex(8)}.part")
    try:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if before is None or error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            # The caller named the target, not the temporary file.
            raise OSError(error.errno, error.strerror, os.fspath(path)) from None
        _write(os.open(path, os.O_WRONLY | os.O_TRUNC), text)
        return
    try:
        if before is not None:
            os.fchmod(descriptor, stat.S_IMODE(before.st_mode))
        _write(descriptor, text)
        os.replace(part, target)
    except BaseException as error:
        os.unlink(part)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, os.fspath(path)) from None
        raise


def _write(descriptor: int, text: str) -> None:
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
