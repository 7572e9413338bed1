"""SVG drawing of a trace: one row per line of a process, one bar per operation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from xml.sax.saxutils import escape as _escape

from smddp.text import printable

_LEFT, _WIDTH, _ROW, _TOP, _MARKS = 190, 780, 22, 34, 10
_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#9d755d", "#72b7b2", "#eeca3b", "#bab0ac")
_FAILED = "#d00000"
# Maximum time of the picture, as a multiple of the end of the last completed operation.
_ROOM = 1.25


def escape(text: str) -> str:
    """Escapes text for XML, which permits no control characters, not even escaped ones."""
    return _escape(printable(text))


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
    height = _TOP + _ROW * (len(places) + 2)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 20}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{_LEFT + _WIDTH + 20}" height="{height}" fill="white"/>',
    ]
    for number, name in enumerate(names):
        x = _LEFT + 130 * number
        parts.append(f'<rect x="{x}" y="8" width="12" height="12" fill="{_colour(names, name)}"/>')
        parts.append(f'<text x="{x + 17}" y="18">{escape(name)}</text>')
    for row, place in enumerate(places):
        y = _TOP + row * _ROW
        label = f"{processes[place[0]]}, {lines[place].partition(' (')[0]}"
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 14}" text-anchor="end">{escape(label[:34])}</text>')
        parts.append(f'<rect x="{_LEFT}" y="{y}" width="{_WIDTH}" height="{_ROW - 4}" fill="#f4f4f4"/>')
    for bar in bars:
        y = _TOP + places.index((bar["pid"], bar["tid"])) * _ROW
        begin, end = (min(time, whole) / whole * _WIDTH for time in (bar["ts"], bar["ts"] + bar["dur"]))
        left, width = _LEFT + begin, max(end - begin, 0.5)
        colour = _FAILED if bar["cat"] == "failed" else _colour(names, _collective(bar))
        pale = ' fill-opacity="0.4"' if bar["cat"] == "running" else ""
        size = f"{bar['args']['bytes']} bytes, " if "bytes" in bar["args"] else ""
        title = escape(f"{bar['name']}, {size}{bar['dur'] / 1000:.3f} ms, {bar['cat']}")
        parts.append(
            f'<rect x="{left:.1f}" y="{y}" width="{width:.1f}" height="{_ROW - 4}" fill="{colour}"{pale}>'
            f"<title>{title}</title></rect>"
        )
    foot = _TOP + _ROW * len(places) + 14
    for mark in range(_MARKS + 1):
        x = _LEFT + mark * _WIDTH // _MARKS
        parts.append(f'<text x="{x}" y="{foot}" text-anchor="middle">{_time(whole * mark / _MARKS, whole)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _names(event: Mapping[str, Any], what: str) -> bool:
    return event["name"] == f"{what}_name"


def _collective(bar: Mapping[str, Any]) -> str:
    return str(bar["name"]).partition(" #")[0]


def _colour(names: list[str], name: str) -> str:
    return _COLOURS[names.index(name) % len(_COLOURS)]


def _time(micros: float, whole: float) -> str:
    return f"{micros / 1e6:.2f} s" if whole >= 1e6 else f"{micros / 1e3:.1f} ms"
