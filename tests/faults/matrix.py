"""The fault matrix: `python -m faults.matrix --ways shm,tcp --sizes 2,4 --faults kill,stop`, from tests/."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import multiprocessing.connection
import random
import re
import socket
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from hosts import wires
from ranks import process

from faults import acts, cell, network

FAULTS = ("kill", "exit", "stop", "exception", *network.FAULTS)
# Seconds after the deadline of two calls at which a rank counts as hanging.
_GRACE = 10.0
# Seconds within which a death is detected.
_DEATH = 1.0
# Timeout of group creation on a busy machine, in seconds.
_ATTEMPTS = 3
# FAIL_TOGETHER of the core.
_TOGETHER = 2.0
_MAKING = "(new_group|split_group|init_process_group)"


@dataclass
class Found:
    """Result of one cell.

    pids: of the ranks, once the fault has come. raised: (rank, seconds after the fault, text) of each survivor. left:
    seconds, of ranks without an error that need none: they destroyed the group, or had all required data
    before the network went, or it only lost frames. bad: a promise is broken.
    """

    plan: dict
    raised: list[tuple[int, float, str]] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)
    left: list[float] = field(default_factory=list)
    unnamed: list[str] = field(default_factory=list)
    pids: list[int] = field(default_factory=list)

    @property
    def network(self) -> bool:
        return self.plan["fault"] in network.FAULTS

    def lost(self, rank: int) -> list[int]:
        """Returns the lost ranks as seen by `rank`: one rank, all of an unreachable host, or all of other hosts."""
        if not self.network:
            return [self.plan["victim"]]
        host = [network.host_of(each, self.plan["size"]) for each in range(self.plan["size"])]
        cut = host[self.plan["victim"]]
        return [each for each in range(self.plan["size"]) if (host[each] == cut) != (host[rank] == cut)]

    def names(self, rank: int, text: str) -> dict[str, bool]:
        lost, size = self.lost(rank), self.plan["size"]
        hosts = {f"h{network.host_of(each, size)}" if self.network else socket.gethostname() for each in lost}
        return {
            "rank": any(_mentions(each, text) or _by_map(each, text) for each in lost),
            "host": any(f"host {host}" in text for host in hosts),
            "pid": any(re.search(rf"\b{self.pids[each]}\b", text) for each in lost),
            "operation": any(re.search(rf"\b{word} (#|on group)", text) for word in acts.words(self.plan["call"])),
            # Group creation has none.
            "number": re.search(rf" #\d+( (to|from) (any )?rank.*?)? on group|{_MAKING} on group", text) is not None,
        }


def _mentions(rank: int, text: str) -> bool:
    """Returns True for "rank 5" or "ranks 1, 4-6"."""
    parts = re.findall(r"(\d+)(?:-(\d+))?", " ".join(re.findall(r"\branks? (\d[\d, -]*)", text)))
    return any(int(first) <= rank <= int(last or first) for first, last in parts)


def _by_map(rank: int, text: str) -> bool:
    """Returns True if the text names the rank by a smaller group's rank and a map: "rank 0 (host ...) ... 0=4, 1=5"."""
    there = re.search(rf"\b(\d+)={rank}\b", text)
    return there is not None and re.search(rf"\brank {there[1]} \(", text) is not None


def one(plan: dict) -> Found:
    """Forks the ranks of a cell from this process, which has torch and no threads of smddp."""
    found = Found({key: plan[key] for key in plan if key != "store"})
    ranks = {}
    for rank in range(plan["size"]):
        started, pipe = process.start(cell.run, plan, rank, environment=plan["environment"], method="fork")
        ranks[pipe] = (rank, started)
    try:
        _listen(ranks, found)
    finally:
        for pipe, (_, started) in ranks.items():
            started.kill()
            started.join()
            pipe.close()
        if found.network:
            network.restore(network.host_of(plan["victim"], plan["size"]))
    return found


def keep(pipe: object, host: int | None) -> None:
    """Store for all cells, in a separate process: stopped ranks hold none of its locks."""
    if host is not None:
        network.enter(host)
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    while True:
        time.sleep(60)


