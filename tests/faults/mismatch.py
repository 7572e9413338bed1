"""Matrix of mismatched calls: `python -m faults.mismatch --ways shm,tcp --sizes 2,3,4`, from tests/.

Runs the cases of `backend.test_differing_calls` and `backend.test_differing_messages` on ranks over each way, and
counts the errors of each rank for each pair of calls.
"""

from __future__ import annotations

import argparse
import importlib
import tempfile
import time

from backend import mismatch_counts
from hosts import wires
from ranks.pool import Pool

MODULES = ("backend.test_differing_calls", "backend.test_differing_messages")


def environment(way: str, folder: str):
    """Returns the environment of each rank. Between nodes, ranks alternate between two simulated nodes."""
    more = {mismatch_counts.FOLDER: folder}
    if way == "shm":
        return lambda rank: more
    return lambda rank: more | wires.WAYS[way] | {"SMDDP_NODE": f"n{rank % 2}"}


def cases(size: int, only: str) -> list[tuple[str, str]]:
    found = []
    for module in MODULES:
        for name, test in vars(importlib.import_module(module)).items():
            # Any size does, but for cases that say which ranks they have.
            if hasattr(test, "case") and only in name and (size in test.sizes or test.sizes != (3,)):
                found.append((module, name))
    return found


def run(way: str, size: int, only: str) -> list[tuple[str, bool, bool]]:
    with tempfile.TemporaryDirectory() as folder:
        pool = Pool(size, environment(way, folder))
        try:
            for module, name in cases(size, only):
                begun = time.monotonic()
                said = pool.ask(module, name, 560)
                print(f"{way}, {size} ranks, {name}: {time.monotonic() - begun:.1f} s", flush=True)
                for rank, error in said.items():
                    print(f"rank {rank}: {error[-3000:]}")
            # A case stopped by an error counts its results until then.
            return mismatch_counts.take(folder)
        finally:
            pool.close()


def table(found: dict[tuple[str, str, int], list[tuple[bool, bool]]]) -> str:
    """found: by kind, way and size: whether a rank raised, and whether its text named both calls."""
    lines = ["| calls | way | ranks | pairs | a rank raised | its text named both |", "|---" * 6 + "|"]
    for (kind, way, size), seen in sorted(found.items()):
        raised, named = (f"{100 * sum(each[k] for each in seen) / len(seen):.1f} %" for k in (0, 1))
        lines.append(f"| {kind} | {way} | {size} | {len(seen) // size} | {raised} | {named} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ways", default="shm,tcp,fabric,efa")
    parser.add_argument("--sizes", default="2,3,4")
    parser.add_argument("--only", default="", help="cases with this in their name")
    given = parser.parse_args()
    ways = wires.usable(given.ways.split(","))
    found: dict[tuple[str, str, int], list[tuple[bool, bool]]] = {}
    for way in ways:
        for size in map(int, given.sizes.split(",")):
            for kind, raised, named in run(way, size, given.only):
                found.setdefault((kind, way, size), []).append((raised, named))
    print(table(found))
    return int(any(not all(each) for seen in found.values() for each in seen))


if __name__ == "__main__":
    raise SystemExit(main())
