"""The fault matrix: `python -m faults.matrix --ways shm,tcp --sizes 2,4 --faults kill,stop`, from tests/."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import multiprocessing.connection
import random
import re
import socket
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

from hosts import wires

from faults import acts, cell

FAULTS = ("kill", "exit", "stop", "exception")
# Seconds of each call, and how much later than that a rank hangs.
_LIMIT, _GRACE = acts.LIMIT.total_seconds(), 10.0
# A death is known in this many seconds.
_DEATH = 1.0
_MAKING = "(new_group|init_process_group)"


@dataclass
class Found:
    """What came of one cell.

    raised: (seconds after the fault, text) of each survivor. left: seconds, of those that destroyed the group and were
    told nothing. bad: a promise is broken.
    """

    plan: dict
    raised: list[tuple[float, str]] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)
    left: list[float] = field(default_factory=list)
    unnamed: list[str] = field(default_factory=list)
    pid: int = 0

    def names(self, text: str) -> dict[str, bool]:
        return {
            "rank": re.search(rf"\brank {self.plan['victim']}\b", text) is not None,
            "host": socket.gethostname() in text,
            "pid": re.search(rf"\b{self.pid}\b", text) is not None,
            "operation": any(re.search(rf"\b{word} (#|on group)", text) for word in acts.words(self.plan["call"])),
            # The making of a group has none.
            "number": re.search(rf" #\d+( (to|from) (any )?rank.*?)? on group|{_MAKING} on group", text) is not None,
        }


def one(plan: dict) -> Found:
    """Forks the ranks of a cell from this process, which has imported torch and has no thread of smddp's."""
    context, found = multiprocessing.get_context("fork"), Found(plan)
    ranks = {}
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


def keep(pipe: object) -> None:
    """A store for all cells, in a process of its own: ranks that stop keep no lock of it."""
    cell.die_with_parent()
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    while True:
        time.sleep(60)


def _listen(ranks: dict, found: Found) -> None:
    waiting, fault, raised, left = dict(ranks), 0.0, [], []
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
                # A group may be destroyed before the fault in that.
                if word[0] == "left":
                    continue
                if not fault:
                    found.bad.append(f"the victim has no fault: {word}")
                    return
            elif word[0] == "raised":
                raised.append(word[1:])
            elif word[0] == "left":
                left.append(word[1])
            else:
                found.bad.append(f"rank {rank}: {word}")
            del waiting[pipe]
    if not fault:
        return
    found.raised = [(at - fault, text) for at, text in raised]
    found.left = [at - fault for at in left]
    # Of a rank that has not come to init_process_group nobody knows that it ended: it may yet come.
    soon = found.plan["fault"] in ("kill", "exit") and found.plan["call"] != "init"
    found.bad += [f"LATE, left after {seconds:.3f} s" for seconds in found.left if soon and seconds > _DEATH]
    for seconds, text in found.raised:
        if seconds < 0:
            found.bad.append(f"FALSE ALARM {-seconds:.3f} s before the fault: {text}")
        if soon and seconds > _DEATH:
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
    head = "| fault | way | ranks | faults | known after, median | most | rank | host | pid | operation | number |"
    lines = [head, "|---" * 11 + "|"]
    # Where no call is under way, the way makes no row.
    ways = sorted({each.plan["way"] for each in cells})
    parts = [[way] for way in ways] if cells[0].plan["call"] not in acts.EDGES else [ways]
    for fault, part in itertools.product(FAULTS, parts):
        here = [each for each in cells if each.plan["fault"] == fault and each.plan["way"] in part]
        after = [seconds for each in here for seconds in (*(at for at, _ in each.raised), *each.left)]
        named = [each.names(text) for each in here for _, text in each.raised]
        if not after:
            continue
        shares = [f"{100 * sum(each[k] for each in named) / len(named):.1f} %" for k in (named or [{}])[0]]
        known = statistics.median(after), max(after)
        sizes = ", ".join(map(str, sorted({each.plan["size"] for each in here})))
        row = [fault, ", ".join(part), sizes, str(len(here)), *(f"{max(0.0, at):.2f} s" for at in known)]
        lines.append(f"| {' | '.join(row + (shares or [''] * 5))} |")
    return "\n".join(lines)


def tables(cells: list[Found]) -> str:
    """Of faults in calls, and of those where there is no call yet or none any more."""
    # A fault that could not begin is none, but still bad.
    cells = [each for each in cells if each.pid]
    parts = {"": [each for each in cells if each.plan["call"] not in acts.EDGES]}
    parts |= {edge: [each for each in cells if each.plan["call"] == edge] for edge in acts.EDGES}
    return "\n\n".join(f"{name}\n{table(part)}".strip() for name, part in parts.items() if part)


def saved(path: Path | None) -> list[Found]:
    lines = path.read_text().splitlines() if path and path.exists() else []
    return [Found(**json.loads(line)) for line in lines]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ways", default="shm,tcp,fabric")
    parser.add_argument("--sizes", default="2,4,8")
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--calls", default=",".join(acts.CALLS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--into", type=Path, help="adds to the faults in this file those that it lacks")
    given = parser.parse_args()
    sizes = [int(size) for size in given.sizes.split(",") if size]
    ways, faults, calls = (word.split(",") for word in (given.ways, given.faults, given.calls))
    if "fabric" in ways and (reason := wires.why_not("fabric")):
        print(f"fabric is left out: {reason}")
        ways.remove("fabric")
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe()
    context.Process(target=keep, args=(theirs,), daemon=True).start()
    port, cells = mine.recv(), saved(given.into)
    todo = [plan for turn in range(given.rounds) for plan in plans(ways, sizes, faults, calls, given.seed + turn)]
    done = [{key: each.plan[key] for key in each.plan if key not in ("port", "prefix")} for each in cells]
    for number, plan in enumerate(plan for plan in todo if plan not in done):
        found = one(plan | {"port": port, "prefix": f"cell{number}"})
        cells.append(found)
        for word in (*found.bad, *found.unnamed):
            print(f"{plan}: {word}", flush=True)
        if given.into:
            with given.into.open("a") as file:
                file.write(json.dumps(dataclasses.asdict(found)) + "\n")
    print(tables(cells))
    broken = sum(bool(each.bad) for each in cells)
    print(f"{len(cells)} faults; a hang, a wrong result, a false or a late alarm in {broken}")
    return int(broken > 0)


if __name__ == "__main__":
    # Once, for all the ranks that are forked from here.
    import smddp.process_group  # noqa: F401
    from smddp._register import register

    register()

    raise SystemExit(main())
