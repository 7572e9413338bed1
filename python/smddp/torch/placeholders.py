"""Placeholders for the communicator of a group that has none: closing does nothing, every other call raises."""

from __future__ import annotations

import os
from typing import Any

from smddp.torch.errors import ClosedError


class Placeholder:
    """A communicator whose other attributes raise `error` with the text `why`."""

    def __init__(self, error: type[Exception], why: str) -> None:
        self._refusal = error, why

    def close(self) -> None:
        pass

    def close_in_background(self) -> None:
        pass

    def finish(self, limit: float) -> None:
        pass

    def leave_seconds(self) -> float:
        return 0.0

    def abort(self, reason: str) -> None:
        pass

    def error(self) -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        error, why = self._refusal
        raise error(why)


class Inherited(Placeholder):
    """Placeholder in a forked child, which is not a rank of the parent's group."""

    def __init__(self, comm: Any, group: str) -> None:
        super().__init__(
            RuntimeError,
            f"smddp group {group!r} was made in process {os.getppid()}, from which this one ({os.getpid()}) was forked "
            "later; only the process that made a group is a rank of it. Do collectives in the parent, or start the "
            "child by spawn and call init_process_group in it.",
        )
        # Kept for ever: its destructor would announce to the peers that this rank leaves.
        self._comm = comm


class NotConfigured(Placeholder):
    """Placeholder in a group without ranks, until `reconfigure` succeeds."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(
            ClosedError,
            f"group {name!r} {why}: call torch.distributed._reconfigure with a new uuid and the handles of all that "
            "take part",
        )
        self.name = name

    def set_timeout(self, timeout: float) -> None:
        pass

    def sequence(self) -> int:
        return 0
