#!/usr/bin/env python3
"""Speed on one GPU, as ratios to limits that are measured in the same run.

  python bench/gpu_speed.py                       all rows, under fifteen minutes
  python bench/gpu_speed.py --rows launch fsdp2

Several processes share the device, so all "links" are its one memory, and absolute times hold for the named GPU alone.
How it is measured: every case is verified first; then WARM-UP rounds, then ROUNDS rounds in which ours and the limit
take turns, so that whatever else the device does meets both; CUDA events around a batch of calls, the slowest rank's
time, the median round. Buffers hold random values: memory of zeros copies faster on some devices.

The limits:
- all_gather: the same bytes by the same way without any waiting between ranks: each rank copies (N - 1) blocks of a
  peer's memory (CUDA IPC) into its own by cudaMemcpy, all ranks at the same time.
- all_reduce, reduce_scatter: the memory traffic of the smallest kernel that does it: N reads and one write of each
  element (and, for all_reduce, the copies of N - 1 parts), timed as torch kernels over own memory, all ranks at once.
- launch: the host's time for one call, without waiting.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from gpu.processes import FAIL, PASS, Rank, add_arguments, machine, no_gpu, rank_main, run, sharing

WARM_UP, ROUNDS = 5, 21
MIB = 1 << 20


def timed(
    me: Rank, calls: dict[str, Callable[[], object]], repeat: int, rounds: int = ROUNDS
) -> dict[str, list[float]]:
    """Microseconds of one call: for each name the slowest rank's time, one for each round."""
    import torch
    import torch.distributed as dist

    found = []
    for turn in range(WARM_UP + rounds):
        row = []
        for call in calls.values():
            me.sync()
            dist.barrier()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(repeat):
                call()
            end.record()
            end.synchronize()
            row.append(begin.elapsed_time(end) * 1e3 / repeat)
        if turn >= WARM_UP:
            found.append(row)
    mine = torch.tensor(found)
    every = [torch.empty_like(mine) for _ in range(me.size)]
    dist.all_gather(every, mine)
    slowest = torch.stack(every).amax(0)
    return {name: slowest[:, index].tolist() for index, name in enumerate(calls)}


def ratio_row(me: Rank, name: str, took: dict[str, list[float]], goal: float) -> None:
    """ours over limit, by rounds."""
    if me.rank:
        return
    ratio = statistics.median(a / b for a, b in zip(took["ours"], took["limit"]))
    ours, limit = (statistics.median(took[key]) for key in ("ours", "limit"))
    me.check(name, ratio <= goal, f"{ratio:.3f} (<= {goal:g}); ours {ours:,.1f} us, limit {limit:,.1f} us")


def peers_memory(me: Rank, tensor):
    """The other ranks' tensors, mapped here by torch's own CUDA IPC."""
    import torch.distributed as dist
    from torch.multiprocessing.reductions import reduce_tensor

    # One for each reader: torch counts them, and lets the memory go when each has.
    mine = [reduce_tensor(tensor) if other != me.rank else None for other in range(me.size)]
    found = [None] * me.size
    dist.all_gather_object(found, mine)
    meant = [given[me.rank] for other, given in enumerate(found) if other != me.rank]
    return [rebuild(*arguments) for rebuild, arguments in meant]


def gather(me: Rank) -> None:
    """all_gather against the copies alone."""
    import torch

    for mib in (1, 16, 64, 256, 1024):
        if mib <= me.given["largest"]:
            gather_of(me, mib * MIB)
            torch.cuda.empty_cache()


