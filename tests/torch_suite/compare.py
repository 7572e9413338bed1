"""Holds a run of torch's distributed suite against the tests that pass under gloo.

    python tests/torch_suite/compare.py smddp.json [gloo.json]     table and verdict; status 1 on a regression
    python tests/torch_suite/compare.py --write-baseline gloo.json rewrites gloo_passes_N.txt

A baseline file lists one test a line; ``subgroups`` behind a name marks a test that the suite itself
runs only with 8 ranks and that `runner.py --subgroups` runs with fewer.
"""

from __future__ import annotations

import argparse
import json
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))

# The tests of CPU all_to_all that the suite lets only MPI run, and those of them on sub-groups.
ALL_TO_ALL = (
    "test_all_to_all",
    "test_all_to_all_complex",
    "test_all_to_all_full_group",
    "test_all_to_all_single_equal_split",
    "test_all_to_all_single_equal_split_complex",
    "test_all_to_all_single_equal_split_full_group",
    "test_all_to_all_single_unequal_split",
    "test_all_to_all_single_unequal_split_complex",
    "test_all_to_all_single_unequal_split_full_group",
)
ALL_TO_ALL_SUBGROUPS = (
    "test_all_to_all_group",
    "test_all_to_all_single_equal_split_group",
    "test_all_to_all_single_unequal_split_group",
)


def baseline_path(world_size: int) -> str:
    return os.path.join(HERE, f"gloo_passes_{world_size}.txt")


def read_baseline(world_size: int, subgroups: bool) -> list[str]:
    """Names of the tests that pass under gloo with ``world_size`` ranks."""
    names = []
    with open(baseline_path(world_size)) as lines:
        for line in lines:
            words = line.split("#")[0].split()
            if words and (subgroups or words[1:] != ["subgroups"]):
                names.append(words[0])
    return names


def write_baseline(plain: dict, lifted: dict) -> str:
    """Writes the baseline from a run without and one with ``--subgroups``; returns its path."""
    own = {r["test"] for r in plain["results"] if r["status"] == "pass"}
    world_size = plain["world_size"]
    path = baseline_path(world_size)
    with open(path, "w") as out:
        print(
            f"# Tests of distributed_test that pass under gloo, {world_size} ranks, torch {plain['torch']}.", file=out
        )
        for result in lifted["results"]:
            if result["status"] == "pass" or result["test"] in own:
                print(result["test"] + ("" if result["test"] in own else " subgroups"), file=out)
    return path


def required(report: dict) -> list[str]:
    """The tests a report has to pass: by rank count under gloo's gate, all_to_all under MPI's."""
    if report["gate"] == "mpi":
        return [*ALL_TO_ALL, *(ALL_TO_ALL_SUBGROUPS if report["subgroups"] else ())]
    return read_baseline(report["world_size"], report["subgroups"])


def regressions(report: dict, wanted: list[str] | None = None) -> list[dict]:
    """The required results that are not ``pass``. A test this torch does not have is none."""
    names = set(required(report) if wanted is None else wanted)
    return [r for r in report["results"] if r["test"] in names and r["status"] != "pass"]


def table(report: dict, other: dict | None) -> str:
    """Markdown table of all tests that ran under either backend; skips are counted by reason."""
    others = {r["test"]: r for r in other["results"]} if other else {}
    heads = [report["backend"]] + ([other["backend"]] if other else [])
    lines = ["| test | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    reasons: dict[str, int] = {}
    for result in report["results"]:
        pair = [result] + ([others[result["test"]]] if result["test"] in others else [])
        if all(r["status"] == "skip" for r in pair):
            reasons[result["detail"]] = reasons.get(result["detail"], 0) + 1
            continue
        cells = [f"{r['status']} {r['seconds']:.1f} s" for r in pair]
        lines.append(f"| {result['test']} | " + " | ".join(cells) + " |")
    lines += ["", "| skipped | reason |", "|---|---|"]
    lines += [f"| {n} | {reason} |" for reason, n in sorted(reasons.items(), key=lambda item: -item[1])]
    return "\n".join(lines)


def load(path: str) -> dict:
    with open(path) as source:
        return json.load(source)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", nargs="+", help="JSON of runner.py; one, or one and another to show beside it")
    parser.add_argument("--write-baseline", action="store_true", help="reports: gloo plain, gloo with --subgroups")
    args = parser.parse_args()
    report, *rest = [load(path) for path in args.reports]
    if args.write_baseline:
        print(write_baseline(report, rest[0]))
        return 0
    print(table(report, rest[0] if rest else None))
    bad = regressions(report)
    total = len(required(report))
    print(f"\n{report['backend']}, {report['world_size']} ranks, gate {report['gate']}: {report['counts']}")
    print(f"{total - len(bad)} of {total} required tests pass")
    for result in bad:
        print(f"\n{result['status']}: {result['test']}\n{result['detail']}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
