"""`smddp-bench COLLECTIVE --torch smddp,gloo`: compares torch.distributed backends in the same processes."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from smddp import command_line, files
from smddp.launch import local
from smddp.launch.environment import complete
from smddp.launch.programs import MAX_RANKS
from smddp.text import parse_size

#: Number of measurements of each backend within a row, in alternation.
_ROUNDS = 5
_TYPES = ("int8", "uint8", "int32", "int64", "half", "float", "double", "bfloat16")
_OPS = ("sum", "prod", "max", "min", "avg")
#: Ratio of busbw to algbw, by the number of ranks.
_BUS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1,
    "reduce": lambda n: 1,
}
_REDUCING = ("all_reduce", "reduce_scatter", "reduce")
#: Collectives with an output of another size than the input, or in other memory.
_WITH_OUTPUT = ("all_gather", "reduce_scatter", "all_to_all")


def main(argv: list[str], backends: str) -> int:
    """Returns the exit status: 0 for right results, 1 for wrong data or a failure, 2 for invalid arguments."""
    given = _arguments(argv)
    given.backends = [name for name in backends.split(",") if name]
    if not given.backends or len(set(given.backends)) != len(given.backends):
        print(f"smddp-bench: --torch {backends!r}: give backends by commas, each once: smddp,gloo", file=sys.stderr)
        return 2
    unknown = [name for name in given.backends if name not in dist.Backend.backend_list]
    if unknown:
        known = ", ".join(name for name in dist.Backend.backend_list if name != "undefined")
        print(f"smddp-bench: --torch: torch has no backend {unknown[0]!r}; here are {known}", file=sys.stderr)
        return 2
    # Rank 0 writes the files; other hosts may lack the folder.
    if given.json and (given.nproc is not None or os.environ.get("RANK") == "0"):
        try:
            files.check_writable(given.json)
        except OSError as error:
            print(f"smddp-bench: --json {given.json}: {error.strerror}", file=sys.stderr)
            return 2
    if given.nproc is not None:
        # The ranks started here must not start others.
        rest = [word for word in argv if not word.startswith("--nproc=")]
        if "--nproc" in rest:
            at = rest.index("--nproc")
            del rest[at : at + 2]
        command = [sys.executable, "-m", "smddp.tools.cli", "bench", *rest, "--torch", backends]
        return local.run(command, given.nproc, "smddp-bench")
    return _Bench(given).run()


def _size(text: str) -> int:
    """Bytes of 8, 64K, 1M, 2G."""
    try:
        return parse_size(text, {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}, "for example 8, 64K, 1M or 2G")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = command_line.Parser(prog="smddp-bench COLLECTIVE --torch BACKEND,BACKEND", allow_abbrev=False)
    parser.add_argument("collective", choices=_BUS)
    parser.add_argument("-b", "--minbytes", type=_size, default="32M")
    parser.add_argument("-e", "--maxbytes", type=_size, default="32M")
    parser.add_argument("-f", "--stepfactor", type=int, default=2, help="from row to row")
    parser.add_argument("-n", "--iters", type=int, default=20)
    parser.add_argument("-w", "--warmup_iters", type=int, default=5)
    parser.add_argument("-d", "--datatype", choices=_TYPES, default="float")
    parser.add_argument("-o", "--op", choices=_OPS, default="sum")
    parser.add_argument("-c", "--check", type=int, default=1)
    parser.add_argument("-T", "--timeout", type=command_line.seconds, default=120.0, help="seconds")
    parser.add_argument(
        "-J", "--json", type=command_line.path, metavar="FILE", help="one for each backend: its name is put in"
    )
    parser.add_argument("--nproc", type=int, help="ranks to start here; else those of torchrun, mpirun or srun")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    given = parser.parse_args(argv)
    if given.stepfactor < 2 or given.minbytes > given.maxbytes or given.iters < 1:
        parser.error("give sizes from -b to -e by -f 2 or more, and -n 1 or more")
    if given.warmup_iters < 0 or given.check < 0 or (given.nproc is not None and not 1 <= given.nproc <= MAX_RANKS):
        parser.error(f"give -w and -c of 0 or more, and --nproc from 1 to {MAX_RANKS}")
    if given.op == "avg" and given.datatype.endswith(("int8", "int32", "int64")):
        parser.error(f"avg of {given.datatype} is another value in each backend: choose a float, or sum")
    return given


class _Bench:
    """One rank."""

    def __init__(self, given: argparse.Namespace) -> None:
        if not complete():
            os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
        limit = datetime.timedelta(seconds=given.timeout)
        dist.init_process_group(given.backends[0], timeout=limit)
        self.given, self.rank, self.size = given, dist.get_rank(), dist.get_world_size()
        self.groups = {name: dist.new_group(backend=name, timeout=limit) for name in given.backends}
        self.dtype = getattr(torch, given.datatype)
        self.device = torch.device(given.device)
        if self.device.type == "cuda":
            devices = torch.get_device_module(self.device)
            devices.set_device(int(os.environ.get("LOCAL_RANK", self.rank)) % devices.device_count())
        self.wrong = 0
        self.results: dict[str, list[dict[str, Any]]] = {name: [] for name in given.backends}

    def run(self) -> int:
        given = self.given
        self.say(
            f"# smddp-bench {given.collective} through torch {torch.__version__}: {self.size} ranks, "
            f"{', '.join(given.backends)} alternating"
        )
        left = f"# {'size':>10}  {'type':>8}  {'redop':>6}"
        halves = "".join(f"  {name:>9}  {'busbw':>6}  {'#wrong':>6}" for name in given.backends)
        ratios = "".join(f"  {'/ ' + name:>8}" for name in given.backends[1:])
        self.say(f"{left}{halves}{ratios}")
        units = "".join(f"  {'(us)':>9}  {'(GB/s)':>6}  {'':>6}" for _ in given.backends)
        self.say(f"# {'(B)':>10}  {'':>8}  {'':>6}{units}")
        size = given.minbytes
        while True:
            self.row(size)
            if size >= given.maxbytes:
                break
            size = min(size * given.stepfactor if size else self.dtype.itemsize * self.size, given.maxbytes)
        self.say(f"# Out of bounds values : {self.wrong} {'OK' if self.wrong == 0 else 'FAILED'}")
        if given.json and self.rank == 0:
            for name in given.backends:
                path = Path(given.json)
                place = path.with_name(f"{path.stem}-{name}{path.suffix}")
                files.write_text(place, json.dumps(self.document(name), indent=1))
        dist.destroy_process_group()
        return 1 if self.wrong else 0

    def say(self, line: str) -> None:
        if self.rank == 0:
            print(line, flush=True)

    def row(self, nbytes: int) -> None:
        count = nbytes // self.dtype.itemsize
        if self.given.collective in _WITH_OUTPUT:
            count = count // self.size * self.size
        calls = {name: self.call(group, count) for name, group in self.groups.items()}
        refused = {}
        for name, call in calls.items():
            try:
                for _ in range(max(self.given.warmup_iters, 1)):
                    call()
            except (NotImplementedError, RuntimeError, ValueError) as error:
                refused[name] = str(error).splitlines()[0]
        each = max(self.given.iters // _ROUNDS, 1)
        seconds = dict.fromkeys(calls, 0.0)
        for _ in range(_ROUNDS):
            for name, call in calls.items():
                if name in refused:
                    continue
                dist.barrier()
                begun = time.perf_counter()
                for _ in range(each):
                    call()
                self.synchronize()
                seconds[name] += (time.perf_counter() - begun) / (each * _ROUNDS)
        nbytes = count * self.dtype.itemsize
        redop = self.given.op if self.given.collective in _REDUCING else "none"
        line = f"{nbytes:>12}  {self.given.datatype:>8}  {redop:>6}"
        times = {}
        for name, group in self.groups.items():
            if name in refused:
                line += f"  {'N/A':>9}  {'':>6}  {'':>6}"
                continue
            times[name] = self.average(seconds[name])
            wrong = self.check(group, count) if self.given.check else None
            self.wrong += wrong or 0
            algbw = nbytes / 1e9 / times[name]
            busbw = algbw * _BUS[self.given.collective](self.size)
            line += f"  {times[name] * 1e6:>9.2f}  {busbw:>6.2f}  {'N/A' if wrong is None else wrong:>6}"
            half = {"time": times[name] * 1e6, "alg_bw": algbw, "bus_bw": busbw, "nwrong": wrong}
            about = {"size": nbytes, "count": count, "type": self.given.datatype, "redop": redop, "root": -1}
            self.results[name].append({**about, "out_of_place": half, "in_place": half})
        first = times.get(self.given.backends[0])
        for name in self.given.backends[1:]:
            line += f"  {first / times[name]:>8.2f}" if first and name in times else f"  {'':>8}"
        self.say(line)
        for name, why in refused.items():
            self.say(f"# {name}: {why}")

    def average(self, seconds: float) -> float:
        """Returns the mean over the ranks."""
        total = torch.tensor([seconds], dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return float(total) / self.size

    def tensors(self, count: int) -> tuple[Any, Any]:
        block = count // self.size
        sizes = {"all_gather": (block, count), "reduce_scatter": (count, block)}
        given, got = sizes.get(self.given.collective, (count, count))
        at = torch.arange(given, device=self.device)
        values = at % 3 + 1 + (self.rank + at) % 2
        return values.to(self.dtype), torch.zeros(got, dtype=self.dtype, device=self.device)

    def call(self, group: Any, count: int) -> Callable[[], Any]:
        return self.bound(group, *self.tensors(count))

    def bound(self, group: Any, given: Any, got: Any) -> Callable[[], Any]:
        op = dist.ReduceOp.PRODUCT if self.given.op == "prod" else getattr(dist.ReduceOp, self.given.op.upper())
        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda: dist.all_reduce(given, op, group),
            "all_gather": lambda: dist.all_gather_into_tensor(got, given, group),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(got, given, op, group),
            "all_to_all": lambda: dist.all_to_all_single(got, given, group=group),
            "broadcast": lambda: dist.broadcast(given, 0, group),
            "reduce": lambda: dist.reduce(given, 0, op, group),
        }
        return calls[self.given.collective]

    def check(self, group: Any, count: int) -> int:
        """Returns the wrong elements of one more call, summed over all ranks, by every rank's known input."""
        name, rank = self.given.collective, self.rank
        inputs = []
        for other in range(self.size):
            self.rank = other
            inputs.append(self.tensors(count)[0])
        self.rank = rank
        given, got = inputs[rank].clone(), self.tensors(count)[1]
        self.bound(group, given, got)()
        self.synchronize()
        stacked, block = torch.stack(inputs), count // self.size
        mine = slice(rank * block, (rank + 1) * block)
        if name in _REDUCING:
            reduce = getattr(torch, {"avg": "mean", "max": "amax", "min": "amin"}.get(self.given.op, self.given.op))
            want = reduce(stacked.to(torch.float64), 0).to(self.dtype)
            want = want[mine] if name == "reduce_scatter" else given if name == "reduce" and rank != 0 else want
        elif name == "all_to_all":
            want = torch.cat([part[mine] for part in inputs])
        else:
            want = stacked.reshape(-1) if name == "all_gather" else inputs[0]
        found = got if name in _WITH_OUTPUT else given
        wrong = torch.tensor([int((found != want).sum())], device=self.device)
        dist.all_reduce(wrong)
        return int(wrong)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.get_device_module(self.device).synchronize()

    def document(self, name: str) -> dict[str, Any]:
        """Returns the results in the format of `smddp-bench compare` and --plot."""
        config = {"iterations": self.given.iters, "has_in_place": False, "devices": []}
        return {
            "version": 2,
            "collective": self.given.collective,
            "backend": name,
            "ranks": self.size,
            "config": config,
            "results": self.results[name],
        }