def gather_of(me: Rank, total: int) -> None:
    import torch
    import torch.distributed as dist

    count = total // me.size // 4
    mine = torch.randn(count, device=me.device)
    out = torch.empty(count * me.size, device=me.device)
    dist.all_gather_into_tensor(out, mine)
    # As integers, whose sum depends on no order.
    sums = [torch.empty(1, dtype=torch.int64, device=me.device) for _ in range(me.size)]
    dist.all_gather(sums, mine.view(torch.int32).sum().view(1))
    wrong = [i for i, one in enumerate(out.view(torch.int32).chunk(me.size)) if one.sum() != sums[i][0]]
    name = f"all_gather {total // MIB} MiB, {me.size} processes"
    if wrong:
        me.check(name, False, f"blocks {wrong} are wrong")
        return
    peers = peers_memory(me, mine)
    parts = out.chunk(me.size)
    targets = [part for other, part in enumerate(parts) if other != me.rank]

    def copies() -> None:
        for target, peer in zip(targets, peers):
            target.copy_(peer)
        parts[me.rank].copy_(mine)

    repeat = max(1, min(50, (256 * MIB) // total))
    took = timed(me, {"ours": lambda: dist.all_gather_into_tensor(out, mine), "limit": copies}, repeat)
    ratio_row(me, name, took, 1.1)
    # torch's sender lets memory go when its readers have; at its exit that would be too late.
    peers.clear()
    dist.barrier()
    torch.cuda.ipc_collect()


def reductions(me: Rank) -> None:
    """all_reduce and reduce_scatter of 64 MiB against their memory traffic."""
    import torch
    import torch.distributed as dist

    size, count = me.size, 64 * MIB // 4
    tensor = torch.randn(count, device=me.device)
    out = torch.empty(count // size, device=me.device)
    parts = tensor.view(size, -1)
    whole = torch.empty(count, device=me.device)

    def scatter_limit() -> None:
        torch.sum(parts, 0, out=out)

    def reduce_limit() -> None:
        torch.sum(parts, 0, out=out)
        for part in whole.view(size, -1):
            part.copy_(out)

    ours = torch.ones(count, device=me.device)
    dist.all_reduce(ours)
    wrong = int((ours != size).sum())
    if wrong:
        me.check("all_reduce", False, f"{wrong} wrong elements")
        return
    took = timed(me, {"ours": lambda: dist.all_reduce(ours), "limit": reduce_limit}, 3)
    ratio_row(me, f"all_reduce 64 MiB, {size} processes", took, 1.3)
    took = timed(me, {"ours": lambda: dist.reduce_scatter_tensor(out, tensor), "limit": scatter_limit}, 3)
    ratio_row(me, f"reduce_scatter 64 MiB, {size} processes", took, 1.3)


def beside(me: Rank) -> None:
    """A large matrix product alone, and while all_gathers run on another stream; rank 0 computes."""
    import torch
    import torch.distributed as dist

    block = torch.randn(64 * MIB // 4, device=me.device)
    out = torch.empty(block.numel() * me.size, device=me.device)
    a = torch.randn(8192, 8192, device=me.device, dtype=torch.bfloat16)
    b = torch.randn_like(a)
    stream = me.new_stream()
    found: dict[str, list[float]] = {"ours": [], "limit": []}
    early = 0
    for turn in range(WARM_UP + ROUNDS):
        for kind in found:
            me.sync()
            dist.barrier()
            works = []
            if kind == "ours":
                with me.stream(stream):
                    works = [dist.all_gather_into_tensor(out, block, async_op=True) for _ in range(100)]
            if me.rank == 0:
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                for _ in range(10):
                    a @ b
                end.record()
                end.synchronize()
                if turn >= WARM_UP:
                    early += kind == "ours" and works[-1].is_completed()
                    found[kind].append(begin.elapsed_time(end) * 1e2)
            for work in works:
                work.wait()
    name = f"matrix product beside all_gather, {me.size} processes"
    if early:
        me.check(name, False, f"the all_gathers were over before it in {early} rounds")
        return
    ratio_row(me, name, found, 1.01)


def launch(me: Rank) -> None:
    """What one small all_gather costs the host."""
    import torch
    import torch.distributed as dist

    mine = torch.randn(256, device=me.device)
    out = torch.empty(256 * me.size, device=me.device)
    samples = []
    for turn in range(WARM_UP + ROUNDS):
        me.sync()
        dist.barrier()
        begun = time.perf_counter()
        for _ in range(100):
            dist.all_gather_into_tensor(out, mine, async_op=True)
        if turn >= WARM_UP:
            samples.append((time.perf_counter() - begun) * 1e4)
    me.sync()
    took = statistics.median(samples)
    if me.rank == 0:
        me.check("launch of an all_gather of 1 KiB", took <= 15, f"{took:.1f} us (<= 15)")


def fsdp2(me: Rank) -> None:
    """A step of FSDP2 over smddp against the same over gloo, whose tensors torch copies to the host and back."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    groups = {"ours": dist.group.WORLD, "limit": dist.new_group(backend="gloo")}
    steps = {}
    for name, group in groups.items():
        torch.manual_seed(1)
        model = nn.Sequential(
            *[nn.Sequential(nn.Linear(2048, 4096), nn.GELU(), nn.Linear(4096, 2048)) for _ in range(4)]
        )
        model.to(me.device)
        mesh = DeviceMesh.from_group(group, me.device.type)
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        # gloo has no average.
        model.set_force_sum_reduction_for_comms(True)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)

        def step(model=model, optimizer=optimizer) -> float:
            generator = torch.Generator().manual_seed(me.rank)
            loss = model(torch.randn(32, 2048, generator=generator).to(me.device)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return float(loss)

        steps[name] = step
    losses = {name: [step() for _ in range(3)] for name, step in steps.items()}
    if max(abs(a - b) / abs(b) for a, b in zip(losses["ours"], losses["limit"])) > 1e-4:
        me.check("FSDP2", False, f"the losses differ: {losses}")
        return
    ratio_row(me, f"FSDP2 step over smddp / over gloo, {me.size} processes", timed(me, steps, 1, 7), 0.3)


CASES = {f.__name__: f for f in (gather, reductions, beside, launch, fsdp2)}


# Who measures what: one start of processes for each number of them.
ROWS = {
    2: ("launch", "reductions", "gather"),
    4: ("reductions", "beside", "fsdp2", "gather"),
    8: ("reductions", "gather"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--sizes", nargs="+", type=int, choices=ROWS, default=list(ROWS), help="of groups")
    parser.add_argument("--largest", type=int, default=1024, help="MiB that an all_gather makes at most")
    add_arguments(parser)
    arguments = parser.parse_args()
    if arguments.case:
        return rank_main(CASES, arguments)
    reason = no_gpu()
    if reason is not None:
        print(f"nothing was measured: {reason}")
        return 2
    with sharing(not arguments.turns) as how:
        print(f"{machine()}; {how}")
        print("| row | ratio of times to the limit, or to gloo (goal) | |\n|---|---|---|")
        missed = 0
        for size, cases in ROWS.items():
            chosen = [case for case in cases if case in arguments.rows]
            if not chosen or size not in arguments.sizes:
                continue
            found = run(
                os.path.abspath(__file__), "+".join(chosen), size, 300,
                device=arguments.device, env=lambda rank: {}, largest=arguments.largest,
            )  # fmt: skip
            for name, verdict, detail in found:
                missed += verdict != PASS
                outcome = "**missed**" if verdict == FAIL else "met"
                print(f"| {name} | {' '.join(detail.split())} | {outcome} |", flush=True)
        print(f"\n{missed} missed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
