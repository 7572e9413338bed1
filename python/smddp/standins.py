"""What stands for a group's communicator where there is none to use: leaving it is nothing, and every call says why."""

from __future__ import annotations

import os
from typing import Any

from smddp.errors import ClosedError


class StandIn:
    """Whatever is asked of it besides what follows raises what `_refusal` says."""

    def _refusal(self) -> Exception:
        raise NotImplementedError

    def close(self) -> None:
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
        raise self._refusal()


class Inherited(StandIn):
    """In a forked child, which has the parent's memory but is not a rank."""

    def __init__(self, comm: Any, group: str) -> None:
        # Never dropped: its end would tell the peers that this rank leaves.
        self._comm = comm
        self._group = group
        self._owner = os.getppid()

    def _refusal(self) -> Exception:
        return RuntimeError(
            f"smddp group {self._group!r} was made in process {self._owner}, from which this one ({os.getpid()}) "
            "was forked later; only the process that made a group is a rank of it. Do collectives in the parent, "
            "or start the child by spawn and call init_process_group in it."
        )


class NotConfigured(StandIn):
    """In a group that `reconfigure` is still to give ranks, or to give some anew."""

    def __init__(self, name: str, why: str) -> None:
        self.name = name
        self._why = why

    def set_timeout(self, timeout: float) -> None:
        pass

    def sequence(self) -> int:
        return 0

    def _refusal(self) -> Exception:
        return ClosedError(
            f"group {self.name!r} {self._why}: call torch.distributed._reconfigure with a new uuid and the handles of "
            "all that take part"
        )
