"""Turns what bench/hosts.sh leaves into a Markdown table of ratios with the goals beside them.

  bench/hosts.py target/bench/hosts           a folder of *.json and fsdp-*.txt
  bench/hosts.py --strict FOLDER              exit 1 when a goal is missed too, not only when elements are wrong

Every ratio is a ratio of times, ours over theirs: smaller is better. A missed goal is in bold; what differs from it by
less than half a hundredth is a tie. "limit" is what the
links alone need: the bytes that must cross the busiest link in one direction, over the rate that TCP reaches on all of
them together, plus half a round trip of blocking sockets for each step of a binary tree.
"""

import argparse
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from ratios import size_text, time_text

M = 1 << 20
OPS = ("all_gather", "reduce_scatter", "all_reduce")
LIBRARY = "smddp-core"


@dataclass(frozen=True)
class Goal:
    """Bars of one case, by op in the order of OPS: over the best other library, and over the limit; None: no bar."""

    hosts: int
    procs: int | tuple[int, ...]
    size: int
    peer: tuple[float, float, float] | None
    limit: float


GOALS = [
    Goal(2, 1, 1 << 10, (1.0,) * 3, 1.3),
    Goal(2, 1, M, (1.0,) * 3, 1.03),
    Goal(2, 1, 16 * M, (1.0,) * 3, 1.03),
    Goal(4, 2, M, (0.55, 0.4, 0.8), 1.25),
    Goal(4, 2, 16 * M, (0.82, 0.41, 0.85), 1.05),
    Goal(3, (1, 2, 3), 16 * M, None, 1.15),
]
# Long links, by round trip in milliseconds: over gloo, and the same for the larger size where it differs.
LONG_GOALS = {0.1: (1.0, 1.0), 1: (1.0, 1.0), 10: (0.95, 0.95), 50: (0.7, 0.5)}
LONG_SIZES = (16 * M, 64 * M)
LINE_GOAL = 1.15  # times the line, and a round trip for each step besides
# An FSDP2 step, over gloo's.
STEP_GOALS = {
    "smddp": 0.68,
    "smddp overlapped": 0.52,
    "smddp overlapped bf16": 0.45,
    "smddp overlapped bf16,reduce_scatter=int8": 0.41,
}


def shape_text(hosts: int, procs: int | tuple[int, ...]) -> str:
    return f"{hosts} x {procs}"


class Table:
    """Prints rows and counts what was missed."""

    def __init__(self):
        self.missed = 0

    def ratio(self, ours: float | None, theirs: float | None, goal: float | None) -> str:
        if not ours or not theirs:
            return "-" if goal is None else "not measured"
        text = f"{ours / theirs:.3f}"
        if goal is None:
            return text
        if round(ours / theirs, 2) > goal:
            self.missed += 1
            text = f"**{text}**"
        return f"{text} (≤ {goal:g})"


def print_cases(runs: list[dict], table: Table) -> None:
    head = ["hosts x ranks", "collective", "size", "smddp us", "spread", "best other us", "limit us"]
    print("| " + " | ".join([*head, "÷ best other", "÷ limit", "others, us"]) + " |")
    print("|" + "---|" * 10)
    for goal in GOALS:
        for index, op in enumerate(OPS):
            rows = {}
            for run in runs:
                procs = run["procs"] if isinstance(run["procs"], int) else tuple(run["procs"])
                if (run["hosts"], procs) == (goal.hosts, goal.procs):
                    # The last bytes that do not fill a cache line for each rank are not called.
                    close = (r for r in run["rows"] if r["op"] == op and goal.size * 0.99 < r["size"] <= goal.size)
                    rows.update({r["library"]: r for r in close})
            ours = rows.pop(LIBRARY, None)
            if ours is None:
                continue
            best = min(rows.values(), key=lambda r: r["time_us"], default=None)
            others = sorted(rows.values(), key=lambda r: r["time_us"])
            peer = goal.peer[index] if goal.peer and best else None
            cells = [
                shape_text(goal.hosts, goal.procs),
                op,
                size_text(goal.size),
                time_text(ours["time_us"]),
                f"{ours['spread']:.0%}",
                f"{time_text(best['time_us'])} ({best['library']})" if best else "-",
                time_text(ours["limit_us"]),
                table.ratio(ours["time_us"], best and best["time_us"], peer),
                table.ratio(ours["time_us"], ours["limit_us"], goal.limit),
                ", ".join(f"{r['library']} {time_text(r['time_us'])}" for r in others[1:]) or "-",
            ]
            print("| " + " | ".join(cells) + " |")


