"""The recorder's and the tallies' figures as Prometheus' metrics. The text and the port are `prometheus_client`'s."""

from __future__ import annotations

import os
import threading
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)

from smddp.observability.stragglers import Straggler

_BOUNDS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
_GROUP = ("group",)
_CALL = ("group", "collective")
_LATE = ("group", "straggler")
_WAY = ("group", "collective", "algorithm", "way", "nodes")
# Groups that are gone and still have their totals: a job that makes groups without end does not fill its memory.
_GONE = 64


class _Seconds:
    """A histogram: operations within each bound, and beyond the last; the sum of their seconds."""

    def __init__(self) -> None:
        self.counts = [0] * (len(_BOUNDS) + 1)
        self.total = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(_BOUNDS, seconds)] += 1
        self.total += seconds

    def buckets(self) -> list[tuple[str, float]]:
        bounds, reached, found = [*map(str, _BOUNDS), "+Inf"], 0, []
        for bound, count in zip(bounds, self.counts):
            reached += count
            found.append((bound, float(reached)))
        return found


class _Group:
    """What is known of one group, open or gone."""

    def __init__(self) -> None:
        self.size = 0
        self.failed = False
        self.present = 0.0
        # The newest operation whose end was counted.
        self.seen = -1
        # Operations, bytes, and those that crossed to other nodes.
        self.moved: dict[tuple[str, ...], tuple[int, int, int]] = {}
        self.seconds: dict[str, _Seconds] = {}
        self.failures: dict[str, int] = {}

    def take(self, told: dict[str, Any]) -> None:
        """What a dump says of it."""
        self.size, self.failed = told["size"], bool(told["error"])
        # A message that nobody has sent yet may be waited for as long as anybody likes.
        collective = told["present"] and told["present"]["algorithm"]
        self.present = told["present"]["seconds"] if collective else 0.0
        over = [op for op in told["operations"] if op["outcome"] != "running"]
        if over and over[-1]["seq"] < self.seen:
            self.seen = -1  # another group of the same name
        for op in over:
            if op["seq"] > self.seen:
                collective = op["what"].partition(" ")[0]
                if op["outcome"] == "ok":
                    self.seconds.setdefault(collective, _Seconds()).add(op["seconds"])
                else:
                    self.failures[collective] = self.failures.get(collective, 0) + 1
        self.seen = max(self.seen, over[-1]["seq"] if over else -1)


class Metrics:
    """A collector of `prometheus_client`. Whatever it tells it knows from the last `look`."""

    def __init__(self, rank: int) -> None:
        run = os.environ.get("TORCHELASTIC_RUN_ID") or os.environ.get("SLURM_JOB_ID") or ""
        self._always = {"run": run, "rank": str(rank)}
        self._lock = threading.Lock()
        self._groups: dict[str, _Group] = {}
        self._process: dict[str, str] = {}
        self._looked = 0.0
        self._late: list[Straggler] = []

    def look(self, dump: dict[str, Any], traffic: Sequence[dict[str, Any]]) -> None:
        """Takes up what `smddp.dump()` and `smddp.traffic()` say now."""
        with self._lock:
            self._process = {"version": dump["version"], "host": dump["host"], "pid": str(dump["pid"])}
            self._looked = time.time()
            live = {told["name"] for told in dump["groups"]}
            gone = [name for name in self._groups if name not in live]
            for name in gone[: max(len(gone) - _GONE, 0)]:
                del self._groups[name]
            for name in gone:
                if name in self._groups:
                    self._groups[name].present = 0.0
            for told in dump["groups"]:
                self._groups.setdefault(told["name"], _Group()).take(told)
            for moved in traffic:
                group = self._groups.setdefault(moved["group"], _Group())
                key = (moved["collective"], moved["algorithm"], moved["way"], str(moved["nodes"]))
                group.moved[key] = (moved["operations"], moved["bytes"], moved["crossed"])

    def late(self, stragglers: Sequence[Straggler]) -> None:
        """Who comes last again and again, as of now."""
        with self._lock:
            self._late = list(stragglers)

    def _family(self, kind: Any, name: str, what: str, labels: Sequence[str]) -> Any:
        return kind(f"smddp_{name}", what, labels=[*self._always, *labels])

    def collect(self) -> Iterator[Any]:
        """One family for each metric, as `prometheus_client` asks."""
        with self._lock:
            yield from list(self._families())

    def _families(self) -> Iterator[Any]:
        always = list(self._always.values())
        operations = self._family(CounterMetricFamily, "operations", "Operations that are over, and sends begun.", _WAY)
        size = self._family(CounterMetricFamily, "bytes", "Bytes of their whole buffers.", _WAY)
        crossed = self._family(
            CounterMetricFamily, "crossed_bytes", "Bytes that this rank sent to other nodes, as they travelled.", _WAY
        )
        seconds = self._family(
            HistogramMetricFamily,
            "operation_seconds",
            "From call to end, waits for other ranks included, of the operations that the recorder had at a look.",
            _CALL,
        )
        failures = self._family(CounterMetricFamily, "failed_operations", "Operations that failed.", _CALL)
        present = self._family(
            GaugeMetricFamily, "present_operation_seconds", "Age of the operation that runs; 0: none.", _GROUP
        )
        ranks = self._family(GaugeMetricFamily, "group_ranks", "Ranks of the group.", _GROUP)
        failed = self._family(GaugeMetricFamily, "group_failed", "1: the group is dead.", _GROUP)
        for name, group in self._groups.items():
            labels = [*always, name]
            for key, counts in group.moved.items():
                for family, count in zip((operations, size, crossed), counts):
                    family.add_metric([*labels, *key], count)
            for collective, found in group.seconds.items():
                seconds.add_metric([*labels, collective], found.buckets(), found.total)
            for collective, count in group.failures.items():
                failures.add_metric([*labels, collective], count)
            present.add_metric(labels, group.present)
            ranks.add_metric(labels, group.size)
            failed.add_metric(labels, int(group.failed))
        late = self._family(
            GaugeMetricFamily, "straggler_seconds", "Lateness of the rank that comes last again and again.", _LATE
        )
        for one in self._late:
            late.add_metric([*always, one.group, str(one.rank)], one.late_ns / 1e9)
        process = self._family(InfoMetricFamily, "process", "The process of this rank.", ())
        process.add_metric(always, self._process)
        looked = self._family(GaugeMetricFamily, "looked_timestamp_seconds", "When all this was so.", ())
        looked.add_metric(always, self._looked)
        yield from (operations, size, crossed, seconds, failures, present, ranks, failed, late, process, looked)
