"""Lab of network namespaces (bench/lab/netlab): its features here, and one run of a command in it."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from ranks import process

NETLAB = Path(__file__).parents[2] / "bench" / "lab" / "netlab"


@functools.cache
def _check() -> dict[str, str]:
    try:
        done = subprocess.run([NETLAB, "check"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"error": str(error)}
    rows = (line.rsplit(maxsplit=1) for line in done.stdout.splitlines() if line.strip())
    found = {name.strip(): value for name, value in rows}
    return found or {"error": done.stderr.strip() or f"status {done.returncode}"}


def why_not(*needs: str) -> str | None:
    """Returns why this machine has no lab with `needs` (first words of `netlab check` lines), or None."""
    found = _check()
    if "error" in found:
        return f"netlab check: {found['error']}"
    for need in ("namespaces", "bridge", *needs):
        name, value = next(((n, v) for n, v in found.items() if n.startswith(need)), (need, "no"))
        if value != "yes":
            return f"netlab check: {name}: {value}"
    return None


def start(arguments: list[str], env: dict[str, str] | None = None, **options) -> subprocess.Popen:
    """`netlab run` with these arguments; it ends with this process."""
    options.setdefault("stdin", subprocess.DEVNULL)
    return subprocess.Popen(
        [sys.executable, str(NETLAB), "run", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
        preexec_fn=functools.partial(process.die_with_parent, signal.SIGTERM),
        **options,
    )


@dataclass
class Outcome:
    """Result of one run in the lab."""

    status: int
    #: each rank's output, standard error included
    said: list[str]
    #: netlab's report: for each rank `status`, `host`, `ended_by_fault`, `seconds_after_last_fault`
    ranks: list[dict] = field(default_factory=list)
    lab: str = ""

    def __str__(self) -> str:
        each = "".join(f"--- rank {rank}\n{text}" for rank, text in enumerate(self.said))
        return f"status {self.status}\n{self.lab}{each}"

    @property
    def survivors(self) -> list[int]:
        return [row["rank"] for row in self.ranks if not row["ended_by_fault"]]


def run(
    command: list[str],
    *,
    hosts: int,
    procs: int,
    seconds: float = 60,
    options: tuple[str, ...] = (),
    env: dict[str, str] | None = None,
) -> Outcome:
    """Runs a command once per rank, in `hosts` hosts of `procs` ranks, and ends it after `seconds`.

    A rank that fails does not end the others: the tests check their own detection.
    """
    with tempfile.TemporaryDirectory(prefix="smddp-hosts-") as directory:
        report = Path(directory) / "report.json"
        size = ["--hosts", str(hosts), "--procs", str(procs), "--timeout", str(seconds)]
        keep = ["--keep-going", "--logs", directory, "--report", str(report)]
        process = start(
            [*size, *keep, *options, "--", *command], env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        lab, _ = process.communicate()
        logs = [Path(directory) / f"rank{rank}.log" for rank in range(hosts * procs)]
        said = [log.read_text(errors="replace") if log.exists() else "" for log in logs]
        ranks = json.loads(report.read_text())["ranks"] if report.exists() else []
    return Outcome(process.returncode, said, ranks, lab)


def job(name: str) -> list[str]:
    """Returns the command for one of the scripts in `jobs/`."""
    return [sys.executable, str(Path(__file__).parent / "jobs" / f"{name}.py")]
