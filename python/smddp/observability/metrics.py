"""Prometheus metrics from recorder dumps and traffic totals. `prometheus_client` formats and serves them."""

from __future__ import annotations

import os
import threading
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)

from smddp.observability import links, predictions
from smddp.observability.predictions import Predictor
from smddp.observability.stragglers import Straggler

_BOUNDS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
_GROUP = ("group",)
_CALL = ("group", "collective")
_LATE = ("group", "straggler")
_LINK = ("group", "peer")
_WAY = ("group", "collective", "algorithm", "way", "nodes")
# Closed groups whose totals are kept. The limit bounds the memory of a job that keeps creating groups.
_CLOSED = 64


class _Seconds:
    """Histogram of operation times: counts per bound and above the last one, and the sum in seconds."""

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
    """Totals of one group, open or closed."""

    def __init__(self) -> None:
        self.size = 0
        self.failed = False
        self.present = 0.0
        # Sequence number of the newest counted operation.
        self.seen = -1
        # Operations, bytes, and bytes sent to other nodes.
        self.moved: dict[tuple[str, ...], tuple[int, int, int]] = {}
        self.seconds: dict[str, _Seconds] = {}
        self.failures: dict[str, int] = {}
        # Moving averages of measured divided by predicted time, by collective and by peer.
        self.ratios: dict[str, float] = {}
        self.link_ratios: dict[int, float] = {}

    def update(self, dumped: dict[str, Any], predict: Predictor) -> None:
        """Counts the new operations of the group's dump."""
        self.size, self.failed = dumped["size"], bool(dumped["error"])
        # Point-to-point messages are excluded: a receive may wait for an unlimited time.
        collective = dumped["present"] and dumped["present"]["algorithm"]
        self.present = dumped["present"]["seconds"] if collective else 0.0
        over = [op for op in dumped["operations"] if op["outcome"] != "running"]
        if over and over[-1]["seq"] < self.seen:
            self.seen = -1  # another group of the same name
            self.ratios, self.link_ratios = {}, {}
        new = [op for op in over if op["seq"] > self.seen]
        done = [op for op in new if op["outcome"] == "ok"]
        _average(self.ratios, predictions.ratios(dumped, done, predict))
        found = links.ratios(dumped)
        self.link_ratios = {peer: ratio for peer, ratio in self.link_ratios.items() if peer in found}
        _average(self.link_ratios, found)
        for op in new:
            collective = op["what"].partition(" ")[0]
            if op["outcome"] == "ok":
                self.seconds.setdefault(collective, _Seconds()).add(op["seconds"])
            else:
                self.failures[collective] = self.failures.get(collective, 0) + 1
        self.seen = max(self.seen, over[-1]["seq"] if over else -1)


def _average(averages: dict[Any, float], found: Mapping[Any, float]) -> None:
    for key, ratio in found.items():
        old = averages.get(key, ratio)
        averages[key] = old + links.WEIGHT * (ratio - old)


