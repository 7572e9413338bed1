"""A running job: an agent on each host, the ranks' output, and the first failure."""

from __future__ import annotations

import json
import os
import queue
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from smddp import validation
from smddp.estimator import archives
from smddp.estimator.commands import Command, Host
from smddp.estimator.job import Folder
from smddp.launch.local import signal_name
from smddp.text import named_ranks

#: Seconds to wait after the first reported failure for reports of earlier failures.
_EARLIER = 1.0
#: Seconds for a host's agent to start.
_BEGIN = 60.0
#: Seconds from a stop request to SIGKILL.
_END = 5.0
_HERE = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Failure:
    """A rank that failed."""

    rank: int
    host: str
    pid: int
    #: Exit status; below zero the signal.
    status: int
    ended: float
    #: Its last lines on stderr.
    last: str
    #: Number of the job's attempt, from 1.
    attempt: int = 1

    @classmethod
    def parse(cls, found: Any) -> Failure | None:
        """The failure that a rank reported, as JSON text or parsed; None for anything else, such as a script's line."""
        try:
            given = cls(**(json.loads(found) if isinstance(found, str) else found))
            texts = (given.host, given.last)
            numbers = (given.rank, given.pid, given.status, given.attempt)
            right = all(type(each) is str for each in texts) and all(type(each) is int for each in numbers)
            return given if right and type(given.ended) is float and -65 < given.status < 256 else None
        except (ValueError, TypeError, RecursionError):
            return None

    @property
    def how(self) -> str:
        if self.status < 0:
            # The rank raised an error and was then slow to exit.
            failed = "failed and " if self.status == -signal.SIGTERM and not self.terminated else ""
            return f"{failed}was ended by signal {signal_name(-self.status)}"
        return f"ended with exit status {self.status}"

    @property
    def follows(self) -> bool:
        """True if the rank failed because it lost a peer, which may exit later."""
        return "PeerLostError" in self.last or "follows from that rank's failure" in self.last

    @property
    def terminated(self) -> bool:
        """True if SIGTERM ended the rank and its output shows no error. A shell script ends with status 143."""
        return self.status in (-signal.SIGTERM, 128 + signal.SIGTERM) and "Traceback (most recent" not in self.last


class LaunchError(RuntimeError):
    """A job that failed.

    Attributes:
        failure: the first rank that failed; None where no rank has reported.
        folder: path of the job's folder, with all logs.
        lost_host: the job has lost a host, or a host could not be reached.
    """

    def __init__(self, text: str, folder: Path, failure: Failure | None = None, lost_host: bool = False) -> None:
        super().__init__(text)
        self.folder = folder
        self.failure = failure
        self.lost_host = lost_host


def launch_error(failures: Sequence[Failure], folder: Path) -> LaunchError:
    """Returns the error of the first failed rank. failures: at least one."""
    earliest = min(failure.ended for failure in failures)

    def order(failure: Failure) -> tuple[int, float]:
        # Launchers send SIGTERM to the other ranks after a failure: only the earliest SIGTERM can be the cause.
        terminated = failure.terminated and failure.ended > earliest
        return (1 if failure.follows else 2 if terminated else 0), failure.ended

    first = min(failures, key=order)
    others = sorted(failure.rank for failure in failures if failure.rank != first.rank)
    after = f"; after it {named_ranks(others)}" if others else ""
    after = f" in attempt {first.attempt}{after}" if first.attempt > 1 else after
    return LaunchError(
        f"rank {first.rank} (host {first.host}, pid {first.pid}) {first.how}{after}. Its last lines on stderr:\n"
        f"{first.last.rstrip() or '(none)'}\nAll output: {folder / 'logs'}",
        folder,
        first,
    )


