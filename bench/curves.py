"""Draws what peers.py measured on one host: time over size, a panel for each number of ranks and collective.

  bench/curves.py FOLDER PICTURE.svg    FOLDER: *.json as bench/peers.sh leaves them; .png is taken too

Both axes are logarithmic: the bytes of the whole buffer, and the median time of a call in us. The libraries drawn are
those of peers.json in their ordinary settings, gloo, smddp, smddp-core, openmpi, mpich, openmpi5, mpich5 and impi, and
the limit. Rows of any other name (smddp-sealed, a build to compare with) are passed over; a library without rows has
no line. Exit status 2: the input is missing or cannot be drawn.
"""

import argparse
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ratios import ALL, K, M

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Style:
    label: str
    color: str
    line: str = "-"
    marker: str = "o"


# In the legend's order. A library has its color for good, whichever others were measured.
STYLES = {
    "smddp": Style("smddp through torch", "C0"),
    "smddp-core": Style("smddp core", "C0", "--", "x"),
    "gloo": Style("gloo through torch", "C1"),
    "openmpi5": Style("Open MPI 5", "C2"),
    "openmpi": Style("Open MPI", "C2", "--", "x"),
    "mpich5": Style("MPICH 5", "C3"),
    "mpich": Style("MPICH", "C3", "--", "x"),
    "impi": Style("Intel MPI", "C4"),
    "limit": Style("limit", "grey", "--", "."),
}

#: Of a panel, (ranks, collective): each library's time in us by size in bytes.
Panels = dict[tuple[int, str], dict[str, dict[int, float]]]


class Unusable(Exception):
    """What is wrong with the input, and what to try."""


def load(folder: Path) -> Panels:
    files = sorted(folder.glob("*.json"))
    if not files:
        raise Unusable(f"{folder}: no *.json there; `make bench-peers` leaves them in target/bench")
    panels: Panels = {}
    for path in files:
        try:
            add(panels, json.loads(path.read_text()))
        except (KeyError, TypeError, AttributeError) as e:
            raise Unusable(f"{path}: not what peers.py writes ({type(e).__name__}: {e})")
        except (OSError, ValueError, Unusable) as e:
            raise Unusable(f"{path}: {e}")
    if not panels:
        raise Unusable(
            f"{folder}: no row of a library that is drawn ({', '.join(STYLES)}); run peers.py with one of them"
        )
    return panels


def add(panels: Panels, run: Any) -> None:
    """Adds one file's rows."""
    if run["hosts"]:
        raise Unusable(f"a run between {run['hosts']} hosts, but 0, one host, is what is drawn; leave it out")
    ranks = int(run["ranks"])
    for row in run["rows"]:
        if row["library"] not in STYLES:
            continue
        library, op, size, time = row["library"], row["op"], row["size"], row["median_us"]
        case = f"{library}, {op} of {size} bytes on {ranks} ranks"
        if not (size > 0 and 0 < time < math.inf):
            raise Unusable(f"{case}: {time} us has no place on logarithmic axes; measure it again")
        if row["wrong"]:
            raise Unusable(f"{case}: {row['wrong']} wrong elements, whose time says nothing; measure it again")
        times = panels.setdefault((ranks, op), {}).setdefault(library, {})
        if size in times:
            raise Unusable(f"{case}: {times[size]} us and {time} us; keep the files of one run in a folder")
        times[size] = time


def figure(panels: Panels) -> "Figure":
    from matplotlib.figure import Figure

    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    drawn = Figure(figsize=(max(7, 4 * columns), 3.6 * rows + 0.9), layout="constrained")
    drawn.suptitle("Time of a collective on one host")
    grid = list(drawn.subplots(rows, columns, squeeze=False).flat)
    legend = {}
    for panel, (ranks, op) in zip(grid, sorted(panels, key=place)):
        for library, style in STYLES.items():
            times = sorted(panels[ranks, op].get(library, {}).items())
            if times:
                shape = {"color": style.color, "linestyle": style.line, "marker": style.marker, "markersize": 4}
                (legend[library],) = panel.plot(*zip(*times), label=style.label, **shape)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set(title=f"{op}, {ranks} ranks", xlabel="size of the whole buffer (bytes)", ylabel="median time (us)")
        sizes = sorted(set().union(*panels[ranks, op].values()))
        sizes = sizes[:: math.ceil(len(sizes) / 7)]
        panel.set_xticks(sizes, [tick(size) for size in sizes])
        panel.yaxis.set_major_formatter(lambda time, _: f"{time:,g}")
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    for panel in grid[len(panels) :]:
        panel.remove()
    lines = [legend[library] for library in STYLES if library in legend]
    drawn.legend(handles=lines, loc="outside lower center", ncols=min(len(lines), 2 * columns + 1))
    return drawn


def place(panel: tuple[int, str]) -> tuple[int, int, str]:
    ranks, op = panel
    return ranks, ALL.index(op) if op in ALL else len(ALL), op


def tick(size: int) -> str:
    for unit, name in ((K * M, "G"), (M, "M"), (K, "K")):
        if size >= unit:
            return f"{size / unit:g}{name}"
    return f"{size:g}"


def save(drawn: "Figure", picture: Path) -> None:
    """Text stays text, and equal figures are equal bytes: a commit of the picture then shows what changed."""
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "smddp"}):
        drawn.savefig(picture, metadata={"Date": None} if picture.suffix == ".svg" else None)


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("folder", type=Path)
    p.add_argument("picture", type=Path)
    o = p.parse_args()
    try:
        if o.picture.suffix not in (".svg", ".png"):
            raise Unusable(f"{o.picture}: give a name that ends in .svg or .png")
        save(figure(load(o.folder)), o.picture)
    except ImportError as e:
        print(f"curves.py: {e}; it draws with matplotlib: pip install matplotlib", file=sys.stderr)
        return 2
    except (Unusable, OSError) as e:
        print(f"curves.py: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
