"""Training across hosts: the same losses as one process, also over a link that loses packets; and the examples."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

import pytest

from hosts import netlab, wires

ROOT = Path(__file__).parents[2]
SLOW = pytest.mark.slow
WORLD = 4


def losses(text: str) -> list[float]:
    line = next((line for line in text.splitlines() if line.startswith("losses ")), None)
    assert line is not None, text
    return [float.fromhex(word) for word in line.split()[1:]]


@functools.cache
def one_process(world: int) -> list[float]:
    command = [*netlab.job("losses"), "one", "--world", str(world)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return losses(done.stdout)


def trained(
    kind: str,
    backend: str,
    hosts: int,
    procs: int,
    *options: str,
    wire: str = "tcp",
    dim: int = 128,
    seconds: float = 120,
) -> list[float]:
    """The losses of the job, which all ranks agree on."""
    command = [*netlab.job("losses"), kind, "--backend", backend, "--dim", str(dim)]
    env = wires.settings(wire, backend)
    outcome = netlab.run(command, hosts=hosts, procs=procs, options=options, env=env, seconds=seconds)
    assert outcome.status == 0, outcome
    each = [losses(said) for said in outcome.said]
    assert all(one == each[0] for one in each), outcome
    return each[0]


@SLOW
@pytest.mark.parametrize(
    ("kind", "hosts", "procs"),
    [("fsdp2", 2, 2), ("fsdp2", 4, 1), ("ddp", 2, 2), ("ddp", 4, 1)],
)
@pytest.mark.parametrize("wire", wires.WIRES)
def test_training_across_hosts_gives_the_losses_of_one_process(backend, wire, kind, hosts, procs) -> None:
    wanted = one_process(WORLD)
    assert wanted[-1] < wanted[0] - 0.1, f"the job does not learn: {wanted}"
    assert trained(kind, backend, hosts, procs, wire=wire) == pytest.approx(wanted, rel=1e-4)


@SLOW
@pytest.mark.timeout(400)
def test_ddp_over_a_link_that_loses_one_percent_gives_the_same_losses(backend) -> None:
    if reason := netlab.why_not("--delay"):
        pytest.skip(reason)
    # The switch that delays also loses, where the kernel's packet filter cannot. Small frames: what is lost is a
    # packet, and losses are many.
    lossy = trained("ddp", backend, 2, 2, "--delay", "20us", "--loss", "1%", "--no-gso", dim=256, seconds=300)
    assert lossy == trained("ddp", backend, 2, 2, dim=256)


EXAMPLES = {
    "fsdp2": "FSDP2",
    "fsdp1": "FSDP",
    "ddp": "DDP",
    "dtensor_tp": "",
}


@SLOW
@pytest.mark.parametrize("example", EXAMPLES)
@pytest.mark.parametrize("wire", wires.WIRES)
def test_an_example_runs_across_hosts_under_torchrun(backend, wire, example) -> None:
    script = str(ROOT / "examples" / f"{example}.py")
    # One launcher a host, as on a cluster; the shell fills in what the launcher has to know of its host.
    torchrun = (
        f"exec {sys.executable} -m torch.distributed.run --nnodes $NNODES --node-rank $NODE_RANK --nproc-per-node 2 "
        f"--master-addr $MASTER_ADDR --master-port $MASTER_PORT {script} --backend {backend} --steps 20"
    )
    env = wires.settings(wire, backend)
    outcome = netlab.run(["sh", "-c", torchrun], hosts=2, procs=1, env=env, seconds=150)
    assert outcome.status == 0, outcome
    said = outcome.said[0]
    assert f"backend {backend}: 4 processes" in said and "text never trained on" in said, outcome
    paths = next(line for line in said.splitlines() if line.startswith("paths: "))
    if backend == "smddp":
        assert "all_reduce: " in paths and wire in paths, paths