def _store(host: int | None) -> tuple[str, int]:
    _, pipe = process.start(keep, host, method="fork", daemon=True)
    return "127.0.0.1" if host is None else network.STORE, pipe.recv()


def _listen(ranks: dict, found: Found) -> None:
    plan = found.plan
    waiting, fault, early, raised, left = dict(ranks), 0.0, False, [], []
    # Survivors of the fault.
    survives = [found.network or rank != plan["victim"] for rank in range(plan["size"])]
    until = time.monotonic() + 2 * cell.limit(plan) + _GRACE
    while any(survives[rank] for rank, _ in waiting.values()) or (waiting and not fault):
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
            if word[0] == "fault":
                fault = word[1]
                if found.network:
                    network.disturb(plan["fault"], network.host_of(rank, plan["size"]))
                    fault = time.monotonic()
                    # The process may have exited.
                    with contextlib.suppress(OSError):
                        pipe.send("done")
                if found.network and early:
                    del waiting[pipe]
                continue
            if rank == plan["victim"] and word[0] == "left" and not fault:
                # The group may be destroyed before the fault.
                early = True
                continue
            if not survives[rank]:
                if not fault:
                    found.bad.append(f"the victim has no fault: {word}")
                    return
            elif word[0] == "raised":
                raised.append((rank, *word[1:]))
            elif word[0] == "left" or (word[0] == "right" and found.network):
                left.append(word[1])
            else:
                found.bad.append(f"rank {rank}: {word}")
            del waiting[pipe]
    if not fault:
        return
    found.pids = [started.pid for _, started in sorted(ranks.values(), key=lambda each: each[0])]
    found.raised = [(rank, at - fault, text) for rank, at, text in raised]
    found.left = [at - fault for at in left]
    _check(found)


def _check(found: Found) -> None:
    call, fault = found.plan["call"], found.plan["fault"]
    silence = network.SILENCE + _DEATH
    if fault == "deaf":
        # The host's own ranks detect the fault first. Their report waits behind unacknowledged data, and their
        # heartbeats become less frequent.
        silence += 2 * network.SILENCE
    if call in acts.MAKING:
        # A rank that cannot create a group waits for the others' detection.
        silence += _TOGETHER
    # The exit of a rank before init_process_group is not detectable.
    soon = _DEATH if fault in ("kill", "exit") else silence if found.network else None
    if call == "init" or (found.network and call == "destroy"):
        soon = None
    found.bad += [f"LATE, left after {seconds:.3f} s" for seconds in found.left if soon and seconds > soon]
    needed = found.network and fault != "loss" and not found.plan["inside"] and call not in acts.EDGES
    # A rank without incoming data may be done, if another rank only sends.
    needed = needed and not (fault == "deaf" and call.partition("-")[0] in acts.ROOTED)
    if needed and not found.raised:
        found.bad.append("no rank reported the fault")
    for rank, seconds, text in found.raised:
        if seconds < 0 or fault == "loss":
            found.bad.append(f"FALSE ALARM of rank {rank} {seconds:.3f} s after the fault: {text}")
        elif soon and seconds > soon:
            found.bad.append(f"LATE, rank {rank} after {seconds:.3f} s: {text}")
        if missing := [what for what, named in found.names(rank, text).items() if not named]:
            found.unnamed.append(f"rank {rank} names no {', '.join(missing)}: {text}")


def plans(ways: list[str], sizes: list[int], faults: list[str], calls: list[str], seed: int) -> list[dict]:
    draw, made = random.Random(seed), []
    for way, size, fault, call in itertools.product(ways, sizes, faults, calls):
        if fault in network.FAULTS and way not in wires.WIRES:
            continue
        settings = wires.WAYS[way]
        settings = settings | network.settings() if fault in network.FAULTS else settings
        # The group is created with its call; the fault precedes it.
        inside = fault != "exception" and draw.random() < 0.5
        victim = draw.randrange(size)
        # The store's host survives.
        while fault in network.FAULTS and network.host_of(victim, size) == network.STORES_HOST:
            victim = draw.randrange(size)
        plan = {"way": way, "size": size, "fault": fault, "call": call, "victim": victim}
        more = {"inside": inside, "seed": draw.randrange(1000), "environment": settings}
        if fault in network.FAULTS:
            more["waits"] = 0.0 if inside else draw.choice((0.0, network.WAIT))
        made.append(plan | more)
    return made


