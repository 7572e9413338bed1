"""`s3://` checkpoints: names and file system.

The names are plain text and always work. Bytes move through s3fs, which is installed on demand:
`pip install s3fs`.
"""

from __future__ import annotations

import functools
import io
import logging
import os
import posixpath
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemBase

_SCHEME = "s3://"
_PART_BYTES = 64 * 2**20
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.\-]{1,61}[a-z0-9]")
_log = logging.getLogger(__name__)


def is_s3_uri(uri: Any) -> bool:
    """Returns True for an S3 name, also if a `Path` has removed one of its slashes."""
    return bool(re.match(r"s3:/", os.fspath(uri))) if isinstance(uri, (str, os.PathLike)) else False


def format_s3_path(path: str | os.PathLike) -> str:
    """Returns ``path`` as `s3://bucket/key`; restores slashes that a `Path` has removed.

    Raises:
        ValueError: not an S3 name.
    """
    text = os.fspath(path)
    if not is_s3_uri(path):
        raise ValueError(f"not an S3 name: {text!r}; it must start with s3://")
    return _SCHEME + text[len("s3:") :].lstrip("/")


def parse_s3_uri(uri: str | os.PathLike) -> tuple[str, str]:
    """The bucket and the key of `s3://bucket/key`; the key may be empty.

    Raises:
        ValueError: not an S3 name, or a bucket's name that S3 does not allow.
    """
    bucket, _, key = format_s3_path(uri)[len(_SCHEME) :].partition("/")
    if not _BUCKET.fullmatch(bucket):
        raise ValueError(
            f"{os.fspath(uri)!r}: invalid bucket name {bucket!r}: expected 3 to 63 lower-case letters, digits, dots "
            "and hyphens"
        )
    return bucket, key


def get_s3_region_from_uri(uri: str | os.PathLike) -> str:
    """Returns the region of the bucket in ``uri``, as reported by S3.

    Raises:
        ValueError: not an S3 name.
        ImportError: boto3 is not installed.
    """
    bucket, _ = parse_s3_uri(uri)
    try:
        import boto3
    except ImportError:
        raise ImportError("asking S3 for a bucket's region needs boto3: pip install boto3, or give s3_region") from None
    place = boto3.client("s3").get_bucket_location(Bucket=bucket)["LocationConstraint"]
    # S3 leaves out the name of its first region, and calls another one by its continent.
    return {None: "us-east-1", "EU": "eu-west-1"}.get(place, place)


def retry_with_jitter(
    function: Callable | None = None,
    *,
    attempts: int = 5,
    seconds: float = 0.5,
    most_seconds: float = 20.0,
    errors: type[Exception] | tuple[type[Exception], ...] = Exception,
) -> Callable:
    """Retries after errors with growing random delays: `@retry_with_jitter` or `@retry_with_jitter(...)`.

    Args:
        function: what is called; left out in the second form.
        attempts: calls in all; the last one's error is raised.
        seconds: the longest first wait; doubled each time, up to ``most_seconds``.
        errors: what is worth another call.
    """
    if function is None:
        return functools.partial(
            retry_with_jitter, attempts=attempts, seconds=seconds, most_seconds=most_seconds, errors=errors
        )

    @functools.wraps(function)
    def retried(*args: Any, **kwargs: Any) -> Any:
        for attempt in range(attempts - 1):
            try:
                return function(*args, **kwargs)
            except errors as error:
                wait = random.uniform(0, min(most_seconds, seconds * 2**attempt))
                _log.warning("%s failed (%s); again in %.1f s", getattr(function, "__name__", function), error, wait)
                time.sleep(wait)
        return function(*args, **kwargs)

    return retried


def _open_s3(region: str | None, client: Any) -> Any:
    try:
        import s3fs
    except ImportError:
        raise ImportError("an s3:// checkpoint needs s3fs: pip install s3fs (or save to a directory)") from None
    options = dict(client) if isinstance(client, dict) else dict(vars(client)) if client is not None else {}
    part = options.pop("part_size", _PART_BYTES)
    if region:
        options["region_name"] = region
    return s3fs.S3FileSystem(default_block_size=part, client_kwargs=options)


class S3FileSystem(FileSystemBase):
    """DCP's file system over S3.

    An object appears under its name when it has been written as a whole, so no temporary names are needed.

    Args:
        region: the bucket's region; s3fs finds it if None.
        s3client_config: a dictionary or object with `part_size` (bytes, default 64 MiB) and s3fs's client options.
        filesystem: an fsspec file system to use instead of s3fs's.

    Raises:
        ImportError: s3fs is not installed, and no ``filesystem`` was given.
    """

    def __init__(self, region: str | None = None, s3client_config: Any = None, filesystem: Any = None) -> None:
        self.fs = _open_s3(region, s3client_config) if filesystem is None else filesystem

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[io.IOBase]:
        """Opens ``path``; what is written appears only if the block ends without an error."""
        stream = self.fs.open(format_s3_path(path), mode)
        try:
            yield stream
        except BaseException:
            if hasattr(stream, "discard") and "w" in mode:
                stream.discard()
            raise
        stream.close()

    def concat_path(self, path: str | os.PathLike, suffix: str) -> str:
        """``path``/``suffix``, where the suffix may climb by `..`."""
        bucket, key = parse_s3_uri(path)
        return _SCHEME + posixpath.normpath(posixpath.join(bucket, key, suffix))

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        """Copies and removes: S3 has no renaming."""
        self.fs.mv(format_s3_path(path), format_s3_path(new_path))

    def init_path(self, path: str | os.PathLike) -> str:
        return format_s3_path(path)

    def mkdir(self, path: str | os.PathLike) -> None:
        """Does nothing: keys need no directories."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return is_s3_uri(checkpoint_id)

    def exists(self, path: str | os.PathLike) -> bool:
        return self.fs.exists(format_s3_path(path))

    def size(self, path: str | os.PathLike) -> int:
        """Bytes of the object at ``path``."""
        return self.fs.size(format_s3_path(path))

    def rm_file(self, path: str | os.PathLike) -> None:
        self.fs.rm_file(format_s3_path(path))

    def ls(self, path: str | os.PathLike) -> list[str]:
        """Names directly under ``path``, without it; none if nothing is there."""
        try:
            self.fs.invalidate_cache()
            return [posixpath.basename(name.rstrip("/")) for name in self.fs.ls(format_s3_path(path), detail=False)]
        except FileNotFoundError:
            return []

    def replace_file(self, path: str | os.PathLike, data: bytes) -> None:
        """Writes ``data`` to ``path`` atomically."""
        with self.fs.open(format_s3_path(path), "wb") as stream:
            stream.write(data)
