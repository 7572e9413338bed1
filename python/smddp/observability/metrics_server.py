"""HTTP server for metrics, with a bounded number of connections and a time limit for each."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

#: Concurrent requests. A further one closes the oldest: a scrape takes milliseconds.
CONNECTIONS = 8
#: Seconds from the connection to the end of the response.
REQUEST_SECONDS = 5.0


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *_args: Any) -> None:
        """Requests are not logged."""


class MetricsServer(ThreadingMixIn, WSGIServer):
    """Serves `application` at an address from a thread. Raises OSError if it cannot listen."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, host: str, port: int, application: Callable[..., Any]) -> None:
        self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        self._free = threading.BoundedSemaphore(CONNECTIONS)
        self._lock = threading.Lock()
        #: Start time of each open connection, the oldest first.
        self._open: dict[socket.socket, float] = {}
        super().__init__((host, port), _Handler)
        self.set_app(application)
        threading.Thread(target=self.serve_forever, name="smddp-metrics", daemon=True).start()

    def server_bind(self) -> None:
        # HTTPServer would resolve the host name, which may take seconds.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self._end(lambda _: True)
            if not self._free.acquire(timeout=0.5):
                self.shutdown_request(request)
                return
        with self._lock:
            self._open[request] = time.monotonic()
        try:
            super().process_request(request, client_address)
        except RuntimeError:
            # No thread can be started.
            self._closed(request)
            raise

    def get_request(self) -> Any:
        try:
            return super().get_request()
        except OSError:
            # Without a free descriptor the connection waits, and the loop would spin.
            time.sleep(0.1)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._closed(request)

    def _closed(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        self._free.release()

    def service_actions(self) -> None:
        """Closes connections past their time limit. Called twice a second."""
        super().service_actions()
        until = time.monotonic() - REQUEST_SECONDS
        while self._end(lambda begun: begun < until):
            pass

    def _end(self, over: Callable[[float], bool]) -> bool:
        """Shuts down the oldest connection if its time is over, which ends its thread. Returns True if it did."""
        with self._lock:
            oldest = next(iter(self._open), None)
            if oldest is None or not over(self._open[oldest]):
                return False
            del self._open[oldest]
            with contextlib.suppress(OSError):  # the client, or its thread, has closed it
                oldest.shutdown(socket.SHUT_RDWR)
            return True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores an error of one connection, without a traceback on standard error."""