def table(cells: list[Found]) -> str:
    head = "| fault | transport | ranks | faults | detected, median | most | rank | host | pid | operation | number |"
    lines = [head, "|---" * 11 + "|"]
    # Without a running call, the transport has no row.
    ways = sorted({each.plan["way"] for each in cells})
    parts = [[way] for way in ways] if cells[0].plan["call"] not in acts.EDGES else [ways]
    for fault, part in itertools.product(FAULTS, parts):
        here = [each for each in cells if each.plan["fault"] == fault and each.plan["way"] in part]
        after = [at for each in here for _, at, _ in each.raised]
        # A rank without an error had all required data.
        if fault == "loss" or (here and here[0].plan["call"] == "destroy"):
            after += [at for each in here for at in each.left]
        named = [each.names(rank, text) for each in here for rank, _, text in each.raised]
        if not after:
            continue
        shares = [f"{100 * sum(each[k] for each in named) / len(named):.1f} %" for k in (named or [{}])[0]]
        known = statistics.median(after), max(after)
        sizes = ", ".join(map(str, sorted({each.plan["size"] for each in here})))
        row = [fault, ", ".join(part), sizes, str(len(here)), *(f"{max(0.0, at):.2f} s" for at in known)]
        lines.append(f"| {' | '.join(row + (shares or [''] * 5))} |")
    return "\n".join(lines)


def tables(cells: list[Found]) -> str:
    """Summarizes faults in calls, and faults before the first or after the last call."""
    # A fault that could not start does not count, but is an error.
    cells = [each for each in cells if each.pids]
    parts = {"": [each for each in cells if each.plan["call"] not in acts.EDGES]}
    parts |= {edge: [each for each in cells if each.plan["call"] == edge] for edge in acts.EDGES}
    return "\n\n".join(f"{name}\n{table(part)}".strip() for name, part in parts.items() if part)


def saved(path: Path | None) -> list[Found]:
    lines = path.read_text().splitlines() if path and path.exists() else []
    return [Found(**json.loads(line)) for line in lines]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ways", default="shm,tcp,fabric,efa")
    parser.add_argument("--sizes", default="2,4,8")
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--calls", default=",".join(acts.CALLS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--into", type=Path, help="adds missing faults to this file")
    given = parser.parse_args()
    sizes = [int(size) for size in given.sizes.split(",") if size]
    ways, faults, calls = (word.split(",") for word in (given.ways, given.faults, given.calls))
    ways = wires.usable(ways)
    if set(faults) & set(network.FAULTS) and not network.in_lab():
        if not (reason := network.why_not()):
            return network.again_in_lab("faults.matrix", sys.argv[1:])
        print(f"{', '.join(network.FAULTS)} are left out: {reason}")
        faults = [fault for fault in faults if fault not in network.FAULTS]
    cells, store = saved(given.into), {False: _store(None)}
    if network.in_lab():
        store[True] = _store(network.STORES_HOST)
    todo = [plan for number in range(given.rounds) for plan in plans(ways, sizes, faults, calls, given.seed + number)]
    done = [{key: each.plan[key] for key in each.plan if key != "prefix"} for each in cells]
    for number, plan in enumerate(plan for plan in todo if plan not in done):
        for attempt in range(_ATTEMPTS):
            where = {"store": store[plan["fault"] in network.FAULTS], "prefix": f"cell{number}.{attempt}"}
            if (found := one(plan | where)).pids:
                break
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
    # Imported once for all forked ranks.
    import smddp.torch.process_group  # noqa: F401
    from smddp._register import register

    register()

    raise SystemExit(main())
