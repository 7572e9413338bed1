"""Turns the figures of peers.py and fsdp_bench.py into a Markdown table of ratios with the goals beside them.

  bench/ratios.py target/bench          a folder of *.json and fsdp-*.txt, as bench/peers.sh leaves it
  bench/ratios.py --strict FOLDER       exit 1 when a goal is missed too, not only when elements are wrong

Every ratio is a ratio of times, ours over theirs: smaller is better. A missed goal is in bold. "limit" is the
floor that worker_limit.c measures in the same run: the least memory traffic that the collective needs.
"""

import argparse
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

K, M = 1 << 10, 1 << 20
CORE, TORCH, SYMMETRIC = "smddp-core", "smddp", "smddp-symmetric"
THROUGH = {CORE: "core", TORCH: "torch", SYMMETRIC: "core, symmetric memory"}
ALL = ("all_gather", "reduce_scatter", "all_reduce")


@dataclass(frozen=True)
class Goal:
    """Bars for one library of ours at `ranks`, for these ops, from `low` to `high` bytes; None: no bar."""

    ranks: int
    ops: tuple[str, ...]
    low: int
    high: float
    library: str
    gloo: float | None
    mpi: float | None
    limit: float | None


BIG = float("inf")
GOALS = [
    Goal(2, ALL, 0, 1 * K, CORE, None, 0.6, 2.0),
    Goal(2, ALL, 0, 16 * K, TORCH, 0.04, None, None),
    Goal(2, ("all_gather",), 256 * K, 256 * K, CORE, 0.08, 0.9, 2.0),
    Goal(2, ("all_gather",), 256 * K, 256 * K, SYMMETRIC, None, 0.6, 1.4),
    Goal(2, ("all_gather",), 4 * M, 4 * M, TORCH, 0.15, 0.7, 1.5),
    Goal(2, ("all_gather",), 4 * M, 4 * M, SYMMETRIC, None, 0.5, 1.2),
    Goal(2, ("all_gather",), 64 * M, BIG, TORCH, 0.10, 0.85, 0.9),
    Goal(2, ("reduce_scatter",), 256 * K, 256 * K, CORE, 0.06, 0.3, 1.8),
    Goal(2, ("reduce_scatter",), 4 * M, 4 * M, TORCH, 0.10, 0.35, 1.5),
    Goal(2, ("reduce_scatter",), 64 * M, BIG, TORCH, 0.10, 0.2, 1.1),
    Goal(2, ("all_reduce",), 256 * K, 256 * K, CORE, 0.08, 0.7, 1.2),
    Goal(2, ("all_reduce",), 4 * M, 4 * M, TORCH, 0.15, 0.5, 2.0),
    Goal(2, ("all_reduce",), 64 * M, BIG, TORCH, 0.3, 0.6, 1.1),
    Goal(4, ("all_gather",), 256 * K, 1 * M, CORE, 0.15, 0.7, 1.7),
    Goal(4, ("all_gather",), 4 * M, 4 * M, TORCH, 0.15, 0.7, 1.7),
    Goal(4, ("all_gather",), 64 * M, BIG, TORCH, 0.15, 0.7, 0.9),
    Goal(4, ("reduce_scatter",), 256 * K, 1 * M, CORE, 0.15, 0.4, 1.7),
    Goal(4, ("reduce_scatter",), 4 * M, 4 * M, TORCH, 0.15, 0.4, 1.7),
    Goal(4, ("reduce_scatter",), 64 * M, BIG, TORCH, 0.15, 0.4, 1.2),
    Goal(4, ("all_reduce",), 256 * K, 1 * M, CORE, 0.15, 0.5, 2.0),
    Goal(4, ("all_reduce",), 4 * M, 4 * M, TORCH, 0.15, 0.5, 2.0),
]
TORCH_ADDS = 4.0  # us of a call of up to 16 KiB through torch, over the core's
# An FSDP2 step through torch, over gloo's; with its buffers in symmetric memory.
STEP_GOALS = {"smddp": 0.62, "smddp symmetric": 0.70}


def size_text(n: int) -> str:
    for unit, k in (("M", M), ("K", K)):
        if n >= k and n % k == 0:
            return f"{n // k} {unit}iB"
    return f"{n} B"


def time_text(us: float | None) -> str:
    return "-" if us is None else f"{us:.2f}" if us < 10 else f"{us:.1f}" if us < 1000 else f"{us:,.0f}"


