"""Prometheus metrics of a job: a file of each rank, a port, and the metrics that the dashboard queries."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks.cases import Cases
from ranks.pool import Pool
from smddp.observability import metrics_server, watcher
from smddp.observability.exporter import Exposition, listener, place

SECONDS = 60.0
DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"


def parsed(text: str) -> dict[tuple[str, ...], float]:
    """Returns the values by sample name, group and collective, summed over the other labels."""
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, sample.labels.get("group", ""), sample.labels.get("collective", ""))
            found[key] = found.get(key, 0) + (sample.value if sample.labels.get("le") in (None, "+Inf") else 0)
            assert sample.labels["rank"].isdigit(), sample
    return found


def served() -> dict[tuple[str, ...], float]:
    address = watcher.address()
    assert address is not None and address[0] == "127.0.0.1", address
    with urllib.request.urlopen(f"http://{address[0]}:{address[1]}/metrics", timeout=20) as answer:
        return parsed(answer.read().decode())


def written() -> dict[tuple[str, ...], float]:
    return parsed(place(os.environ["SMDDP_METRICS_FILE"], dist.get_rank()).read_text())


cases = Cases()


@cases
def calls_are_counted_with_bytes_and_seconds() -> None:
    group = dist.new_group([0, 1])
    name = group.communicator.name
    for _ in range(3):
        dist.all_reduce(torch.ones(5), group=group)
    if dist.get_rank() == 0:
        dist.send(torch.ones(4), 1, group=group)
    else:
        dist.recv(torch.ones(4), 0, group=group)
    watcher.update()
    # A second update counts no call twice.
    watcher.update()
    found = served()
    assert found["smddp_operations_total", name, "all_reduce"] == 3, found
    assert found["smddp_bytes_total", name, "all_reduce"] == 60, found
    assert found["smddp_crossed_bytes_total", name, "all_reduce"] == 0, found
    assert found["smddp_operation_seconds_count", name, "all_reduce"] == 3, found
    # The call of the last rank may complete without waiting.
    assert 0 <= found["smddp_operation_seconds_sum", name, "all_reduce"] < 60, found
    assert found.get(("smddp_bytes_total", name, "send"), 0) == (16 if dist.get_rank() == 0 else 0), found
    assert found["smddp_group_ranks", name, ""] == 2 and found["smddp_group_failed", name, ""] == 0, found
    # The file is written at each interval, and every read is complete.
    while written().get(("smddp_operations_total", name, "all_reduce")) != 3:
        assert served()["smddp_operations_total", name, "all_reduce"] == 3
    # The metrics include the calls of a destroyed group.
    dist.all_reduce(torch.ones(5), group=group)
    dist.destroy_process_group(group)
    watcher.update()
    assert served()["smddp_operations_total", name, "all_reduce"] == 4
    dist.barrier()


@cases
def a_waiting_rank_reports_its_waiting_time() -> None:
    group = dist.new_group([0, 1])
    name = group.communicator.name
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        work = dist.all_reduce(torch.ones(2), group=group, async_op=True)
        age = 0.0
        while age == 0:
            watcher.update()
            age = served()["smddp_present_operation_seconds", name, ""]
        store.set("age", "seen")
        work.wait()
    else:
        store.get("age")
        dist.all_reduce(torch.ones(2), group=group)
    watcher.update()
    assert served()["smddp_present_operation_seconds", name, ""] == 0
    dist.barrier()


@cases
def a_failure_is_counted() -> None:
    group = dist.new_group([0, 1])
    name = group.communicator.name
    with pytest.raises(Exception, match="all_reduce"):
        dist.all_reduce(torch.ones(2 + dist.get_rank()), group=group)
    watcher.update()
    found = served()
    assert found["smddp_group_failed", name, ""] == 1, found
    assert found["smddp_failed_operations_total", name, "all_reduce"] == 1, found
    dist.barrier()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("metrics")


@pytest.fixture(scope="module")
def pool(folder: Path) -> Iterator[Pool]:
    pytest.importorskip("prometheus_client")
    settings = {
        "SMDDP_METRICS_FILE": str(folder / "metrics.prom"),
        "SMDDP_METRICS_INTERVAL": "1",
        "SMDDP_METRICS_PORT": "0",
    }
    with Pool(2, lambda rank: settings) as made:
        yield made


@pytest.mark.parametrize("case", cases)
def test_metrics(pool: Pool, case: str):
    pool.run(__name__, case, SECONDS)


ONE_RANK = """
import torch, torch.distributed as dist
from smddp._register import register
register()
dist.init_process_group("smddp", init_method="file://{store}", rank=0, world_size=1)
dist.all_reduce(torch.ones(2))
"""


def test_the_dashboard_queries_exactly_the_metrics_of_a_job(tmp_path: Path):
    pytest.importorskip("prometheus_client")
    environment = {"SMDDP_METRICS_FILE": f"{tmp_path}/%h-%r.prom", "SMDDP_METRICS_INTERVAL": "3600"}
    command = [sys.executable, "-c", ONE_RANK.format(store=tmp_path / "store")]
    subprocess.run(command, check=True, timeout=120, env={**os.environ, **environment})
    (file,) = tmp_path.glob("*.prom*")
    assert file.name == f"{os.uname().nodename}-0.prom"
    assert parsed(file.read_text())["smddp_operations_total", "0", "all_reduce"] == 1
    names = set(re.findall(r"^# TYPE (smddp_\w+)", file.read_text(), re.M))
    dashboard = DASHBOARD.read_text()
    panels = json.loads(dashboard)["panels"]
    asked = set(re.findall(r"smddp_\w+", " ".join(target["expr"] for panel in panels for target in panel["targets"])))
    assert {re.sub("_(bucket|sum|count)$", "", name) for name in asked} == names
    assert set(re.findall(r"smddp_\w+", dashboard)) <= asked


def test_without_the_library_the_job_continues_with_a_warning(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SMDDP_METRICS_PORT", "0")
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.setattr(watcher, "_pid", None)
    monkeypatch.setattr(watcher, "_watch", None)
    with pytest.warns(RuntimeWarning, match=r"SMDDP_METRICS_PORT: no metrics .*pip install 'smddp\[metrics\]'"):
        watcher.start(0)
    assert watcher.address() is None
    watcher.update()


def test_an_unusable_port_or_file_is_only_reported(tmp_path: Path):
    pytest.importorskip("prometheus_client")
    (tmp_path / "file").touch()
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = {"SMDDP_METRICS_PORT": str(taken.getsockname()[1]), "SMDDP_METRICS_FILE": f"{tmp_path}/file/a.prom"}
        shown = Exposition(0, settings, said.append)
        shown.write()
    assert shown.address is None
    assert "SMDDP_METRICS_PORT: 127.0.0.1:" in said[0] and "SMDDP_METRICS_FILE: " in said[1], said


@pytest.mark.parametrize(
    ("name", "file"),
    [("/a/metrics.prom", "/a/metrics-3.prom"), ("/a/%h.%r.prom", "/a/{host}.3.prom"), ("/a/m-%p", "/a/m-{pid}")],
)
def test_each_rank_has_a_separate_file(name: str, file: str):
    assert str(place(name, 3)) == file.format(host=os.uname().nodename, pid=os.getpid())


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("9400", ("127.0.0.1", 9402)),
        ("0.0.0.0:9400", ("0.0.0.0", 9402)),
        ("[::1]:9400", ("::1", 9402)),
        ("0", ("127.0.0.1", 0)),
    ],
)
def test_each_rank_of_a_host_has_a_separate_port(text: str, where: tuple[str, int]):
    assert listener(text, 2) == where


def test_clients_of_the_port_use_bounded_resources(monkeypatch: pytest.MonkeyPatch):
    """Half requests, silent connections and clients that read no answer: threads are bounded, and each ends."""
    monkeypatch.setattr(metrics_server, "REQUEST_SECONDS", 0.5)

    def answer(_: dict[str, Any], start: Any) -> list[bytes]:
        start("200 OK", [("Content-Type", "text/plain")])
        return [b"x" * (8 << 20)]

    server = metrics_server.MetricsServer("127.0.0.1", 0, answer)
    url = f"http://127.0.0.1:{server.server_port}/metrics"
    before = threading.active_count()
    try:
        clients = []
        for number in range(30):
            clients.append(socket.create_connection(("127.0.0.1", server.server_port), timeout=20))
            clients[-1].sendall((b"", b"G", b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")[number % 3])
            assert threading.active_count() - before <= metrics_server.CONNECTIONS
        with urllib.request.urlopen(url, timeout=20) as scraped:
            assert len(scraped.read()) == 8 << 20
        for client in clients:
            # Each connection ends, after a partial answer or none.
            while client.recv(1 << 20) if client.fileno() >= 0 else b"":
                pass
            client.close()
    finally:
        server.shutdown()
        server.server_close()
    until = time.monotonic() + 20
    while threading.active_count() > before and time.monotonic() < until:
        time.sleep(0.01)
    assert threading.active_count() <= before
