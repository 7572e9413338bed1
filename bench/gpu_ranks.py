"""Rank processes on one device for gpu_check.py and gpu_speed.py: starting them, and what they say.

A script that uses this is run again once for each rank, with `--case NAME`, or NAME+NAME for several by the same
processes: starting some takes longer than most cases. What the ranks find is a list of entries (name, verdict, detail);
a rank writes each into a file as it comes, so a rank that dies or hangs is told apart.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# An installed smddp goes first where there is one; the tree's own Python serves a core that was built into it.
PATHS = [str(ROOT / "tests"), *([str(ROOT / "python")] if list((ROOT / "python/smddp").glob("_core*.so")) else [])]

PASS, FAIL, NOT_RUN = "PASS", "FAIL", "not run"


@dataclass
class Rank:
    """One process of a group, and where its tensors are."""

    rank: int
    size: int
    device: Any
    given: dict[str, Any]
    folder: Path
    tallies: dict[str, list[str]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    def say(self, name: str, verdict: str, detail: str = "") -> None:
        with open(self.folder / f"rank{self.rank}.json", "a") as file:
            file.write(json.dumps([name, verdict, detail]) + "\n")

    def judge(self, name: str, good: bool, detail: str = "") -> None:
        self.say(name, PASS if good else FAIL, detail)

    # Many comparisons under one name.

    def same(self, name: str, what: str, got: Any, wanted: Any) -> None:
        """Equal bit for bit."""
        from backend.oracle import same

        found = self.tallies.setdefault(name, [])
        self.counts[name] = self.counts.get(name, 0) + 1
        try:
            same(got.detach().cpu(), wanted)
        except AssertionError as error:
            found.append(f"{what}: {str(error)[:300]}")

    def tell_tallies(self) -> None:
        tallies, counts = self.tallies, self.counts
        self.tallies, self.counts = {}, {}
        for name, wrong in tallies.items():
            if wrong:
                self.say(name, FAIL, f"{len(wrong)} of {counts[name]} wrong, first: {wrong[0]}")
            else:
                self.say(name, PASS, f"{counts[name]} results, bit for bit")

    # The device.

    def sync(self) -> None:
        if self.on_cuda:
            import torch

            torch.cuda.synchronize(self.device)

    def busy(self, cycles: int = 20_000_000) -> None:
        """Keeps the current stream busy for some ten milliseconds, without the host."""
        if self.on_cuda:
            import torch

            torch.cuda._sleep(cycles)

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        if stream is None:
            yield
        else:
            import torch

            with torch.cuda.stream(stream):
                yield

    def new_stream(self) -> Any:
        import torch

        return torch.cuda.Stream(self.device) if self.on_cuda else None


def run(
    script: str,
    case: str,
    size: int,
    seconds: float,
    *,
    device: str,
    env: Callable[[int], dict[str, str]],
    **given: Any,
) -> list[tuple[str, str, str]]:
    """Run a case, or some (a+b), on `size` ranks for `seconds` at most: its entries, for each name the worst rank's.

    A rank of `given["killed"]` is meant to die.
    """
    folder = Path(tempfile.mkdtemp(prefix="smddp-gpu-"))
    processes = []
    for rank in range(size):
        command = [sys.executable, script, "--case", case, "--rank", str(rank), "--size", str(size)]
        command += ["--folder", str(folder), "--device", device, "--given", json.dumps(given)]
        path = os.pathsep.join([*PATHS, *filter(None, [os.environ.get("PYTHONPATH")])])
        with open(folder / f"rank{rank}.log", "w") as log:
            processes.append(
                subprocess.Popen(
                    command,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **env(rank)},
                )
            )
    deadline = time.monotonic() + seconds
    late = []
    for rank, process in enumerate(processes):
        try:
            process.wait(max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            late.append(rank)
            process.kill()
            process.wait()
    found: dict[str, tuple[str, str]] = {}
    order = {PASS: 0, NOT_RUN: 1, FAIL: 2}
    for rank in range(size):
        if rank == given.get("killed"):
            continue
        log = (folder / f"rank{rank}.log").read_text(errors="replace")
        if rank in late:
            found[case] = FAIL, f"rank {rank} was still at it after {seconds:g} s: {log[-400:]}"
        elif processes[rank].returncode:
            found[case] = FAIL, f"rank {rank} ended with {processes[rank].returncode}: {log[-700:]}"
        said = folder / f"rank{rank}.json"
        for line in said.read_text().splitlines() if said.exists() else ():
            name, verdict, detail = json.loads(line)
            if name not in found or order[verdict] > order[found[name][0]]:
                found[name] = verdict, detail if verdict == PASS else f"rank {rank}: {detail}"
    if not found:
        found[case] = FAIL, f"no rank said anything ({folder})"
    return [(name, verdict, detail) for name, (verdict, detail) in found.items()]


def rank_main(cases: dict[str, Callable[[Rank], None]], arguments: argparse.Namespace) -> int:
    """In a rank: make the group and run the cases, until one fails."""
    import torch
    import torch.distributed as dist
    from smddp._register import register

    register()
    device = torch.device(arguments.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    given = json.loads(arguments.given)
    me = Rank(arguments.rank, arguments.size, device, given, Path(arguments.folder))
    os.environ.update(RANK=str(me.rank), WORLD_SIZE=str(me.size), LOCAL_RANK=str(me.rank))
    dist.init_process_group(
        "smddp",
        init_method=f"file://{arguments.folder}/store",
        rank=me.rank,
        world_size=me.size,
        timeout=datetime.timedelta(seconds=given.get("timeout", 60)),
    )
    case = arguments.case
    try:
        for case in arguments.case.split("+"):
            cases[case](me)
            me.tell_tallies()
        dist.destroy_process_group()
    except BaseException as error:
        me.tell_tallies()
        me.say(case, FAIL, f"{type(error).__name__}: {str(error)[:400]}")
        traceback.print_exc()
        return 1
    return 0


def no_gpu() -> str | None:
    """Why there is nothing to run on here."""
    import torch

    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no CUDA device"
    return None


TRIED = """
import ctypes
driver, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
exit(min(driver.cuInit(0) or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0), 255))
"""


@contextlib.contextmanager
def sharing(wanted: bool) -> Iterator[str]:
    """NVIDIA's MPS, by a daemon of our own, for processes that are started meanwhile; yields how they share the GPU.

    Without it they take turns of some milliseconds, so a stream that waits for another process's costs as much.
    """
    turns = "the processes take turns on the GPU"
    control = shutil.which("nvidia-cuda-mps-control") or shutil.which(
        "nvidia-cuda-mps-control", path="/usr/local/nvidia/bin"
    )
    if not wanted or control is None:
        yield f"{turns} ({'--turns' if not wanted else 'there is no nvidia-cuda-mps-control'})"
        return
    if "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
        yield "the processes share the GPU by the MPS of CUDA_MPS_PIPE_DIRECTORY"
        return
    folder = tempfile.mkdtemp(prefix="smddp-mps-")
    own = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
    env = {**os.environ, **own}
    subprocess.run([control, "-d"], env=env, timeout=30)
    try:
        tried = subprocess.run([sys.executable, "-c", TRIED], env=env, timeout=60)
        if tried.returncode:
            yield f"{turns} (MPS does not work here: error {tried.returncode})"
            return
        os.environ.update(own)
        try:
            yield "the processes share the GPU by MPS"
        finally:
            for name in own:
                del os.environ[name]
    finally:
        subprocess.run([control], input="quit -t 5\n", text=True, env=env, timeout=60)


def machine() -> str:
    """The GPU's name, its driver and torch: figures hold for these alone."""
    import torch

    driver = "unknown"
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
        driver = subprocess.run(query, capture_output=True, text=True, timeout=30).stdout.strip() or driver
    return f"{torch.cuda.get_device_name(0)}, driver {driver}, torch {torch.__version__}, {os.cpu_count()} cores"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the ranks are told."""
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--given", help=argparse.SUPPRESS)
    parser.add_argument("--turns", action="store_true", help="processes take turns on the GPU: no MPS")
    parser.add_argument(
        "--device", default="cuda:0", help="cpu runs what it can on CPU tensors: a check of this script, not of a GPU"
    )
