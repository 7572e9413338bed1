"""`smddp-bench ... --plot FILE`: bus bandwidth and time over size."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def plotted(bench: Callable[[Sequence[str]], int], argv: list[str], target: str) -> int:
    """Runs `bench` with a JSON file and draws what it holds into `target`. Returns the exit status."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("smddp-bench: --plot needs matplotlib: pip install 'smddp[plot]'", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "figures.json")
        for option in ("-J", "--json"):
            if option in argv[:-1]:
                path = argv[argv.index(option) + 1]
                break
        else:
            argv = [*argv, "-J", path]
        status = bench(argv)
        # Ranks that a launcher started draw nothing but on rank 0, which alone writes the file.
        if status == 0 and os.path.exists(path):
            draw(Figure(figsize=(7, 6), layout="constrained"), json.loads(Path(path).read_text()), target)
    return status


def rows(figures: Any) -> list[dict[str, Any]]:
    """The rows of the benchmark's JSON, wherever they lie in it."""
    if isinstance(figures, list):
        found = [row for row in figures if isinstance(row, dict) and "out_of_place" in row]
        return found or [row for item in figures for row in rows(item)]
    if isinstance(figures, dict):
        return [row for item in figures.values() for row in rows(item)]
    return []


def draw(figure: Any, figures: Any, target: str) -> None:
    """Two panels over the size in bytes: bus bandwidth in GB/s, time in us."""
    table = [row for row in rows(figures) if row["size"] > 0]
    top, bottom = figure.subplots(2, 1, sharex=True)
    for half, label in (("out_of_place", "out of place"), ("in_place", "in place")):
        sizes = [row["size"] for row in table]
        top.plot(sizes, [row[half]["bus_bw"] for row in table], marker="o", label=label)
        bottom.plot(sizes, [row[half]["time"] for row in table], marker="o", label=label)
    top.set(ylabel="bus bandwidth (GB/s)", xscale="log")
    bottom.set(xlabel="size (B)", ylabel="time (us)", xscale="log", yscale="log")
    top.legend()
    for panel in (top, bottom):
        panel.grid(alpha=0.3)
    figure.savefig(target)
