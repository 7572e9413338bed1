"""SVG drawing of a trace: one row per line of a process, one bar per operation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smddp.observability import svg

_LEFT, _WIDTH, _ROW, _TOP, _MARKS = 190, 780, 22, 34, 10
_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#9d755d", "#72b7b2", "#eeca3b", "#bab0ac")
_FAILED = "#d00000"
# Maximum time of the picture, as a multiple of the end of the last completed operation.
_ROOM = 1.25


def drawn(trace: Mapping[str, Any]) -> str:
    """Returns the SVG of a trace in Chrome's format, such as the result of `trace.merged`.

    A bar reaches from the operation's start to its end. Failed operations are red, running ones pale. The bar of a
    hanging operation is cut off at the right.
    """
    events = trace["traceEvents"]
    bars = [event for event in events if event["ph"] == "X"]
    processes = {event["pid"]: event["args"]["name"].partition(" (")[0] for event in events if _names(event, "process")}
    order = {event["pid"]: event["args"]["sort_index"] for event in events if event["name"] == "process_sort_index"}
    lines = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if _names(event, "thread")}
    places = sorted({(bar["pid"], bar["tid"]) for bar in bars}, key=lambda place: (order[place[0]], place[1]))
    names = sorted({_collective(bar) for bar in bars})
    over = max((bar["ts"] + bar["dur"] for bar in bars if bar["cat"] != "running"), default=0)
    end = max((bar["ts"] + bar["dur"] for bar in bars), default=0)
    whole = (min(end, _ROOM * over) if over else end) or 1
    parts = []
    for number, name in enumerate(names):
        x = _LEFT + 130 * number
        parts += [svg.rect(x, 8, 12, 12, _colour(names, name)), svg.label(x + 17, 18, name)]
    for row, place in enumerate(places):
        y = _TOP + row * _ROW
        label = f"{processes[place[0]]}, {lines[place].partition(' (')[0]}"
        parts.append(svg.label(_LEFT - 8, y + 14, label[:34], "end"))
        parts.append(svg.rect(_LEFT, y, _WIDTH, _ROW - 4, "#f4f4f4"))
    for bar in bars:
        y = _TOP + places.index((bar["pid"], bar["tid"])) * _ROW
        begin, end = (min(time, whole) / whole * _WIDTH for time in (bar["ts"], bar["ts"] + bar["dur"]))
        left, width = _LEFT + begin, max(end - begin, 0.5)
        colour = _FAILED if bar["cat"] == "failed" else _colour(names, _collective(bar))
        pale = 'fill-opacity="0.4"' if bar["cat"] == "running" else ""
        size = f"{bar['args']['bytes']} bytes, " if "bytes" in bar["args"] else ""
        title = f"{bar['name']}, {size}{bar['dur'] / 1000:.3f} ms, {bar['cat']}"
        parts.append(svg.rect(round(left, 1), y, round(width, 1), _ROW - 4, colour, pale, title))
    foot = _TOP + _ROW * len(places) + 14
    for mark in range(_MARKS + 1):
        x = _LEFT + mark * _WIDTH // _MARKS
        parts.append(svg.label(x, foot, _time(whole * mark / _MARKS, whole), "middle"))
    return svg.document(_LEFT + _WIDTH + 20, _TOP + _ROW * (len(places) + 2), parts)


def _names(event: Mapping[str, Any], what: str) -> bool:
    return event["name"] == f"{what}_name"


def _collective(bar: Mapping[str, Any]) -> str:
    return str(bar["name"]).partition(" #")[0]


def _colour(names: list[str], name: str) -> str:
    return _COLOURS[names.index(name) % len(_COLOURS)]


def _time(micros: float, whole: float) -> str:
    return f"{micros / 1e6:.2f} s" if whole >= 1e6 else f"{micros / 1e3:.1f} ms"
