"""Runs torch's distributed suite under a backend and writes one result per test.

    python tests/torch_suite/runner.py --backend smddp --world-size 4 --json out.json

The suite is imported once; every test forks its ranks from that process, so a test costs its own
time and no import. Ranks run in separate process groups: a test that outlives its time has its
Python stacks written to its log, is killed whole, and counts as ``hang``.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
import types
import unittest
from dataclasses import asdict, dataclass, field

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import suite_import

DEFAULT_SECONDS = 60.0
# Tests that wait on purpose, or that run long on two cores.
LONGER_SECONDS = {
    "test_ddp_uneven_inputs": 240.0,
    "test_ddp_uneven_inputs_stop_iteration_sync_bn": 120.0,
}
# After the first rank failed the others get this long to fail with their own message.
GRACE_SECONDS = 8.0
# Time for the stacks of a hanging rank to reach its log before it is killed.
STACK_SECONDS = 1.0
_FAILED = 10
_PR_SET_PDEATHSIG = 1
_LOG_TAIL = 6000


@dataclass
class Result:
    """Outcome of one test: ``pass``, ``fail``, ``hang`` or ``skip``; ``detail`` says why."""

    test: str
    status: str
    seconds: float = 0.0
    detail: str = ""


@dataclass
class Rank:
    pid: int
    pidfd: int
    log: str
    exit_code: int | None = None
    signal: int | None = None

    @property
    def ended(self) -> bool:
        return self.exit_code is not None or self.signal is not None

    @property
    def failed(self) -> bool:
        if self.signal is not None:
            return True
        return self.exit_code is not None and self.exit_code != 0 and suite_import.skip_message(self.exit_code) is None

    def tail(self) -> str:
        with open(self.log, errors="replace") as text:
            return text.read()[-_LOG_TAIL:]


@dataclass
class Running:
    test: str
    directory: str
    started: float
    deadline: float
    ranks: list[Rank] = field(default_factory=list)
    timed_out: bool = False
    failing_since: float | None = None


def run_rank(suite: types.ModuleType, test: str, rank: int, directory: str, log: str) -> int:
    """Body of a forked rank; returns its exit status. Everything it prints goes to ``log``."""
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    faulthandler.enable(file=fd)
    faulthandler.register(signal.SIGUSR1, file=fd, all_threads=True)
    suite_import.point_at(suite, directory)
    code = _FAILED
    try:
        suite_import.rank_class(suite)._run(rank, test, f"{directory}/rendezvous", None)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else _FAILED
    except unittest.SkipTest as skip:
        print(f"skipped: {skip}")
        code = suite.TEST_SKIPS["generic"].exit_code
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    return code


def start(suite: types.ModuleType, test: str, world_size: int, seconds: float, scratch: str) -> Running:
    """Forks all ranks of ``test``."""
    directory = tempfile.mkdtemp(dir=scratch, prefix=f"{test}-")
    suite_import.make_directories(directory)
    now = time.monotonic()
    running = Running(test, directory, now, now + seconds)
    sys.stdout.flush()
    sys.stderr.flush()
    for rank in range(world_size):
        log = f"{directory}/rank{rank}.log"
        pid = os.fork()
        if pid == 0:
            code = _FAILED
            try:
                os.setpgid(0, 0)
                # No rank outlives the runner, however that one ends.
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                code = run_rank(suite, test, rank, directory, log)
            finally:
                os._exit(code)
        # Also set in the parent, so that the group exists in either order of execution.
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        open(log, "a").close()
        running.ranks.append(Rank(pid, os.pidfd_open(pid), log))
    return running


def reap(running: Running) -> None:
    for rank in running.ranks:
        if rank.ended:
            continue
        pid, status = os.waitpid(rank.pid, os.WNOHANG)
        if pid:
            os.close(rank.pidfd)
            if os.WIFSIGNALED(status):
                rank.signal = os.WTERMSIG(status)
            else:
                rank.exit_code = os.WEXITSTATUS(status)
            # Helpers a rank left behind (data loader workers) end with it.
            with contextlib.suppress(OSError):
                os.killpg(rank.pid, signal.SIGKILL)


def stop(running: Running) -> None:
    """Writes the stacks of ranks that are still there, then kills their process groups."""
    alive = [rank for rank in running.ranks if not rank.ended]
    for rank in alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.pid, signal.SIGUSR1)
    select.select([rank.pidfd for rank in alive], [], [], STACK_SECONDS)
    for rank in alive:
        with contextlib.suppress(OSError):
            os.killpg(rank.pid, signal.SIGKILL)
        os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOWAIT)
    reap(running)


def result_of(running: Running) -> Result:
    """Turns the ranks' exit statuses into one result. Every rank counts, not only the first."""
    seconds = round(time.monotonic() - running.started, 2)
    if running.timed_out:
        status = "hang"
    elif any(rank.failed for rank in running.ranks):
        status = "fail"
    elif any(rank.exit_code for rank in running.ranks):
        code = next(rank.exit_code for rank in running.ranks if rank.exit_code)
        return Result(running.test, "skip", seconds, suite_import.skip_message(code) or "")
    else:
        return Result(running.test, "pass", seconds)
    parts = []
    for index, rank in enumerate(running.ranks):
        how = f"signal {rank.signal}" if rank.signal is not None else f"exit {rank.exit_code}"
        parts.append(f"--- rank {index}: {how}\n{rank.tail()}")
    return Result(running.test, status, seconds, "\n".join(parts))


