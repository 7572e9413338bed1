"""docs/alerts.yaml holds rules of Prometheus over metrics and labels that the exporter has."""

import re
from pathlib import Path

import pytest

RULES = Path(__file__).parents[2] / "docs" / "alerts.yaml"


def families() -> dict[str, set[str]]:
    """Returns the labels of each exported sample."""
    pytest.importorskip("prometheus_client", reason="prometheus_client is not installed: pip install 'smddp[metrics]'")
    from smddp.observability.metrics import Metrics
    from smddp.observability.stragglers import Straggler

    times = {"submitted_ns": 1, "started_ns": 1, "ended_ns": 1_000_001, "seconds": 1e-3}
    operation = {"seq": 1, "what": "all_reduce #1", "call": "all_reduce()", "bytes": 4, "outcome": "ok", **times}
    failed = {**operation, "seq": 2, "outcome": "failed"}
    link = {"peer": 1, "min_rtt_us": 9, "delivery_bytes_per_s": None, "mean_bytes_per_s": None, "sent_bytes": 0}
    between = {
        "network": {"latency_us": 9, "bytes_per_s": 9, "basis": "set"},
        "links": [{**link, "receiver_limited": 0}],
    }
    group = {"name": "0", "size": 2, "error": None, "present": None, "operations": [operation, failed], **between}
    moved = {"group": "0", "collective": "all_reduce", "algorithm": "mesh", "way": "shm", "nodes": 1}
    metrics = Metrics(0, lambda _group, _op: 1e-3)
    metrics.update(
        {"version": "1", "host": "h", "pid": 1, "groups": [group]},
        [{**moved, "operations": 1, "bytes": 8, "crossed": 0}],
    )
    metrics.late([Straggler("0", 1, 1.0, 20, 1e7)])
    return {sample.name: set(sample.labels) for family in metrics.collect() for sample in family.samples}


def test_alert_rules_use_metrics_and_labels_that_the_exporter_has():
    known = families()
    text = RULES.read_text()
    expressions = re.findall(r"expr: (?:>-\n)?((?:.+\n)+?)(?=\s+(?:for|labels):)", text)
    assert len(expressions) == text.count("- alert: ") >= 5
    for expression in expressions:
        names = set(re.findall(r"smddp_\w+", expression))
        assert names and names <= known.keys(), expression
        labels = {label for group in re.findall(r"by \(([\w, ]+)\)", expression) for label in group.split(", ")}
        assert labels <= set.intersection(*(known[name] for name in names)), expression


def test_alert_rules_have_the_fields_that_prometheus_requires():
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        assert set(group) == {"name", "rules"}
        for rule in group["rules"]:
            assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}, rule
            assert rule["labels"]["severity"] in ("warning", "critical")
            known = set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"])))
            kept = re.findall(r"by \(([\w, ]+)\)", rule["expr"])
            # An aggregation removes the other labels.
            assert not kept or known <= set(kept[0].split(", ")), rule
