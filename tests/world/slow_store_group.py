"""Makes groups over a store that takes a refusal late, and prints the error of each attempt."""

import os
import sys
import time
from pathlib import Path

import smddp
from smddp._native import core


class SlowStore:
    """Files in a folder. A rank's reason for a failure arrives `DELAY` seconds late."""

    DELAY = 0.2

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(exist_ok=True)

    def _path(self, key: str) -> Path:
        return self._folder / key.replace("/", "-")

    def set(self, key: str, value: bytes) -> None:
        if key.endswith("refused") and value:
            time.sleep(self.DELAY)
        partial = self._folder / f"partial-{os.getpid()}"
        partial.write_bytes(value)
        partial.replace(self._path(key))

    def check(self, keys: list[str]) -> bool:
        return all(self._path(key).exists() for key in keys)

    def get(self, key: str) -> bytes:
        return self._path(key).read_bytes()

    def delete_key(self, key: str) -> None:
        self._path(key).unlink(missing_ok=True)


for attempt in range(int(sys.argv[2])):
    store = SlowStore(Path(f"{sys.argv[1]}-{attempt}"))
    try:
        core().Comm.make(store, "init", f"attempt-{attempt}", int(os.environ["RANK"]), 2, 20.0).close()
        print("made", flush=True)
    except smddp.Error as error:
        print(f"{type(error).__name__}: {error}", flush=True)
