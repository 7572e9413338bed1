#!/usr/bin/env python3
"""Tests of collectives on one GPU, which several processes share.

  python tests/gpu/check.py                    all parts, under ten minutes
  python tests/gpu/check.py --part kill trace  selected parts
  python tests/gpu/check.py --device cpu       a test of this script, on CPU tensors

Compares results with torch's arithmetic. Prints one line for each check: PASS, FAIL, or "not run" with the reason. The
last line counts them. The exit status is 1 if a check failed. One GPU shows order, lifetimes and values; it does not
show links between GPUs.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu.failures import bad_input, kill
from gpu.kernels import trace
from gpu.offloading import offload
from gpu.ordering import late, order, soak
from gpu.processes import FAIL, NOT_RUN, PASS, add_arguments, machine, no_gpu, rank_main, run, sharing
from gpu.training import training
from gpu.values import formats, values

CASES = {
    f.__name__: f for f in (values, order, late, formats, soak, kill, trace, training, bad_input, offload)
}  # fmt: skip


class Report:
    """Runs cases, prints their results and counts them."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.counts = {PASS: 0, FAIL: 0, NOT_RUN: 0}

    def case(self, label: str, case: str, size: int, seconds: float, env=None, **given) -> None:
        begun = time.monotonic()

        def whole(rank: int) -> dict[str, str]:
            # The death of a client may stop the other clients of MPS.
            alone = {"CUDA_MPS_PIPE_DIRECTORY": "/nowhere"} if "killed" in given else {}
            return {**(env(rank) if env else {}), **alone}

        found = run(os.path.abspath(__file__), case, size, seconds, device=self.arguments.device, env=whole, **given)
        for name, verdict, detail in found:
            self.line(label, name, verdict, detail)
        print(f"  {'':<34} {time.monotonic() - begun:.0f} s", flush=True)

    def line(self, label: str, name: str, verdict: str, detail: str) -> None:
        self.counts[verdict] += 1
        print(f"{verdict:<8} {label:<26} {name:<36} {' '.join(detail.split())}", flush=True)


def segments(report: Report) -> dict[str, Callable[[int], dict[str, str]]]:
    if report.arguments.device == "cpu":
        return {"": lambda rank: {}}
    return {
        "": lambda rank: {"PYTORCH_CUDA_ALLOC_CONF": ""},
        " expandable": lambda rank: {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    }


def part_values(report: Report) -> None:
    for size in (2, 4, 8):
        for label, env in segments(report).items():
            # A few types are enough for the second allocator and for the largest group.
            types = ["torch.float32", "torch.bfloat16", "torch.int64", "torch.uint8"] if label or size > 4 else None
            report.case(f"values {size} ranks{label}", "values", size, 150, env, types=types)


def part_order(report: Report) -> None:
    for label, env in segments(report).items():
        report.case(f"order 4 ranks{label}", "order", 4, 90, env)


def part_host(report: Report) -> None:
    """Tests the path of devices without peer access, through host memory."""

    def env(rank: int) -> dict[str, str]:
        return {"SMDDP_CUDA_PATH": "host"}

    few = ["torch.float32", "torch.bfloat16", "torch.uint8"]
    report.case("by the host, 4 ranks", "values", 4, 150, env, types=few)
    report.case("by the host, 4 ranks", "order", 4, 90, env)
    report.case("by the host, 4 ranks", "kill", 4, 90, env, killed=3, timeout=60)


def part_late(report: Report) -> None:
    for label, env in segments(report).items():
        report.case(f"late, 4 ranks{label}", "late", 4, 60, env)


def part_soak(report: Report) -> None:
    for label, env in segments(report).items():
        share = report.arguments.iterations if not label else max(report.arguments.iterations // 10, 100)
        report.case(f"soak{label}", "soak", 4, 180, env, iterations=share)


def part_kill(report: Report) -> None:
    for size in (2, 4):
        report.case(f"kill of 1 of {size}", "kill", size, 90, killed=size - 1, timeout=60)


def part_trace(report: Report) -> None:
    # One rank has another limit of multiprocessors for a reduction.
    report.case("trace 4 ranks", "trace", 4, 90, lambda rank: {"SMDDP_CUDA_SMS": "3"} if rank == 3 else {})


def part_training(report: Report) -> None:
    for label, env in segments(report).items():
        report.case(f"training 4 ranks{label}", "training", 4, 120, env)


def part_nodes(report: Report) -> None:
    few = ["torch.float32", "torch.bfloat16", "torch.int32"]
    ways = {"tcp": {"SMDDP_TRANSPORT": "tcp"}}
    fabric = {"SMDDP_TRANSPORT": "fabric:tcp"}
    reason = no_libfabric()
    if reason is None:
        ways["libfabric"] = fabric
    else:
        report.line("2 nodes over libfabric", "values", NOT_RUN, reason)
    for way, settings in ways.items():

        def env(rank: int, settings=settings) -> dict[str, str]:
            return {**settings, "SMDDP_NODE": f"node{rank // 2}"}

        report.case(f"2 nodes over {way}", "values", 4, 150, env, types=few)
        report.case(f"2 nodes over {way}", "training", 4, 120, env)
        report.case(f"2 nodes over {way}", "kill", 4, 90, env, killed=3, timeout=60)
    for wire_format in ("bf16", "f16", "int8"):

        def coded(rank: int, wire_format=wire_format) -> dict[str, str]:
            return {"SMDDP_TRANSPORT": "tcp", "SMDDP_NODE": f"node{rank // 2}", "SMDDP_WIRE_FORMAT": wire_format}

        report.case("2 nodes over tcp", "formats", 4, 90, coded)


def no_libfabric() -> str | None:
    import ctypes

    try:
        ctypes.CDLL(os.environ.get("SMDDP_LIBFABRIC") or "libfabric.so.1")
    except OSError as error:
        return f"{error}; SMDDP_LIBFABRIC may name the file"
    return None


def part_bad(report: Report) -> None:
    report.case("bad input 2 ranks", "bad_input", 2, 90)


def part_offload(report: Report) -> None:
    report.case("offload", "offload", 1, 180)


PARTS = {
    "values": part_values,
    "order": part_order,
    "bad": part_bad,
    "trace": part_trace,
    "kill": part_kill,
    "training": part_training,
    "host": part_host,
    "nodes": part_nodes,
    "soak": part_soak,
    "late": part_late,
    "offload": part_offload,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS), help="parts to run")
    parser.add_argument("--iterations", type=int, default=10_000, help="calls of the soak part")
    add_arguments(parser)
    arguments = parser.parse_args()
    if arguments.case:
        return rank_main(CASES, arguments)
    if arguments.device != "cpu":
        reason = no_gpu()
        if reason is not None:
            print(f"no check ran: {reason}. --device cpu tests the script itself")
            return 2
    report = Report(arguments)
    begun = time.monotonic()
    with sharing(arguments.device != "cpu" and not arguments.turns) as how:
        if arguments.device != "cpu":
            print(f"{machine()}; {how}", flush=True)
        for part in arguments.part:
            PARTS[part](report)
    counts = report.counts
    print(
        f"\n{'FAIL' if counts[FAIL] else 'PASS'}: {counts[PASS]} passed, {counts[FAIL]} failed, "
        f"{counts[NOT_RUN]} not run, {time.monotonic() - begun:.0f} s"
    )
    return 1 if counts[FAIL] else 0


if __name__ == "__main__":
    sys.exit(main())
