"""SVG documents."""

from __future__ import annotations

from collections.abc import Iterable
from xml.sax.saxutils import escape as _escape

from smddp.text import printable


def escape(text: str) -> str:
    """Escapes text for XML, which permits no control characters, not even escaped ones."""
    return _escape(printable(text))


def document(width: int, height: int, elements: Iterable[str]) -> str:
    """Returns an SVG document of `width` by `height` pixels with a white background."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
    background = rect(0, 0, width, height, "white")
    return "\n".join([f'{head} font-family="sans-serif" font-size="11">', background, *elements, "</svg>", ""])


def rect(x: float, y: float, width: float, height: float, fill: str, more: str = "", title: str = "") -> str:
    """Returns a rectangle. more: further attributes; title: tooltip."""
    begin = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}"{more and " " + more}'
    return f"{begin}><title>{escape(title)}</title></rect>" if title else f"{begin}/>"


def label(x: float, y: float, content: str, anchor: str = "start", more: str = "") -> str:
    """Returns a line of text. anchor: part of the text that is at x ("start", "middle" or "end")."""
    where = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}"'
    return f"<text {where}{more and ' ' + more}>{escape(content)}</text>"
