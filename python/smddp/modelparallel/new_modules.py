"""Attributes of modules that are created inside a context."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn


@contextlib.contextmanager
def marking(attribute: str, value: object) -> Iterator[None]:
    """Set an attribute of every module that is created inside; of nested contexts, the innermost sets it last."""
    before = nn.Module.__init__

    def init(self: nn.Module, *args: object, **kwargs: object) -> None:
        before(self, *args, **kwargs)
        self.__dict__[attribute] = value

    nn.Module.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__init__ = before  # type: ignore[method-assign]
