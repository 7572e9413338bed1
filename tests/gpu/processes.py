"""Rank processes on one device, for check.py and bench/gpu_speed.py.

The script runs again for each rank, with `--case NAME`, or NAME+NAME for several cases in the same processes. A rank
appends its results (name, verdict, detail) to a file, so those before a crash or a hang are known.
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

ROOT = Path(__file__).resolve().parents[2]
# The sources are used only if a core was built into them; otherwise the installed smddp is.
_SOURCES = [str(ROOT / "python")] if list((ROOT / "python/smddp").glob("_core*.so")) else []
PATHS = [str(ROOT / "tests"), str(ROOT / "bench"), *_SOURCES]

PASS, FAIL, NOT_RUN = "PASS", "FAIL", "not run"


@dataclass
class Rank:
    """One process of a group, and the device of its tensors."""

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

    def record(self, name: str, verdict: str, detail: str = "") -> None:
        with open(self.folder / f"rank{self.rank}.json", "a") as file:
            file.write(json.dumps([name, verdict, detail]) + "\n")

    def check(self, name: str, good: bool, detail: str = "") -> None:
        self.record(name, PASS if good else FAIL, detail)

    def same(self, name: str, what: str, got: Any, wanted: Any) -> None:
        """Compares bit for bit. All comparisons of one name give one result."""
        from backend.oracle import same

        found = self.tallies.setdefault(name, [])
        self.counts[name] = self.counts.get(name, 0) + 1
        try:
            same(got.detach().cpu(), wanted)
        except AssertionError as error:
            found.append(f"{what}: {str(error)[:300]}")

    def report_comparisons(self) -> None:
        tallies, counts = self.tallies, self.counts
        self.tallies, self.counts = {}, {}
        for name, wrong in tallies.items():
            if wrong:
                self.record(name, FAIL, f"{len(wrong)} of {counts[name]} wrong, first: {wrong[0]}")
            else:
                self.record(name, PASS, f"{counts[name]} results, bit for bit")

    def sync(self) -> None:
        if self.on_cuda:
            import torch

            torch.cuda.synchronize(self.device)

    def busy(self, cycles: int = 20_000_000) -> None:
        """Occupies the current stream for some ten milliseconds, without the host."""
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
    """Runs one or several cases (a+b) on `size` ranks for at most `seconds`. Returns each name's worst result.

    Rank `given["killed"]` dies on purpose and has no results.
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
            found[case] = FAIL, f"rank {rank} did not end within {seconds:g} s: {log[-400:]}"
        elif processes[rank].returncode:
            found[case] = FAIL, f"rank {rank} exited with {processes[rank].returncode}: {log[-700:]}"
        results = folder / f"rank{rank}.json"
        for line in results.read_text().splitlines() if results.exists() else ():
            name, verdict, detail = json.loads(line)
            if name not in found or order[verdict] > order[found[name][0]]:
                found[name] = verdict, detail if verdict == PASS else f"rank {rank}: {detail}"
    if not found:
        found[case] = FAIL, f"no rank reported a result ({folder})"
    return [(name, verdict, detail) for name, (verdict, detail) in found.items()]


def rank_main(cases: dict[str, Callable[[Rank], None]], arguments: argparse.Namespace) -> int:
    """Creates the group in a rank and runs the cases until one fails. Returns the exit status."""
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
            me.report_comparisons()
        dist.destroy_process_group()
    except BaseException as error:
        me.report_comparisons()
        me.record(case, FAIL, f"{type(error).__name__}: {str(error)[:400]}")
        traceback.print_exc()
        return 1
    return 0


def no_gpu() -> str | None:
    """Returns the reason why no GPU is usable, or None."""
    import torch

    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no CUDA device"
    return None


_MPS_PROBE = """
import ctypes
driver, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
exit(min(driver.cuInit(0) or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0), 255))
"""


@contextlib.contextmanager
def sharing(wanted: bool) -> Iterator[str]:
    """Runs a daemon of NVIDIA's MPS for processes that start inside. Yields a description of how they share the GPU.

    Without MPS, processes take turns of some milliseconds, and so does a stream that waits for another process.
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
        tried = subprocess.run([sys.executable, "-c", _MPS_PROBE], env=env, timeout=60)
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
    """Returns the GPU's name and the versions of driver and torch, for which figures hold."""
    import torch

    driver = "unknown"
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
        driver = subprocess.run(query, capture_output=True, text=True, timeout=30).stdout.strip() or driver
    return f"{torch.cuda.get_device_name(0)}, driver {driver}, torch {torch.__version__}, {os.cpu_count()} cores"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the rank processes and of the device."""
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--given", help=argparse.SUPPRESS)
    parser.add_argument("--turns", action="store_true", help="start no MPS: the processes take turns on the GPU")
    parser.add_argument("--device", default="cuda:0", help="cpu: run on CPU tensors, as a test of the script")