def advance(running: Running) -> Result | None:
    """Looks at one running test; returns its result once all its ranks have ended."""
    reap(running)
    now = time.monotonic()
    if not all(rank.ended for rank in running.ranks):
        if running.failing_since is None and any(rank.failed for rank in running.ranks):
            running.failing_since = now
        if now > running.deadline:
            running.timed_out = running.failing_since is None
            stop(running)
        elif running.failing_since is not None and now > running.failing_since + GRACE_SECONDS:
            stop(running)
        else:
            return None
    return result_of(running)


def run_all(
    suite: types.ModuleType,
    tests: list[str],
    world_size: int,
    jobs: int,
    seconds: float,
    verbose: bool,
) -> list[Result]:
    """Runs ``tests``, at most ``jobs`` of them at a time; results in the order of ``tests``."""
    results: dict[str, Result] = {}
    waiting: list[str] = []
    for test in tests:
        reason = suite_import.static_skip(suite, test)
        if reason is None:
            waiting.append(test)
        else:
            results[test] = Result(test, "skip", 0.0, reason)
    # Long ones first, so that they do not run alone at the end.
    waiting.sort(key=lambda test: -LONGER_SECONDS.get(test, 0.0))
    scratch = tempfile.mkdtemp(prefix="torch-suite-")
    active: list[Running] = []
    try:
        while waiting or active:
            while waiting and len(active) < jobs:
                test = waiting.pop(0)
                limit = max(seconds, LONGER_SECONDS.get(test, 0.0))
                active.append(start(suite, test, world_size, limit, scratch))
            # Wakes when a rank ends; the time limit is only how often deadlines are looked at.
            select.select([rank.pidfd for run in active for rank in run.ranks if not rank.ended], [], [], 0.5)
            for running in list(active):
                result = advance(running)
                if result is None:
                    continue
                active.remove(running)
                shutil.rmtree(running.directory, ignore_errors=True)
                results[result.test] = result
                if verbose:
                    print(f"{result.status:5} {result.seconds:7.2f} s  {result.test}", flush=True)
    finally:
        for running in active:
            stop(running)
        shutil.rmtree(scratch, ignore_errors=True)
    return [results[test] for test in tests]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="smddp", help="backend to run (default: smddp)")
    parser.add_argument("--gate", choices=("gloo", "mpi"), default="gloo", help="backend whose decorators apply")
    parser.add_argument("--world-size", type=int, default=4)
    parser.add_argument("--jobs", type=int, default=2, help="tests at a time (default: 2)")
    parser.add_argument("--seconds", type=float, default=DEFAULT_SECONDS, help="time limit of one test")
    parser.add_argument("--tests", help="file with one test name a line, or - for standard input (default: all)")
    parser.add_argument("-k", dest="pattern", default="", help="only tests whose name contains this")
    parser.add_argument("--subgroups", action="store_true", help="also run what the suite keeps for 8 ranks")
    parser.add_argument("--profiler-events", action="store_true", help="also expect BACKEND:op profiler events")
    parser.add_argument("--json", help="where to write the results")
    parser.add_argument("--list", action="store_true", help="list the tests and why each would be skipped")
    args = parser.parse_args()

    suite = suite_import.load(args.backend, args.gate, args.world_size, args.subgroups, args.profiler_events)
    tests = suite_import.test_names(suite)
    if args.tests:
        with contextlib.ExitStack() as stack:
            source = sys.stdin if args.tests == "-" else stack.enter_context(open(args.tests))
            wanted = {line.strip() for line in source if line.strip() and not line.startswith("#")}
        unknown = wanted.difference(tests)
        if unknown:
            parser.error(f"this torch's suite has no {', '.join(sorted(unknown))}")
        tests = [test for test in tests if test in wanted]
    tests = [test for test in tests if args.pattern in test]
    if args.list:
        for test in tests:
            print(test, suite_import.static_skip(suite, test) or "", sep="\t")
        return 0

    began = time.monotonic()
    results = run_all(suite, tests, args.world_size, args.jobs, args.seconds, verbose=True)
    report = {
        "torch": suite.torch.__version__,
        "backend": args.backend,
        "gate": args.gate,
        "subgroups": args.subgroups,
        "world_size": args.world_size,
        "seconds": round(time.monotonic() - began, 1),
        "counts": {s: sum(r.status == s for r in results) for s in ("pass", "fail", "hang", "skip")},
        "results": [asdict(result) for result in results],
    }
    if args.json:
        with open(args.json, "w") as out:
            json.dump(report, out, indent=1)
    bad = [result for result in results if result.status in ("fail", "hang")]
    for result in bad:
        print(f"\n{result.status}: {result.test}\n{result.detail}")
    print(report["counts"], f"of {len(results)} in {report['seconds']} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
