"""SVG heat map of the measured pairs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from smddp.observability import svg
from smddp.tools.doctor.checks.pairs import slow

_CELL, _LEFT, _TOP, _GAP = 44, 90, 70, 80
# Maximum number of ranks for cells with figures.
_WITH_FIGURES = 24
_SMALL_CELL = 10


def drawn(rows: Sequence[Mapping[str, Any]], nodes: Sequence[int], hosts: Sequence[str]) -> str:
    """Returns maps of latency and bandwidth. Darker cells are worse, and a red frame marks a slow pair.

    rows: measurements. nodes, hosts: by rank. Cells between nodes show the figures of their first ranks.
    """
    size = len(nodes)
    cell = _CELL if size <= _WITH_FIGURES else _SMALL_CELL
    leader = {node: nodes.index(node) for node in nodes}
    known = {tuple(sorted(row["ranks"])): row for row in rows}
    marked = {tuple(sorted(row["ranks"])) for row in slow(rows)}

    def pair(a: int, b: int) -> tuple[int, int]:
        one, other = (a, b) if nodes[a] == nodes[b] else (leader[nodes[a]], leader[nodes[b]])
        return (min(one, other), max(one, other))

    side = size * cell
    parts = []
    for number, (key, title) in enumerate((("latency us", "latency, us"), ("GB/s", "bandwidth, GB/s"))):
        left = _LEFT + number * (side + _GAP)
        values = [row[key] for row in rows]
        parts.append(svg.label(left, 24, title, more='font-size="14"'))
        for a in range(size):
            if cell == _CELL:
                label = str(a) if number else f"{a} {hosts[a]}"
                parts.append(svg.label(left - 6, _TOP + a * cell + cell // 2 + 4, label[:14], "end"))
                parts.append(svg.label(left + a * cell + cell // 2, _TOP - 8, str(a), "middle"))
            for b in range(size):
                row = known.get(pair(a, b)) if a != b else None
                value, x, y = row[key] if row else None, left + b * cell, _TOP + a * cell
                parts += _square(x, y, cell, value, values, number, pair(a, b) in marked)
    return svg.document(_LEFT + 2 * side + _GAP + 20, _TOP + side + 30, parts)


def _square(
    x: int, y: int, cell: int, value: float | None, values: Sequence[float], high_is_good: int, marked: bool
) -> list[str]:
    if value is None:
        return [svg.rect(x, y, cell, cell, "#f0f0f0", 'stroke="white"')]
    low, high = math.log(max(min(values), 1e-9)), math.log(max(max(values), 1e-9))
    # The color scale spans at least a factor of two, so that noise stays pale.
    worse = (math.log(max(value, 1e-9)) - low) / max(high - low, math.log(2))
    worse = 1 - worse if high_is_good else worse
    red, green, blue = (round(good + (bad - good) * worse) for good, bad in ((222, 165), (235, 15), (247, 21)))
    fill = f"rgb({red},{green},{blue})"
    frame = 'stroke="#d00000" stroke-width="3"' if marked else 'stroke="white"'
    inset = 2 if marked else 0
    parts = [svg.rect(x + inset, y + inset, cell - 2 * inset, cell - 2 * inset, fill, frame)]
    if cell == _CELL:
        ink = "white" if worse > 0.5 else "black"
        parts.append(svg.label(x + cell // 2, y + cell // 2 + 4, f"{value:.3g}", "middle", f'fill="{ink}"'))
    return parts
