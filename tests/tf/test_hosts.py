"""The same calls and training loops across two "hosts" of network namespaces, two ranks each."""

import functools
import subprocess
import sys

import pytest
from programs import HERE, cases, verdict, words

NETLAB = HERE.parents[1] / "bench" / "lab" / "netlab"
MODULES = ("collectives", "training")


@functools.cache
def reports(module: str) -> tuple[dict, str]:
    if subprocess.run([NETLAB, "check"], capture_output=True).returncode != 0:
        pytest.skip("no network namespaces here (bench/lab/netlab check)")
    command = [NETLAB, "run", "--hosts", "2", "--procs", "2", "--raw", "--env", "OMP_NUM_THREADS=1", "--"]
    job = [*command, sys.executable, str(HERE / "run.py"), module]
    done = subprocess.run(job, capture_output=True, text=True, timeout=280)
    found: dict = {}
    for said in words(done.stdout):
        found.setdefault(said["case"], {})[said["rank"]] = said
    return found, done.stdout[-3000:] + done.stderr[-3000:]


def both() -> list:
    """`make test` runs the calls between hosts; the training loops build on them and are marked slow."""
    marks = {"training": pytest.mark.slow}
    return [pytest.param(module, case, marks=marks.get(module, ())) for module in MODULES for case in cases(module)]


@pytest.mark.parametrize(("module", "case"), both())
def test_across_hosts(module, case):
    verdict(reports(module), case, 4)
