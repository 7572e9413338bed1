"""Rank processes on the hosts of one lab that run many cases, as `ranks.pool.Pool` does on one machine.

The lab's hosts share the file system, so the ranks receive their cases over a unix socket with a path, which
reaches through network namespaces; what is tested goes over the lab's network.
"""

from __future__ import annotations

import shutil
import socket
import struct
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

from ranks.group import BACKEND
from ranks.pool import START_SECONDS, RankProcesses

from hosts import netlab, wires


class Hosts(RankProcesses):
    """`hosts` hosts with `procs` rank processes each. A case's ranks are some of the processes."""

    def __init__(self, hosts: int, procs: int, env: dict[str, str] | None = None) -> None:
        super().__init__(BACKEND)
        self.hosts, self.procs = hosts, procs
        self.alive = True
        address = str(self.directory / "pipe")
        with socket.socket(socket.AF_UNIX) as listener, open(self.directory / "netlab.log", "w") as log:
            listener.bind(address)
            listener.listen(hosts * procs)
            size = ["--hosts", str(hosts), "--procs", str(procs), "--keep-going", "--logs", str(self.directory)]
            main = str(Path(__file__).with_name("rank_main.py"))
            self._netlab = netlab.start([*size, "--", sys.executable, main, address], env, stdout=log, stderr=log)
            try:
                self._accept(listener)
            except BaseException:
                self.close()
                raise

    def _accept(self, listener: socket.socket) -> None:
        listener.settimeout(0.5)
        deadline = time.monotonic() + START_SECONDS
        while len(self._pipes) < self.hosts * self.procs:
            try:
                accepted, _ = listener.accept()
            except TimeoutError:
                if self._netlab.poll() is not None or time.monotonic() > deadline:
                    logs = "\n".join(p.read_text(errors="replace") for p in sorted(self.directory.glob("*.log")))
                    raise RuntimeError(f"the lab's ranks did not start:\n{logs}") from None
                continue
            # The kernel gives the process number as it is here, not as it is in the host.
            credentials = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            accepted.setblocking(True)
            pipe = Connection(accepted.detach())
            number = pipe.recv()
            self._pipes[number] = pipe
            self._pids[number] = struct.unpack("3i", credentials)[0]

    def run(self, module: str, name: str, size: int, seconds: float) -> None:
        """Runs a case on `size` ranks: two are on two hosts, three unevenly distributed where a host has room."""
        self.run_on((0, self.procs) if size == 2 else tuple(range(size)), module, name, seconds)

    def close(self, kill: bool = False) -> None:
        """Ends the ranks by closing their pipes, and the lab with them."""
        self.alive = False
        for pipe in self._pipes.values():
            pipe.close()
        try:
            self._netlab.wait(5)
        except subprocess.TimeoutExpired:
            self._netlab.terminate()
            self._netlab.wait()
        shutil.rmtree(self.directory, ignore_errors=True)


class Labs:
    """One lab at a time, kept as long as the same one is asked for."""

    def __init__(self) -> None:
        self._at: tuple[str, int, int] | None = None
        self._hosts: Hosts | None = None

    def of(self, wire: str, hosts: int, procs: int) -> Hosts:
        """Skips the test if the wire is unavailable."""
        env = wires.settings(wire, BACKEND)
        if self._hosts is None or not self._hosts.alive or self._at != (wire, hosts, procs):
            self.close()
            self._at, self._hosts = (wire, hosts, procs), Hosts(hosts, procs, env)
        return self._hosts

    def close(self) -> None:
        if self._hosts is not None and self._hosts.alive:
            self._hosts.close()
        self._hosts = None