class Run:
    """Processes of a job."""

    def __init__(
        self,
        folder: Path,
        hosts: Sequence[Host],
        commands: Sequence[Command],
        cwd: Path,
        *,
        rsh: str = "ssh",
        python: str = sys.executable,
        report: Callable[[str], None] | None = None,
        attempt: int = 1,
        files: Callable[[], str] | None = None,
        cancelled: threading.Event | None = None,
    ) -> None:
        """Starts the job.

        report: called with each line of the ranks' output. attempt: number from 1; a later one ends the processes of
        earlier ones and removes their results. files: returns `packed` of the folder before the first attempt, for
        hosts other than this one. cancelled: ends the wait for hosts.
        Raises LaunchError if a host's agent does not start, or after `cancelled`.
        """
        self._folder = folder
        self._report = report or (lambda line: None)
        self._said: queue.Queue[tuple[int, dict[str, Any] | None]] = queue.Queue()
        self._agents: list[_Agent] = []
        self._failures: dict[int, Failure] = {}
        self._stopping = False
        self._attempt = attempt
        self._cancelled = cancelled or threading.Event()
        by_host = {command.host: command for command in commands}
        if attempt > 1:
            Folder(folder).reset(attempt)  # this machine may not be one of the hosts
        files = files or (lambda: archives.packed(folder))
        try:
            for number, host in enumerate(hosts):
                command = by_host.get(host.name)
                given = {
                    "folder": str(folder),
                    "cwd": str(cwd),
                    "attempt": attempt,
                    "files": None if is_here(host.name) else files(),
                    "argv": command.argv if command else None,
                    "env": command.env if command else {},
                }
                self._agents.append(_Agent(number, host.name, given, rsh, python, self._said))
            self._begin()
        except BaseException:
            self.stop()
            raise

    def wait(self) -> None:
        """Waits until all ranks have ended. A Ctrl-C ends them on all hosts.

        Raises LaunchError with the first rank that failed, its host, its exit status or signal, and its last lines.
        """
        try:
            self._follow()
            self._take_queued()
        finally:
            self.stop()
        failed = [agent for agent in self._agents if agent.status]
        lost = [agent.host for agent in self._agents if agent.lost]
        if self._failures:
            error = launch_error(list(self._failures.values()), self._folder)
            error.lost_host = bool(lost)
            raise error
        if failed:
            agent = failed[0]
            said = "\n".join(agent.last)
            raise LaunchError(
                f"{agent.command_name} on {agent.host} ended with exit status {agent.status}, and no rank reported a "
                f"cause:\n{said}",
                self._folder,
                lost_host=bool(lost),
            )
        if lost:
            raise LaunchError(f"the connection to {lost[0]} ended before the job", self._folder, lost_host=True)

    def stop(self) -> None:
        """Ends the remaining processes on all hosts."""
        self._stopping = True
        for agent in self._agents:
            agent.release()
        until = time.monotonic() + _END
        for agent in self._agents:
            agent.end(max(until - time.monotonic(), 0.1) if agent.ready else 0.1)
        self._take_queued()  # failures that ranks reported while they ended

    def _take_queued(self) -> None:
        while True:
            try:
                self._take(*self._said.get_nowait())
            except queue.Empty:
                return

    def _begin(self) -> None:
        """Starts the ranks once the job's folder is on all hosts."""
        until = time.monotonic() + _BEGIN
        while waiting := [agent for agent in self._agents if not agent.ready]:
            names = ", ".join(agent.host for agent in waiting)
            if self._cancelled.is_set():
                raise LaunchError(
                    f"the job was stopped (max_wait or stop()) before {names} answered", self._folder, lost_host=True
                )
            try:
                number, what = self._said.get(timeout=0.2)
            except queue.Empty:
                if time.monotonic() < until:
                    continue
                text = f"no answer from {names} after {_BEGIN:.0f} s"
                raise LaunchError(text, self._folder, lost_host=True) from None
            agent = self._agents[number]
            if what is None:
                raise LaunchError(f"{agent.host} cannot be used: {agent.words()}", self._folder, lost_host=True)
            agent.ready = "ready" in what
        for agent in self._agents:
            agent.start()

    def _follow(self) -> None:
        """Processes reports until all commands have ended, or up to 6 s after the first failure."""
        last = None
        while any(agent.runs for agent in self._agents):
            try:
                self._take(*self._said.get(timeout=0.2))
            except queue.Empty:
                pass
            if last is None and (self._failures or any(agent.lost for agent in self._agents)):
                last = time.monotonic() + _EARLIER + _END
            if last is not None and time.monotonic() > last:
                return

    def _take(self, number: int, what: dict[str, Any] | None) -> None:
        agent = self._agents[number]
        if what is None:
            # An agent without a command ends when its input closes.
            agent.lost = not self._stopping and (agent.runs or not agent.has_command)
            if agent.runs:
                agent.status = agent.status or 255
                agent.last.append(f"the connection to {agent.host} ended: {agent.words()}")
            agent.runs = False
        elif "line" in what:
            agent.last = [*agent.last[-19:], what["line"]]
            self._report(what["line"])
        elif "failed" in what:
            failure = Failure.parse(what["failed"])
            if failure is not None and failure.attempt == self._attempt and failure.rank not in self._failures:
                self._failures[failure.rank] = failure
                self._report(f"smddp: rank {failure.rank} (host {failure.host}, pid {failure.pid}) {failure.how}")
        elif "unable" in what:
            agent.status, agent.runs = 127, False
            agent.last.append(what["unable"])
        elif "status" in what:
            agent.status, agent.runs = what["status"], False