class Table:
    """Collects rows and counts what was missed."""

    def __init__(self):
        self.rows: list[list[str]] = []
        self.missed = 0

    def ratio(self, ours: float | None, theirs: float | None, goal: float | None) -> str:
        if ours is None or theirs is None:
            return "not measured" if goal is not None else "-"
        value = ours / theirs
        text = f"{value:.3f}" if value < 0.1 else f"{value:.2f}"
        if goal is None:
            return text
        if value > goal:
            self.missed += 1
            text = f"**{text}**"
        return f"{text} (≤ {goal:g})"

    def add(self, ranks: int, op: str, size: int, times: dict[str, float], goal: Goal) -> None:
        ours, gloo, limit = times.get(goal.library), times.get("gloo"), times.get("limit")
        mpis = {k: v for k, v in times.items() if k not in (*THROUGH, "gloo", "limit")}
        best = min(mpis, key=lambda k: mpis[k]) if mpis else None
        self.rows.append(
            [
                str(ranks),
                op,
                size_text(size),
                THROUGH[goal.library],
                time_text(ours),
                time_text(gloo),
                f"{time_text(mpis[best])} ({best})" if best else "-",
                time_text(limit),
                self.ratio(ours, gloo, goal.gloo),
                self.ratio(ours, mpis[best] if best else None, goal.mpi),
                self.ratio(ours, limit, goal.limit),
            ]
        )

    def over_the_core(self, op: str, size: int, times: dict[str, float]) -> str:
        if TORCH not in times or CORE not in times:
            return ""
        added = times[TORCH] - times[CORE]
        self.missed += added > TORCH_ADDS
        text = f"{added:.1f}" if added <= TORCH_ADDS else f"**{added:.1f}**"
        return f"{op} of {size_text(size)} {text}"

    def print(self) -> None:
        head = ["ranks", "collective", "size", "through", "smddp us", "gloo us", "best MPI us", "limit us"]
        print("| " + " | ".join([*head, "÷ gloo", "÷ best MPI", "÷ limit"]) + " |")
        print("|" + "---|" * 11)
        for row in self.rows:
            print("| " + " | ".join(row) + " |")


def load(folder: Path) -> tuple[dict[tuple[int, str, int], dict[str, float]], dict[str, str], int]:
    """Times by (ranks, op, size) and library, what each library said of itself, wrong elements."""
    cases: dict[tuple[int, str, int], dict[str, float]] = {}
    about: dict[str, str] = {}
    wrong = 0
    for path in sorted(folder.glob("*.json")):
        run = json.loads(path.read_text())
        about.update(run["about"])
        for row in run["rows"]:
            cases.setdefault((run["ranks"], row["op"], row["size"]), {})[row["library"]] = row["time_us"]
            wrong += row["wrong"]
    return cases, about, wrong


def step_times(folder: Path) -> dict[str, float]:
    """Milliseconds of forward and backward by backend, from what fsdp_bench.py printed."""
    found = {}
    for path in folder.glob("fsdp-*.txt"):
        m = re.search(r"^(.+?): \d+ ranks.*forward and backward (\d+) ms", path.read_text(), re.MULTILINE)
        if m:
            found[m[1]] = float(m[2])
    return found


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--strict", action="store_true")
    p.add_argument("folder", type=Path)
    o = p.parse_args()
    cases, about, wrong = load(o.folder)
    table = Table()
    for ranks, op, size in sorted(cases, key=lambda c: (c[0], ALL.index(c[1]) if c[1] in ALL else 9, c[2])):
        for goal in GOALS:
            if goal.ranks == ranks and op in goal.ops and goal.low <= size <= goal.high:
                table.add(ranks, op, size, cases[ranks, op, size], goal)
    table.print()
    added = [
        table.over_the_core(op, size, times)
        for (ranks, op, size), times in sorted(cases.items())
        if ranks == 2 and size <= 16 * K
    ]
    if any(added):
        print(f"\nThrough torch over the core, us (≤ {TORCH_ADDS:g}): {', '.join(filter(None, added))}")
    steps = step_times(o.folder)
    if steps:
        shown = ", ".join(f"{k} {v:.0f} ms" for k, v in sorted(steps.items()))
        ratios = (
            f"{name} {table.ratio(steps.get(name), steps.get('gloo'), goal)}" for name, goal in STEP_GOALS.items()
        )
        print(f"\nFSDP2, forward and backward, 34 M parameters, 2 ranks: {shown}; ÷ gloo: {', '.join(ratios)}")
    print(f"\nMissed goals: {table.missed}. Wrong elements: {wrong}. Libraries:")
    for name, text in sorted(about.items()):
        print(f"- {name}: {text}")
    probes = o.folder / "probes.log"
    if probes.exists():
        lines = probes.read_text().splitlines()
        p90s = [float(m[1]) for line in lines if (m := re.search(r"p90 (\d+) ns", line))]
        rejected = sum("rejected" in line for line in lines)
        if p90s:
            near, far = min(p90s), max(p90s)
            print(f"- core distance probe: p90 round trip {near:.0f} to {far:.0f} ns, {rejected} runs rejected")
    return 1 if wrong or (o.strict and table.missed) else 0


if __name__ == "__main__":
    sys.exit(main())
