"""Failure reports between stages, so that all raise the same cause."""

from __future__ import annotations

import traceback
from dataclasses import dataclass

_KEPT: dict[str, type[Exception]] = {kind.__name__: kind for kind in (ValueError, TypeError, NotImplementedError)}


class Aborted(BaseException):
    """Internal exception that ends the thread of a microbatch after a failure elsewhere."""


@dataclass(frozen=True)
class Failure:
    """Cause of a failed step, in a form that can be sent between processes."""

    kind: str
    text: str
    stage: int
    where: str

    def error(self, stage: int) -> Exception:
        """Return the exception to raise on ``stage``."""
        reporter = "" if stage == self.stage else f" (reported by stage {self.stage})"
        return _KEPT.get(self.kind, RuntimeError)(f"{self.text}{reporter}\n{self.where}".rstrip())


def of(error: BaseException, stage: int, place: str) -> Failure:
    """Return the failure for ``error`` at ``place``, a text with microbatch, stage and module."""
    name = type(error).__name__
    kind = next((known for known, type_ in _KEPT.items() if isinstance(error, type_)), "RuntimeError")
    text = str(error) if name in (kind, "RuntimeError") else f"{name}: {error}"
    frames = "".join(traceback.format_exception(type(error), error, error.__traceback__)[-6:])
    return Failure(kind, f"{place}: {text}", stage, frames)
