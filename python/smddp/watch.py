"""The thread that looks at the recorder now and then, where metrics are asked for, and where they go."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
import warnings
from pathlib import Path

from smddp._native import core

_FILE, _PORT, _INTERVAL = "SMDDP_METRICS_FILE", "SMDDP_METRICS_PORT", "SMDDP_METRICS_INTERVAL"

_watch: Watch | None = None
_pid: int | None = None


def start(rank: int) -> None:
    """Look from now on if a setting asks for it. rank: this process's in the job. Idempotent; never raises."""
    global _watch, _pid
    if _pid == os.getpid():
        return
    _pid = os.getpid()
    settings = {name: value for name, value, *_ in core().settings()}
    if not (settings.get(_FILE) or settings.get(_PORT)):
        return
    try:
        _watch = Watch(rank, settings)
    except ImportError as error:
        asked = " and ".join(name for name in (_FILE, _PORT) if settings.get(name))
        warnings.warn(
            f"{asked}: no metrics without prometheus_client ({error}); pip install 'smddp[metrics]'",
            RuntimeWarning,
            stacklevel=2,
        )


def look() -> None:
    """Look now: a group is about to go. Never raises."""
    if _watch is not None and _pid == os.getpid():
        _watch.look()


def address() -> tuple[str, int] | None:
    """Where this process serves its metrics."""
    return None if _watch is None or _pid != os.getpid() else _watch.address


def place(name: str, rank: int) -> Path:
    """The file of this rank where the setting says `name`."""
    path = Path(name)
    if "%p" not in name and "%r" not in name:
        path = path.with_name(f"{path.stem}-{rank}{path.suffix}")
    found = str(path).replace("%h", os.uname().nodename).replace("%p", str(os.getpid()))
    return Path(found.replace("%r", str(rank)))


def listener(text: str, local_rank: int) -> tuple[str, int]:
    """Address and port where the rank of that number on its host serves, by the setting's text."""
    host, _, number = text.strip().rpartition(":")
    port = int(number)
    return host.strip("[]") or "127.0.0.1", port + local_rank if port else 0


class Watch:
    """Raises ImportError without `prometheus_client`; what fails later is a warning, once for each reason."""

    def __init__(self, rank: int, settings: dict[str, str]) -> None:
        import prometheus_client

        from smddp.metrics import Metrics

        self._prometheus = prometheus_client
        self._metrics = Metrics(rank)
        self._registry = prometheus_client.CollectorRegistry(auto_describe=False)
        self._registry.register(self._metrics)
        self._file = place(settings[_FILE], rank) if settings.get(_FILE) else None
        self._interval = float(settings[_INTERVAL])
        self._warned: set[str] = set()
        self._over = threading.Event()
        self.address: tuple[str, int] | None = None
        self.look()
        if settings.get(_PORT):
            self._serve(*listener(settings[_PORT], int(os.environ.get("LOCAL_RANK") or 0)))
        threading.Thread(target=self._run, name="smddp-watch", daemon=True).start()
        atexit.register(self._end, os.getpid())

    def _serve(self, host: str, port: int) -> None:
        try:
            server, _ = self._prometheus.start_http_server(port, host, self._registry)
        except OSError as error:
            self._warn(f"{_PORT}: {host}:{port}: {error}")
            return
        self.address = server.server_address[:2]
        # A forked child would keep the port when this process is gone.
        os.register_at_fork(after_in_child=server.socket.close)

    def look(self) -> None:
        """What is so now is what metrics say from now on."""
        from smddp._info import traffic

        try:
            self._metrics.look(json.loads(core().dump()), traffic())
        except Exception as error:  # the job does not end for its metrics
            self._warn(f"metrics: {type(error).__name__}: {error}")

    def write(self) -> None:
        """The file, as a whole or as it was."""
        if self._file is None:
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._prometheus.write_to_textfile(str(self._file), self._registry)
        except OSError as error:
            self._warn(f"{_FILE}: {self._file}: {error}")

    def _run(self) -> None:
        self.write()
        while not self._over.wait(self._interval):
            self.look()
            self.write()

    def _end(self, owner: int) -> None:
        if os.getpid() == owner:
            self._over.set()
            self.look()
            self.write()

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            with contextlib.suppress(OSError):
                sys.stderr.write(f"smddp: {text}\n")
