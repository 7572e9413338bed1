"""Values by key for the threads of one process: a store for groups within a process, and the doctor's rendezvous."""

from __future__ import annotations

import threading


class Values:
    """Has the methods of a store that `Comm.make` needs."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def wait(self, key: str, seconds: float) -> bytes | None:
        """Returns the value of a key, or None if it is not set within `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._values, seconds)
            return self._values.get(key)

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def get(self, key: str) -> bytes:
        return self._values[key]

    def delete_key(self, key: str) -> None:
        self._values.pop(key, None)
