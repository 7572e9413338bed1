"""Files that are read within a limit and replaced as a whole."""

from __future__ import annotations

import errno
import os
import stat

#: Bytes of the largest file that is read into memory: a dump of many groups has some ten MiB.
LIMIT = 256 << 20


def read_text(path: str | os.PathLike[str], limit: int = LIMIT) -> str:
    """Returns the text of a regular file.

    Raises OSError for a file that cannot be opened, ValueError for a device, pipe or folder, for more than `limit`
    bytes, and for text that is not UTF-8. A pipe without a writer does not block.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{os.fspath(path)} is not a regular file")
    with open(descriptor, "rb") as file:
        # The size may grow meanwhile, and is 0 for files of /proc.
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"{os.fspath(path)} has more than {limit} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{os.fspath(path)} is not UTF-8 text ({error.reason} at byte {error.start})") from None


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raises OSError if `write_text` cannot write there now, before work of which the file is the result."""
    descriptor, part = _opened(path, truncate=False)
    os.close(descriptor)
    if part is not None:
        os.unlink(part)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes a file as a whole: after an error, such as a full disk, the old file is still there.

    The text goes into a temporary file beside it, which is renamed. A device, a pipe, and a file in a folder that
    takes no new files are written in place. Raises OSError.
    """
    descriptor, part = _opened(path, truncate=True)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        if part is not None:
            os.replace(part, os.path.realpath(path))
    except BaseException as error:
        if part is not None:
            os.unlink(part)
        if isinstance(error, OSError):
            # The caller knows the target, not the temporary file.
            raise OSError(error.errno, error.strerror, os.fspath(path)) from None
        raise


def _opened(path: str | os.PathLike[str], truncate: bool) -> tuple[int, str | None]:
    """A descriptor to write to, and the temporary file that it is of; None for a file that is written in place."""
    try:
        before: os.stat_result | None = os.stat(path)
    except FileNotFoundError:
        before = None
    in_place = os.O_WRONLY | os.O_CLOEXEC | (os.O_TRUNC if truncate else 0)
    if before is not None and not stat.S_ISREG(before.st_mode):
        return os.open(path, in_place), None
    part = os.path.join(os.path.dirname(os.path.realpath(path)), f".smddp-{os.urandom(8).hex()}.part")
    try:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if before is not None and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            return os.open(path, in_place), None
        raise OSError(error.errno, error.strerror, os.fspath(path)) from None
    if before is not None:
        os.fchmod(descriptor, stat.S_IMODE(before.st_mode))
    return descriptor, part
