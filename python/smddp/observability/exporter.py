"""Export of metrics to a file per rank and to an HTTP port, by `prometheus_client`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# Maximum time of an update for predictions of calls that no earlier update has predicted.
_SIMULATION_SECONDS = 0.005
FILE, PORT = "SMDDP_METRICS_FILE", "SMDDP_METRICS_PORT"


def place(name: str, rank: int) -> Path:
    """Returns the metrics file of this rank for the setting's value `name`."""
    path = Path(name)
    if "%p" not in name and "%r" not in name:
        path = path.with_name(f"{path.stem}-{rank}{path.suffix}")
    found = str(path).replace("%h", os.uname().nodename).replace("%p", str(os.getpid()))
    return Path(found.replace("%r", str(rank)))


def listener(text: str, local_rank: int) -> tuple[str, int]:
    """Returns the address and port of a rank's metrics server. local_rank: its number on the host."""
    host, _, number = text.strip().rpartition(":")
    port = int(number)
    return host.strip("[]") or "127.0.0.1", port + local_rank if port else 0


class Exposition:
    """Exports this rank's metrics to the file and port of the settings. Raises ImportError without `prometheus_client`.

    warn: receives a message for each output that fails later.
    """

    def __init__(self, rank: int, settings: dict[str, str], warn: Callable[[str], None]) -> None:
        import prometheus_client

        from smddp.observability.metrics import Metrics
        from smddp.observability.predictions import Predictions

        self._prometheus = prometheus_client
        self._warn = warn
        self._predictions = Predictions(_SIMULATION_SECONDS)
        self._metrics = Metrics(rank, self._predictions)
        self._registry = prometheus_client.CollectorRegistry(auto_describe=False)
        self._registry.register(self._metrics)
        self._file = place(settings[FILE], rank) if settings.get(FILE) else None
        self.address: tuple[str, int] | None = None
        if settings.get(PORT):
            self._serve(*listener(settings[PORT], int(os.environ.get("LOCAL_RANK") or 0)))

    def _serve(self, host: str, port: int) -> None:
        from smddp.observability.metrics_server import MetricsServer

        try:
            server = MetricsServer(host, port, self._prometheus.make_wsgi_app(self._registry))
        except OSError as error:
            self._warn(f"{PORT}: {host}:{port}: {error}")
            return
        self.address = (host, server.server_port)
        # A forked child would keep the port open after this process exits.
        os.register_at_fork(after_in_child=server.socket.close)

    def take(self, dump: dict[str, Any], traffic: Sequence[dict[str, Any]]) -> None:
        """Replaces the exported figures."""
        self._predictions.begin()
        self._metrics.update(dump, traffic)

    def late(self, stragglers: Sequence[Any]) -> None:
        """Replaces the exported stragglers."""
        self._metrics.late(stragglers)

    def write(self) -> None:
        """Writes the metrics file atomically."""
        if self._file is None:
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._prometheus.write_to_textfile(str(self._file), self._registry)
        except OSError as error:
            self._warn(f"{FILE}: {self._file}: {error}")