class Metrics:
    """Collector for `prometheus_client`. It reports the state of the last `update`.

    predict: predicted time of an operation.
    """

    def __init__(self, rank: int, predict: Predictor = lambda _group, _op: None) -> None:
        self._predict = predict
        run = os.environ.get("TORCHELASTIC_RUN_ID") or os.environ.get("SLURM_JOB_ID") or ""
        self._always = {"run": run, "rank": str(rank)}
        self._lock = threading.Lock()
        self._groups: dict[str, _Group] = {}
        self._process: dict[str, str] = {}
        self._updated = 0.0
        self._late: list[Straggler] = []

    def update(self, dump: dict[str, Any], traffic: Sequence[dict[str, Any]]) -> None:
        """Takes the results of `smddp.dump()` and `smddp.traffic()`."""
        with self._lock:
            self._process = {"version": dump["version"], "host": dump["host"], "pid": str(dump["pid"])}
            self._updated = time.time()
            live = {dumped["name"] for dumped in dump["groups"]}
            closed = [name for name in self._groups if name not in live]
            for name in closed[: max(len(closed) - _CLOSED, 0)]:
                del self._groups[name]
            for name in closed:
                if name in self._groups:
                    self._groups[name].present = 0.0
            for dumped in dump["groups"]:
                self._groups.setdefault(dumped["name"], _Group()).update(dumped, self._predict)
            for moved in traffic:
                group = self._groups.setdefault(moved["group"], _Group())
                key = (moved["collective"], moved["algorithm"], moved["way"], str(moved["nodes"]))
                group.moved[key] = (moved["operations"], moved["bytes"], moved["crossed"])

    def late(self, stragglers: Sequence[Straggler]) -> None:
        """Replaces the current stragglers."""
        with self._lock:
            self._late = list(stragglers)

    def _family(self, kind: Any, name: str, what: str, labels: Sequence[str]) -> Any:
        return kind(f"smddp_{name}", what, labels=[*self._always, *labels])

    def collect(self) -> Iterator[Any]:
        """Returns one family per metric, for `prometheus_client`."""
        with self._lock:
            yield from list(self._families())

    def _families(self) -> Iterator[Any]:
        always = list(self._always.values())
        operations = self._family(CounterMetricFamily, "operations", "Completed operations and started sends.", _WAY)
        size = self._family(CounterMetricFamily, "bytes", "Bytes of the whole buffers of these operations.", _WAY)
        crossed = self._family(
            CounterMetricFamily, "crossed_bytes", "Bytes that this rank sent to other nodes, in wire format.", _WAY
        )
        seconds = self._family(
            HistogramMetricFamily,
            "operation_seconds",
            "Time from call to end, including waits for other ranks, of operations seen in the recorder.",
            _CALL,
        )
        failures = self._family(CounterMetricFamily, "failed_operations", "Operations that failed.", _CALL)
        present = self._family(
            GaugeMetricFamily, "present_operation_seconds", "Age of the running operation; 0: none.", _GROUP
        )
        ranks = self._family(GaugeMetricFamily, "group_ranks", "Ranks of the group.", _GROUP)
        failed = self._family(GaugeMetricFamily, "group_failed", "1: the group has failed.", _GROUP)
        ratio = self._family(
            GaugeMetricFamily,
            "measured_to_predicted_ratio",
            "Shortest measured time of new operations divided by the cost model's time, moving average.",
            _CALL,
        )
        link_ratio = self._family(
            GaugeMetricFamily,
            "link_measured_to_predicted_ratio",
            "Time of the slowest TCP connection to a rank divided by the network estimate's time, moving average.",
            _LINK,
        )
        for name, group in self._groups.items():
            labels = [*always, name]
            for key, counts in group.moved.items():
                for family, count in zip((operations, size, crossed), counts):
                    family.add_metric([*labels, *key], count)
            for collective, found in group.seconds.items():
                seconds.add_metric([*labels, collective], found.buckets(), found.total)
            for collective, count in group.failures.items():
                failures.add_metric([*labels, collective], count)
            for collective, average in group.ratios.items():
                ratio.add_metric([*labels, collective], average)
            for peer, average in group.link_ratios.items():
                link_ratio.add_metric([*labels, str(peer)], average)
            present.add_metric(labels, group.present)
            ranks.add_metric(labels, group.size)
            failed.add_metric(labels, int(group.failed))
        late = self._family(
            GaugeMetricFamily, "straggler_seconds", "Lateness of the rank that repeatedly arrives last.", _LATE
        )
        for one in self._late:
            late.add_metric([*always, one.group, str(one.rank)], one.late_ns / 1e9)
        process = self._family(InfoMetricFamily, "process", "The process of this rank.", ())
        process.add_metric(always, self._process)
        updated = self._family(GaugeMetricFamily, "looked_timestamp_seconds", "Time of the last update.", ())
        updated.add_metric(always, self._updated)
        yield from (operations, size, crossed, seconds, failures, ratio, link_ratio)
        yield from (present, ranks, failed, late, process, updated)
