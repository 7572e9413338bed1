"""docs/reference/metrics.md: name, type, unit and labels of each Prometheus metric."""

from __future__ import annotations

import writer

SOURCE = "python/smddp/observability/metrics.py"
_LABELS = {
    "run": "job: `TORCHELASTIC_RUN_ID`, else `SLURM_JOB_ID`, else empty",
    "rank": "rank of the process in the job",
    "group": "name of the group",
    "collective": "collective, such as `all_reduce`",
    "algorithm": "algorithm, such as `mesh`",
    "way": "transport, such as `shm`",
    "nodes": "number of nodes of the group",
    "straggler": "rank that repeatedly arrives last",
    "peer": "rank at the other end of the connection",
}
#: Ending of a metric's name -> unit. Other metrics are numbers.
_UNITS = {"seconds": "seconds", "bytes": "bytes", "ratio": "ratio"}
_SUFFIX = {"counter": "_total", "info": "_info"}


def page() -> str:
    from smddp.observability.metrics import Metrics

    collector = Metrics(0)
    collector.update({"version": "", "host": "", "pid": 0, "groups": []}, [])
    rows, labels = [], set()
    for family in collector.collect():
        own = [name for name in family._labelnames if name not in ("run", "rank")]
        labels |= {*family._labelnames}
        unit = next((unit for ending, unit in _UNITS.items() if family.name.endswith(ending)), "-")
        name = family.name + _SUFFIX.get(family.type, "")
        shown = ", ".join(f"`{label}`" for label in own) or "-"
        rows.append((f'<a id="{name}"></a>`{name}`', family.type, unit, shown, family.documentation))
    parts = [
        writer.paragraph(
            "Each rank exports these metrics at `SMDDP_METRICS_PORT` or into `SMDDP_METRICS_FILE`. The exporter needs "
            "`pip install 'smddp[metrics]'`."
        ),
        writer.console(
            "$ SMDDP_METRICS_PORT=9400 torchrun --nproc-per-node 2 train.py &", "$ curl -s localhost:9400/metrics"
        ),
        "## Metrics\n\n",
        writer.table(("metric", "type", "unit", "labels", "meaning"), rows),
        "## Labels\n\n",
        writer.paragraph("All metrics have the labels `run` and `rank`."),
        writer.table(("label", "meaning"), [(f"`{name}`", text) for name, text in _LABELS.items() if name in labels]),
        writer.links(("Monitoring", "../guides/monitoring.md"), ("Settings", "settings.md#metrics")),
    ]
    missing = labels - _LABELS.keys()
    if missing:
        raise SystemExit(f"scripts/docs/metrics.py: describe the labels {', '.join(sorted(missing))}")
    return writer.page("Prometheus metrics", SOURCE, *parts)