def print_long(runs: list[tuple[float, dict]], table: Table) -> None:
    """By round trip. The line is the rate that bare TCP reaches on the shortest of the links."""
    head = ["round trip", "hosts x ranks", "collective", "size", "smddp ms", "spread", "gloo ms", "÷ gloo"]
    print("\n| " + " | ".join([*head, "÷ (1.15 x line + a round trip a step)"]) + " |")
    print("|" + "---|" * 9)
    gbit = max(run["links"][1] for _, run in runs if run.get("links"))
    for milliseconds, run in runs:
        hosts = run["hosts"]
        for index, size in enumerate(LONG_SIZES):
            for op in OPS:
                rows = {r["library"]: r for r in run["rows"] if r["op"] == op and r["size"] == size}
                ours, gloo = rows.get(LIBRARY), rows.get("gloo")
                if ours is None:
                    continue
                twice = 2 if op == "all_reduce" else 1
                line = twice * size * (hosts - 1) / hosts * 8 / gbit / 1e3
                bar = LINE_GOAL * line + twice * (hosts - 1).bit_length() * milliseconds * 1e3
                goal = LONG_GOALS[milliseconds][index]
                cells = [
                    f"{milliseconds:g} ms",
                    shape_text(hosts, run["procs"]),
                    op,
                    size_text(size),
                    f"{ours['time_us'] / 1e3:.0f}",
                    f"{ours['spread']:.0%}",
                    f"{gloo['time_us'] / 1e3:.0f}" if gloo else "-",
                    table.ratio(ours["time_us"], gloo and gloo["time_us"], goal),
                    table.ratio(ours["time_us"], bar, 1.0),
                ]
                print("| " + " | ".join(cells) + " |")


def steps(folder: Path) -> dict[str, tuple[float, float]]:
    """Milliseconds of forward and backward by backend, with and without communication."""
    found = {}
    for path in folder.glob("fsdp-*.txt"):
        pattern = r"^([^:]+): \d+ ranks.*forward and backward (\d+) ms, without communication (\d+) ms"
        if m := re.search(pattern, path.read_text(), re.MULTILINE):
            found[m[1]] = (float(m[2]), float(m[3]))
    return found


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--strict", action="store_true")
    p.add_argument("folder", type=Path)
    o = p.parse_args()
    runs = [json.loads(path.read_text()) for path in sorted(o.folder.glob("[0-9]*.json"))]
    table = Table()
    print_cases(runs, table)
    long = [
        (float(m[1]), json.loads(path.read_text()))
        for path in o.folder.glob("long-*.json")
        if (m := re.match(r"long-([\d.]+)ms-", path.name))
    ]
    long.sort(key=lambda run: (run[0], run[1]["hosts"]))
    if long:
        print_long(long, table)
        runs += [run for _, run in long]
    found = steps(o.folder)
    if "gloo" in found:
        print("\nFSDP2, forward and backward, 34 M parameters, 2 hosts x 1:\n")
        print("| over | ms | without communication | ÷ gloo |")
        print("|---|---|---|---|")
        for name, (ms, alone) in sorted(found.items(), key=lambda item: -item[1][0]):
            ratio = table.ratio(ms, found["gloo"][0], STEP_GOALS.get(name))
            print(f"| {name} | {ms:.0f} | {alone:.0f} | {ratio} |")
    wrong = sum(row["wrong"] for run in runs for row in run["rows"])
    print(f"\nMissed goals: {table.missed}. Wrong elements: {wrong}. Links, all busy:")
    for run in runs:
        if run.get("links"):
            rtt, gbit = run["links"]
            ops = sorted({row["op"] for row in run["rows"]}, key=OPS.index)
            print(f"- {shape_text(run['hosts'], run['procs'])} {', '.join(ops)}: {rtt:.0f} us, {gbit:.3f} Gbit/s each")
    about = {name: text for run in runs for name, text in run["about"].items() if text}
    print("\nLibraries: " + "; ".join(f"{name}: {text}" for name, text in sorted(about.items())))
    return 1 if wrong or (o.strict and table.missed) else 0


if __name__ == "__main__":
    sys.exit(main())
