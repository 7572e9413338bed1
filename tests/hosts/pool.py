"""Rank processes on the hosts of one lab that run many cases, as backend.ranks does on one machine.

The lab's hosts share the file system, so the ranks receive their cases over a unix socket with a path, which
reaches through network namespaces; what is tested goes over the lab's network.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from backend.ranks import BACKEND, ask
from backend.ranks import error_text as failure

from hosts import netlab, wires

_START_SECONDS = 120


class Hosts:
    """`hosts` hosts with `procs` rank processes each. A *slot* is a process; a case's ranks are some of the slots."""

    def __init__(self, hosts: int, procs: int, env: dict[str, str] | None = None) -> None:
        self.hosts, self.procs = hosts, procs
        self.alive = True
        self._stores = 0
        self._open: tuple[int, ...] = ()
        self._pipes: dict[int, Connection] = {}
        self._pids: dict[int, int] = {}
        self._directory = Path(tempfile.mkdtemp(prefix="smddp-hosts-"))
        address = str(self._directory / "pipe")
        with socket.socket(socket.AF_UNIX) as listener, open(self._directory / "netlab.log", "w") as log:
            listener.bind(address)
            listener.listen(hosts * procs)
            size = ["--hosts", str(hosts), "--procs", str(procs), "--keep-going", "--logs", str(self._directory)]
            main = str(Path(__file__).with_name("rank_main.py"))
            self._netlab = netlab.start([*size, "--", sys.executable, main, address], env, stdout=log, stderr=log)
            try:
                self._accept(listener)
            except BaseException:
                self.close()
                raise

    def _accept(self, listener: socket.socket) -> None:
        listener.settimeout(0.5)
        deadline = time.monotonic() + _START_SECONDS
        while len(self._pipes) < self.hosts * self.procs:
            try:
                accepted, _ = listener.accept()
            except TimeoutError:
                if self._netlab.poll() is not None or time.monotonic() > deadline:
                    logs = "\n".join(p.read_text(errors="replace") for p in sorted(self._directory.glob("*.log")))
                    raise RuntimeError(f"the lab's ranks did not start:\n{logs}") from None
                continue
            # The kernel gives the process number as it is here, not as it is in the host.
            credentials = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            accepted.setblocking(True)
            pipe = Connection(accepted.detach())
            slot = pipe.recv()
            self._pipes[slot] = pipe
            self._pids[slot] = struct.unpack("3i", credentials)[0]

    def slots(self, size: int) -> tuple[int, ...]:
        """Returns the slots of `size` ranks: two are on two hosts, three unevenly distributed where a host has room."""
        if size == 2:
            return (0, self.procs)
        return tuple(range(size))

    def run_backend_case(self, module: str, name: str, size: int, seconds: float) -> None:
        """A case of tests/backend, in a default group that lasts as long as the same slots are used."""
        slots = self.slots(size)
        if slots != self._open:
            self._stores += 1
            self._open = slots
        self._run("backend", slots, module, name, seconds)

    def run_client_case(self, module: str, name: str, seconds: float) -> None:
        """A case of tests/clients, on all slots, in a separate default group."""
        self._stores += 1
        self._open = ()
        self._run("client", self.slots(self.hosts * self.procs), module, name, seconds)

    def _run(self, kind: str, slots: tuple[int, ...], module: str, name: str, seconds: float) -> None:
        store = str(self._directory / f"store{self._stores}")
        pipes: dict[int, Any] = {rank: self._pipes[slot] for rank, slot in enumerate(slots)}
        messages = {rank: (kind, rank, len(slots), store, module, name) for rank in pipes}
        said = ask(
            pipes, messages, seconds, lambda rank: self._ended(slots[rank]), lambda rank: self._stacks(slots[rank])
        )
        if said:
            self.close()
            raise AssertionError(failure(said, len(slots)))

    def _log(self, slot: int) -> str:
        logs = [self._directory / f"{kind}{slot}.log" for kind in ("rank", "stacks")]
        return "".join(log.read_text(errors="replace")[-6000:] for log in logs if log.exists())

    def _ended(self, slot: int) -> str:
        return f"ended\n{self._log(slot)}"

    def _stacks(self, slot: int) -> str:
        stacks = self._directory / f"stacks{slot}.log"
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pids[slot], signal.SIGUSR1)
        # faulthandler does not signal its completion.
        deadline = time.monotonic() + 2
        while not stacks.stat().st_size and time.monotonic() < deadline:
            time.sleep(0.05)
        return self._log(slot)

    def close(self) -> None:
        """Ends the ranks by closing their pipes, and the lab with them."""
        self.alive = False
        for pipe in self._pipes.values():
            pipe.close()
        try:
            self._netlab.wait(5)
        except subprocess.TimeoutExpired:
            self._netlab.terminate()
            self._netlab.wait()
        shutil.rmtree(self._directory, ignore_errors=True)


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
