"""The doctor's rendezvous: values by key, served by rank 0 over TCP.

It uses Python's sockets alone, because torch and the group of all ranks may be the faulty part. A request and its
answer are lines of JSON with base64 values. A connection that does not begin with the greeting is closed. Every wait
has a deadline, and the number of connections is bounded.
"""

from __future__ import annotations

import base64
import json
import socket
import socketserver
import threading
import time
from typing import Any

from smddp.observability.values import Values

_GREETING = b"smddp-doctor 1\n"
_LONGEST_LINE = 16 << 20
_PATIENCE = 3.0
_PAUSE = 0.05
# Connections beyond one per rank: foreign clients and reconnects.
_SPARE = 64


class ConnectionLost(RuntimeError):
    """Rank 0 cannot be reached, or closed the connection."""


class _Handler(socketserver.StreamRequestHandler):
    timeout = _PATIENCE

    def handle(self) -> None:
        if self.rfile.read(len(_GREETING)) != _GREETING:
            return
        self.wfile.write(_GREETING)
        self.connection.settimeout(None)
        values: Values = self.server.values  # type: ignore[attr-defined]
        while line := self.rfile.readline(_LONGEST_LINE):
            request = json.loads(line)
            found: bytes | None = None
            if request["do"] == "set":
                values.set(str(request["key"]), base64.b64decode(request["value"]))
            else:
                found = values.wait(str(request["key"]), float(request["seconds"]))
            answer = None if found is None else base64.b64encode(found).decode()
            self.wfile.write(json.dumps(answer).encode() + b"\n")


class Server(socketserver.ThreadingTCPServer):
    """Rank 0's side, for `ranks` ranks. Port 0 is any free port. Raises OSError if it cannot listen."""

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, host: str, port: int, ranks: int) -> None:
        self.values = Values()
        self._free = threading.BoundedSemaphore(ranks + _SPARE)
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self.address_family = family
        super().__init__((str(address[0]), port), _Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serves a connection in its own thread, or closes it if too many are open."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serves one connection to its end."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores an error of one connection: only its own thread ends."""


class Client:
    """One rank's side; also a store for Comm.make."""

    def __init__(self, host: str, port: int, seconds: float) -> None:
        """Connects, with retries until the deadline because the server may start later. Raises ConnectionLost."""
        self._lock = threading.Lock()
        self._where = f"{host}:{port}"
        deadline = time.monotonic() + seconds
        while True:
            left = deadline - time.monotonic()
            try:
                self._stream = socket.create_connection((host, port), timeout=max(min(left, _PATIENCE), 0.1))
                self._stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._lines = self._stream.makefile("rb")
                self._stream.sendall(_GREETING)
                if self._lines.read(len(_GREETING)) == _GREETING:
                    return
                why = "another program listens there"
            except OSError as error:
                why = str(error)
            if left <= 0:
                raise ConnectionLost(f"rank 0 did not answer at {self._where} within {seconds:g} s: {why}")
            time.sleep(_PAUSE)

    def _ask(self, request: dict[str, Any], seconds: float) -> Any:
        with self._lock:
            try:
                self._stream.settimeout(seconds + _PATIENCE)
                self._stream.sendall(json.dumps(request).encode() + b"\n")
                line = self._lines.readline()
            except OSError as error:
                raise ConnectionLost(f"lost the connection to rank 0 at {self._where}: {error}") from None
        if not line:
            raise ConnectionLost(f"rank 0 at {self._where} closed the connection")
        return json.loads(line)

    def publish(self, key: str, value: Any) -> None:
        """Stores a value of plain types for all ranks."""
        self.set(key, json.dumps(value).encode())

    def ask(self, key: str, seconds: float) -> Any:
        """Returns the value of a key, or None if no rank published it within `seconds`."""
        found = self._get(key, seconds)
        return None if found is None else json.loads(found)

    def set(self, key: str, value: bytes) -> None:
        self._ask({"do": "set", "key": key, "value": base64.b64encode(value).decode()}, _PATIENCE)

    def check(self, keys: list[str]) -> bool:
        return all(self._get(key, 0) is not None for key in keys)

    def get(self, key: str) -> bytes:
        found = self._get(key, 0)
        if found is None:
            raise KeyError(key)
        return found

    def delete_key(self, key: str) -> None:
        """No-op: the keys end with the server."""

    def _get(self, key: str, seconds: float) -> bytes | None:
        found = self._ask({"do": "get", "key": key, "seconds": seconds}, seconds)
        return None if found is None else base64.b64decode(found)
