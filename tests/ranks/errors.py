"""Assertion of errors by type and text."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def refused(
    *words: str, kind: type[Exception] | tuple[type[Exception], ...] = ValueError
) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Asserts that the block raises an error of `kind` whose text contains all `words`. Yields the record."""
    with pytest.raises(kind) as caught:
        yield caught
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"
