"""Metrics of a job: numbers that regular expressions find in the ranks' output."""

from __future__ import annotations

import json
import re
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

#: Prefix that this package adds to a rank's line.
_RANK = re.compile(r"\[rank \d+\] ")


@dataclass(frozen=True)
class Metric:
    """A value that a line of output reported."""

    name: str
    value: float
    #: Seconds since the epoch.
    timestamp: float


class Metrics:
    """Values found in the output, in its order."""

    def __init__(self, definitions: Any) -> None:
        """definitions: metric_definitions, a list of {"Name": ..., "Regex": ...} with one group for the number.

        A regular expression without a group finds no number. Raises ValueError for anything else.
        """
        self.values: list[Metric] = []
        self._patterns: list[tuple[str, re.Pattern[str]]] = []
        for each in definitions or []:
            if not isinstance(each, dict) or set(each) != {"Name", "Regex"}:
                raise ValueError(
                    f'metric_definitions: {each!r}: expected {{"Name": "loss", "Regex": "loss=([0-9.]+)"}}'
                )
            try:
                pattern = re.compile(each["Regex"])
            except (re.error, TypeError) as error:
                raise ValueError(f"metric_definitions: Regex of {each['Name']!r} is invalid: {error}") from None
            if pattern.groups:
                self._patterns.append((str(each["Name"]), pattern))

    def watch(self, output: Callable[[str], None]) -> Callable[[str], None]:
        """Returns a receiver of lines that records metrics and passes the lines to `output`."""
        if not self._patterns:
            return output

        def receive(line: str) -> None:
            self._find(_RANK.sub("", line, count=1))
            output(line)

        return receive

    def write(self, file: Path) -> None:
        """Writes a JSON object for each value, one a line. No file without definitions."""
        if self._patterns:
            file.write_text("".join(json.dumps(asdict(each)) + "\n" for each in self.values))

    def _find(self, line: str) -> None:
        for name, pattern in self._patterns:
            found = pattern.search(line)
            try:
                value = float(found[1]) if found else None
            except (TypeError, ValueError):
                continue  # the group matched nothing, or no number
            if value is not None:
                self.values.append(Metric(name, value, time.time()))


def definitions(given: Sequence[Any] | None) -> list[Any]:
    """Returns the validated metric_definitions. Raises ValueError as `Metrics` does.

    Warns of regular expressions without a group, which published notebooks have as a placeholder.
    """
    Metrics(given)
    found = list(given or [])
    empty = [str(each["Name"]) for each in found if not re.compile(each["Regex"]).groups]
    if empty:
        warnings.warn(
            f"metric_definitions: {', '.join(empty)}: the regular expression finds no number, for it has no group such "
            "as ([0-9.]+)",
            stacklevel=4,
        )
    return found
