"""`smddp-bench ... --plot FILE`: plots bus bandwidth and time over size, for one or several runs."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from smddp import files

Bench = Callable[[Sequence[str]], int]

#: Times of both halves of a row. A collective without in-place form uses the first only.
_HALVES = (("out_of_place", "-", "o"), ("in_place", "--", "x"))


def plotted(bench: Bench, argv: list[str], target: str) -> int:
    """Runs `bench` and plots its results or comparison to `target`. Returns the exit status.

    Checks the output before the measurement.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError:
        print("smddp-bench: --plot needs matplotlib: pip install 'smddp[plot]'", file=sys.stderr)
        return 2
    known = FigureCanvasAgg.get_supported_filetypes()
    if Path(target).suffix[1:].lower() not in known:
        print(f"smddp-bench: --plot {target}: give a name that ends in .{', .'.join(sorted(known))}", file=sys.stderr)
        return 2
    try:
        files.check_writable(target)
    except OSError as error:
        missing = not Path(target).absolute().parent.is_dir()
        reason = "the folder does not exist" if missing else error.strerror
        print(f"smddp-bench: --plot {target}: {reason}", file=sys.stderr)
        return 2
    if argv[:1] == ["compare"]:
        status = bench(argv)
        if status in (0, 1):
            draw([(Path(path).stem, json.loads(files.read_text(path))) for path in argv[1:3]], target)
            print(f"# drawn: {target}")
        return status
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "figures.json")
        for option in ("-J", "--json", "--output_file"):
            if option in argv[:-1]:
                path = argv[argv.index(option) + 1]
                break
        else:
            argv = [*argv, "-J", path]
        status = bench(argv)
        # Under a launcher only rank 0 writes the file.
        if status == 0 and os.path.exists(path):
            draw([("", json.loads(files.read_text(path)))], target)
            print(f"# drawn: {target}")
    return status


def draw(runs: Sequence[tuple[str, Any]], target: str) -> None:
    """Plots bus bandwidth in GB/s and time in us over the size in bytes; for a barrier only its time.

    runs: a label and the content of a -J file, also of nccl-tests.
    """
    from matplotlib.figure import Figure

    first = runs[0][1]
    figure = Figure(figsize=(8, 6.5), layout="constrained")
    figure.suptitle(title(first))
    if not any(row["size"] for _, run in runs for row in run["results"]):
        panel = figure.subplots()
        names = [label or run.get("collective", "") for label, run in runs]
        panel.bar(names, [run["results"][0]["out_of_place"]["time"] for _, run in runs], width=0.5)
        panel.set(ylabel="time (us)")
        panel.grid(axis="y", alpha=0.3)
        figure.savefig(target)
        return
    top, bottom = figure.subplots(2, 1, sharex=True)
    for number, (label, run) in enumerate(runs):
        in_place = run.get("config", {}).get("has_in_place", True)
        for half, line, marker in _HALVES if in_place else _HALVES[:1]:
            rows = [row for row in run["results"] if row["size"]]
            name = ", ".join(part for part in (label, half.replace("_", " ") if in_place else "") if part)
            # A line without a label is not in the legend.
            style: dict[str, Any] = {"label": name or None, "color": f"C{number}", "markersize": 4}
            style |= {"linestyle": line, "marker": marker}
            sizes = [row["size"] for row in rows]
            top.plot(sizes, [row[half]["bus_bw"] for row in rows], **style)
            bottom.plot(sizes, [row[half]["time"] for row in rows], **style)
    top.set_xscale("log", base=2)
    top.set(ylabel="bus bandwidth (GB/s)", ylim=(0, None))
    bottom.set(xlabel="size (bytes)", ylabel="time (us)", yscale="log")
    bottom.xaxis.set_major_formatter(lambda size, _: binary(size))
    if top.get_legend_handles_labels()[1]:
        top.legend()
    for panel in (top, bottom):
        panel.grid(alpha=0.3)
    figure.savefig(target)


def title(run: Any) -> str:
    """Returns the title: "all_reduce, 4 ranks on h1, float sum"."""
    devices = run.get("config", {}).get("devices", [])
    hosts = list(dict.fromkeys(device.get("hostname", "") for device in devices))
    where = f" on {hosts[0]}" if len(hosts) == 1 else f" on {len(hosts)} hosts" if hosts else ""
    row = run["results"][0] if run["results"] else {}
    kind = " ".join(str(word) for word in (row.get("type"), row.get("redop")) if word not in (None, "none"))
    ranks = run.get("ranks", len(devices))
    name = run.get("collective", "collective")
    return ", ".join(part for part in (str(name), f"{ranks} ranks{where}" if ranks else "", kind) if part)


def binary(size: float) -> str:
    """Formats a size as on the command line: 8, 64K, 1M."""
    for unit, name in ((2**30, "G"), (2**20, "M"), (2**10, "K")):
        if size >= unit:
            return f"{size / unit:g}{name}"
    return f"{size:g}"