class _Agent:
    """The process on one host that runs its command."""

    def __init__(
        self,
        number: int,
        host: str,
        given: dict[str, Any],
        rsh: str,
        python: str,
        said: queue.Queue[tuple[int, dict[str, Any] | None]],
    ) -> None:
        self.host = host
        self.ready = False
        self.runs = self.has_command = given["argv"] is not None
        #: True if the connection ended before the command.
        self.lost = False
        self.status = 0
        self.last: list[str] = []
        self.command_name = given["argv"][0] if given["argv"] else "its agent"
        words = [python, "-m", "smddp.estimator.agent"]
        self._process = subprocess.Popen(
            words if is_here(host) else [*remote_shell(rsh), validation.host_name(host), shlex.join(words)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Ctrl-C reaches only the launcher, which then ends the agent.
            start_new_session=True,
        )
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._stdin: IO[bytes] = self._process.stdin
        self._errors: list[str] = []
        threading.Thread(target=_read, args=(number, self._process.stdout, said), daemon=True).start()
        self._keeper = threading.Thread(target=_keep, args=(self._process.stderr, self._errors), daemon=True)
        self._keeper.start()
        self._write(json.dumps(given).encode() + b"\n")

    def start(self) -> None:
        self._write(b"start\n")

    def release(self) -> None:
        """Closes the agent's input, so that the agent ends its processes."""
        try:
            self._stdin.close()
        except OSError:
            pass

    def end(self, seconds: float) -> None:
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def words(self) -> str:
        """Returns the last stderr lines of the agent or its remote shell, else the exit status."""
        try:
            self._process.wait(1)
        except subprocess.TimeoutExpired:
            pass
        self._keeper.join(1)
        return " ".join(self._errors[-5:]) or f"exit status {self._process.poll()}"

    def _write(self, data: bytes) -> None:
        try:
            self._stdin.write(data)
            self._stdin.flush()
        except OSError:
            pass  # the agent has exited; the end of its output reports that


def _read(number: int, pipe: IO[bytes], said: queue.Queue[tuple[int, dict[str, Any] | None]]) -> None:
    with pipe:
        for line in pipe:
            try:
                what = json.loads(line)
            except ValueError:
                what = {"line": line.decode(errors="replace").rstrip("\n")}
            said.put((number, what if isinstance(what, dict) else {"line": str(what)}))
    said.put((number, None))


def _keep(pipe: IO[bytes], lines: list[str]) -> None:
    with pipe:
        for line in pipe:
            lines.append(line.decode(errors="replace").rstrip("\n"))


def remote_shell(rsh: str) -> list[str]:
    """The words before a host's name. ssh takes what follows `--` for no option. Raises ValueError."""
    try:
        words = shlex.split(validation.variable_value(rsh, "rsh"))
    except ValueError as error:
        raise ValueError(f"rsh: invalid value {rsh!r}: {error}") from None
    if not words:
        raise ValueError(f"rsh: invalid value {rsh!r}: expected a command, as ssh")
    return [*words, "--"] if os.path.basename(words[0]) == "ssh" else words


def is_here(host: str) -> bool:
    """Returns whether the name of a host is this machine's."""
    return host in (*_HERE, socket.gethostname())


def need(program: str, why: str) -> None:
    """Raises LaunchError if this machine lacks a program."""
    if shutil.which(program) is None:
        raise LaunchError(f"there is no {program} on this machine, {why}", Path(os.curdir))
