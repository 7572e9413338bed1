"""The fault matrix: `python -m faults.matrix --ways shm,tcp --sizes 2,4 --faults kill,stop`, from tests/."""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import multiprocessing.connection
import os
import random
import re
import socket
import statistics
import tempfile
import time
from dataclasses import dataclass, field

from hosts import wires

from faults import cell

FAULTS = ("kill", "exit", "stop", "exception")
# Seconds of each call, and how much later than that a rank hangs.
_LIMIT, _GRACE = cell.LIMIT.total_seconds(), 10.0
# A death is known in this many seconds.
_DEATH = 1.0
# What messages call it, where that is not the name of the cell's call. Every call has a barrier after it.
_WORDS = {"ring": ("send", "recv"), "new_group": ("all_reduce", "new_group")}


@dataclass
class Found:
    """What came of one cell. raised: (seconds after the fault, text) of each survivor. bad: a promise is broken."""

    plan: dict
    raised: list[tuple[float, str]] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)
    unnamed: list[str] = field(default_factory=list)
    pid: int = 0

    def names(self, text: str) -> dict[str, bool]:
        words = (*_WORDS.get(self.plan["call"], (self.plan["call"],)), "barrier")
        return {
            "rank": re.search(rf"\brank {self.plan['victim']}\b", text) is not None,
            "host": socket.gethostname() in text,
            "pid": re.search(rf"\b{self.pid}\b", text) is not None,
            "operation": any(re.search(rf"\b{word} (#|on group)", text) for word in words),
            # The making of a group has none.
            "number": re.search(r" #\d+( (to|from) (any )?rank.*?)? on group|new_group on group", text) is not None,
        }


def one(plan: dict) -> Found:
    """Forks the ranks of a cell from this process, which has imported torch and has no thread of smddp's."""
    context, found = multiprocessing.get_context("fork"), Found(plan)
    ranks = {}
    with tempfile.TemporaryDirectory() as folder:
        plan = dict(plan, file=os.path.join(folder, "store"))
        for rank in range(plan["size"]):
            mine, theirs = context.Pipe()
            process = context.Process(target=cell.run, args=(plan, rank, theirs))
            process.start()
            theirs.close()
            ranks[mine] = (rank, process)
        try:
            _listen(ranks, found)
        finally:
            for pipe, (_, process) in ranks.items():
                process.kill()
                process.join()
                pipe.close()
    return found


def _listen(ranks: dict, found: Found) -> None:
    waiting, fault, raised = dict(ranks), 0.0, []
    until = time.monotonic() + 2 * _LIMIT + _GRACE
    while any(rank != found.plan["victim"] for rank, _ in waiting.values()) or not fault:
        ready = multiprocessing.connection.wait(list(waiting), max(0.0, until - time.monotonic()))
        if not ready:
            found.bad.append(f"HANG of ranks {sorted(rank for rank, _ in waiting.values())}")
            break
        for pipe in ready:
            rank = waiting[pipe][0]
            try:
                word = pipe.recv()
            except EOFError:
                word = ("ended",)
            if rank == found.plan["victim"]:
                if word[0] == "fault":
                    fault, found.pid = word[1:]
                    continue
                if not fault:
                    found.bad.append(f"the victim has no fault: {word}")
                    return
            elif word[0] == "raised":
                raised.append(word[1:])
            else:
                found.bad.append(f"rank {rank}: {word}")
            del waiting[pipe]
    if not fault:
        return
    found.raised = [(at - fault, text) for at, text in raised]
    for seconds, text in found.raised:
        if seconds < 0:
            found.bad.append(f"FALSE ALARM {-seconds:.3f} s before the fault: {text}")
        if seconds > _DEATH and found.plan["fault"] in ("kill", "exit"):
            found.bad.append(f"LATE, after {seconds:.3f} s: {text}")
        if missing := [what for what, named in found.names(text).items() if not named]:
            found.unnamed.append(f"no {', '.join(missing)}: {text}")


def plans(ways: list[str], sizes: list[int], faults: list[str], calls: list[str], seed: int) -> list[dict]:
    draw, made = random.Random(seed), []
    for way, size, fault, call in itertools.product(ways, sizes, faults, calls):
        settings = {} if way == "shm" else wires.WIRES[way]
        # A group is made with its call; the fault is before it.
        inside = fault != "exception" and draw.random() < 0.5
        plan = {"way": way, "size": size, "fault": fault, "call": call, "victim": draw.randrange(size)}
        more = {"inside": inside, "seed": draw.randrange(1000), "environment": settings}
        made.append(plan | more)
    return made


def table(cells: list[Found]) -> str:
    lines = ["| fault | way | faults | known after, median | most | rank | host | pid | operation | number |"]
    lines.append("|---" * 10 + "|")
    keys = dict.fromkeys((each.plan["fault"], each.plan["way"]) for each in cells)
    for fault, way in keys:
        here = [each for each in cells if (each.plan["fault"], each.plan["way"]) == (fault, way)]
        after = [seconds for each in here for seconds, _ in each.raised]
        named = [each.names(text) for each in here for _, text in each.raised]
        if not named:
            continue
        shares = [f"{100 * sum(each[k] for each in named) / len(named):.1f} %" for k in named[0]]
        row = [fault, way, str(len(here)), f"{statistics.median(after):.2f} s", f"{max(after):.2f} s", *shares]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ways", default="shm,tcp,fabric")
    parser.add_argument("--sizes", default="2,4,8")
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--calls", default=",".join(cell.CALLS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=1)
    given = parser.parse_args()
    sizes = [int(size) for size in given.sizes.split(",")]
    split = [word.split(",") for word in (given.ways, given.faults, given.calls)]
    ways = split[0]
    if "fabric" in ways and (reason := wires.why_not("fabric")):
        print(f"fabric is left out: {reason}")
        ways.remove("fabric")
    cells = []
    for turn in range(given.rounds):
        for plan in plans(ways, sizes, split[1], split[2], given.seed + turn):
            found = one(plan)
            cells.append(found)
            for word in (*found.bad, *found.unnamed):
                print(f"{plan}: {word}", flush=True)
    print(table(cells))
    broken = sum(bool(each.bad) for each in cells)
    print(f"{len(cells)} faults; a hang, a wrong result, a false or a late alarm in {broken}")
    return int(broken > 0)


if __name__ == "__main__":
    # Once, for all the ranks that are forked from here.
    from smddp._register import register

    register()

    raise SystemExit(main())
