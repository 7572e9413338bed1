"""One rank process in a host of the lab: connects to the test's socket and runs the received cases."""

from __future__ import annotations

import os
import socket
import sys
from multiprocessing.connection import Connection
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "clients")]

from ranks.serving import serve

if __name__ == "__main__":
    with socket.socket(socket.AF_UNIX) as unix:
        unix.connect(sys.argv[1])
        connection = Connection(os.dup(unix.fileno()))
    serve(connection)
