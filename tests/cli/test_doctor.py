"""`smddp doctor` is green where all is well, and names set-ups that are broken on purpose."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import random
import re
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from ranks.launching import free_ports
from smddp.observability import machine
from smddp.observability.values import Values
from smddp.tools.doctor import checks, facts, heatmap, launch, measure, report
from smddp.tools.doctor.checks.pairs import common, slow
from smddp.tools.doctor.finding import FAIL, OF_JOB, OF_RANK, OK, WARN, evaluate
from smddp.tools.doctor.rendezvous import Client, ConnectionLost, Server
from smddp.torch import error_hints

ROOT = Path(__file__).parents[2]
NAMES = {*OF_RANK, *OF_JOB}
assert checks

# ---- machines that are really so ----


def started(*arguments: str, limit: tuple[int, int] | None = None, **environment: str | None) -> subprocess.Popen[str]:
    """environment: None removes a variable."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen(
        [sys.executable, "-m", "smddp", "doctor", "--json", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={name: value for name, value in variables.items() if value is not None},
        preexec_fn=None if limit is None else lambda: resource.setrlimit(limit[0], (limit[1], limit[1])),
    )


def launched(rank: int, port: int, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """One of two ranks of a launcher."""
    answer = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    own = {name: str(value) for name, value in answer.items()}
    return started("--quick", *arguments, **{**own, "MASTER_ADDR": "127.0.0.1", **environment})


#: A set-up: the lines that must fail, and words of the first.
ALONE: dict[str, tuple[dict[str, Any], set[str], str]] = {
    "files": ({"limit": (resource.RLIMIT_NOFILE, 40)}, {"open files"}, "40; a rank of 2"),
    "space": ({"limit": (resource.RLIMIT_AS, 400 << 20)}, {"address space", "group"}, "400 MiB"),
    "interface": ({"SMDDP_SOCKET_IFNAME": "nosuch0"}, {"interfaces"}, "nosuch0"),
    "libfabric": (
        {"SMDDP_TRANSPORT": "fabric", "SMDDP_LIBFABRIC": "/no/such/libfabric.so"},
        {"libfabric"},
        "/no/such/libfabric.so",
    ),
    "value": ({"SMDDP_ALGO": "rign"}, {"settings", "group"}, "rign"),
}


@pytest.fixture(scope="module")
def runs() -> Iterator[dict[str, Any]]:
    """All set-ups at once: (exit status, findings by name, standard error) of each."""
    ports = free_ports(3)
    processes = {name: started("--quick", "-n", "2", **broken) for name, (broken, *_) in ALONE.items()}
    processes["misspelt"] = started("--quick", "-n", "2", SMDDP_SEGMENT_BYTE="1M")
    processes["fresh"] = started("--quick", "-n", "2", OMP_NUM_THREADS=None)
    processes["differs 1"] = launched(1, ports[0], SMDDP_ALGO="publish", SMDDP_SPIN_US="7")
    processes["differs"] = launched(0, ports[0])
    processes["absent"] = launched(0, ports[1], "--wait", "0.5")
    processes["no rank 0"] = launched(1, ports[2], "--wait", "0.5")
    try:
        done: dict[str, Any] = {}
        for name, process in processes.items():
            said, errors = process.communicate(timeout=100)
            found = {row["name"]: row for row in json.loads(said)["findings"]} if said else {}
            done[name] = (process.returncode, found, errors)
        yield done
    finally:
        for process in processes.values():
            process.kill()


def failing(found: dict[str, Any]) -> set[str]:
    return {name for name, row in found.items() if row["status"] == FAIL}


@pytest.mark.parametrize("name", ALONE)
def test_broken_machine_is_reported(runs, name):
    (status, found, errors), (_, lines, words) = runs[name], ALONE[name]
    assert (status, failing(found)) == (1, lines), errors
    first = next(found[line] for line in found if line in lines)
    assert words in first["found"] and first["means"] and first["do"]


def test_unknown_setting_is_a_warning(runs):
    status, found, _ = runs["misspelt"]
    assert (status, failing(found)) == (0, set())
    assert found["settings"]["status"] == WARN and "SMDDP_SEGMENT_BYTE" in found["settings"]["found"]


def test_ranks_of_the_doctor_need_no_thread_count(runs):
    status, found, errors = runs["fresh"]
    assert (status, found["threads"]["status"], found["threads"]["ranks"]) == (0, OK, [0, 1]), errors


def test_different_settings_are_reported_with_their_ranks(runs):
    status, found, _ = runs["differs"]
    assert (status, failing(found)) == (1, {"settings between ranks", "group"})
    assert "SMDDP_ALGO: empty (rank 0), publish (rank 1)" in found["settings between ranks"]["found"]
    # The missing rank causes no further failures.
    assert runs["differs 1"][:2] == (0, {})


def test_missing_rank_is_reported_without_delay(runs):
    status, found, _ = runs["absent"]
    assert (status, failing(found)) == (1, {"ranks"})
    assert "rank 1 of 2 did not start within 0.5 s" in found["ranks"]["found"]


def test_unreachable_rank_0_is_reported_with_its_address(runs):
    status, _, errors = runs["no rank 0"]
    assert status == 1 and "rank 0 did not answer at 127.0.0.1:" in errors


def test_healthy_machine_passes_and_is_plotted(tmp_path):
    picture = tmp_path / "pairs.svg"
    # Two ranks wherever they run: with fewer processors than that nothing is well.
    process = started("-n", "2", "--svg", str(picture))
    said, errors = process.communicate(timeout=100)
    answer = json.loads(said)
    bad = [row for row in answer["findings"] if row["status"] == FAIL]
    assert (process.returncode, bad) == (0, []), errors
    assert {row["name"] for row in answer["findings"]} == NAMES
    assert [pair["ranks"] for pair in answer["pairs"]] == [[0, 1]] and answer["pairs"][0]["GB/s"] > 0
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")


# ---- machines that are not here ----


@pytest.fixture(scope="module")
def here() -> dict[str, Any]:
    return facts.collect({"rank": 0, "size": 2, "local rank": 0, "local size": 2})


def job(here: dict[str, Any], *others: Callable[[dict[str, Any]], None], hosts: int = 1) -> dict[str, Any]:
    """A healthy job of two ranks, with what `others` change of the second."""
    present = {rank: copy.deepcopy(here) for rank in (0, 1)}
    for rank, its in present.items():
        its["launch"] |= {"rank": rank, "local rank": rank}
        its["identity"]["user"] = 0
        its["processors"] |= {"usable": 8, "quota": None}
        its["memory"] |= {"cgroup": None, "/dev/shm": 8 << 30, "/dev/shm free": 8 << 30}
        its["limits"] |= {"open files": 65536, "address space": None, "file size": None}
        its["meeting place"] = {"name": "h0", "addresses": ["10.0.0.1"], "error": None}
        its["host name"] = {"name": f"h{rank}", "addresses": [f"10.0.0.{rank + 1}"], "error": None}
        its["core"] |= {"between_nodes": "tcp eth0 10.0.0.1 (the only one between hosts)"}
        if hosts > 1:
            its["identity"] |= {"host": f"h{rank}", "boot": f"boot {rank}"}
    for change in others:
        change(present[1])
    made = {
        "size": 2,
        "way": "shm",
        "seconds": 0.01,
        "nodes": [0, 0],
        "network": None,
        "paths": {"all_gather": ["a", "b"]},
    }
    return {
        "size": 2,
        "missing": [],
        "waited": 20.0,
        "quick": True,
        "present": present,
        "group": made,
        "pairs": None,
        "links": [],
    }


def changed(*path: str, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(its: dict[str, Any]) -> None:
        for step in path[:-1]:
            its = its[step]
        its[path[-1]] = to

    return change


def over_a_fabric_with_little_locked_memory(its: dict[str, Any]) -> None:
    its["limits"]["locked memory"] = 64 << 10
    its["core"]["between_nodes"] = "rail efa0; fabric: efa; rails: efa0"


LONELY = "tcp lo 127.0.0.1 (the only usable interface); other hosts cannot reach it"
LOOPBACK = {"name": "h1", "addresses": ["127.0.1.1", "::1"], "error": None}


def test_sound_job_on_two_hosts_is_healthy(here):
    assert report.verdict(evaluate(job(here))) == report.verdict(evaluate(job(here, hosts=2))) == "healthy"


@pytest.mark.parametrize(
    ("line", "status", "words", "hosts", "change"),
    [
        ("processors", FAIL, "quota grants 1.5", 1, changed("processors", "quota", to=1.5)),
        ("processors", WARN, "1 of", 1, changed("processors", "usable", to=1)),
        ("memory limit", FAIL, "256 MiB", 1, changed("memory", "cgroup", to=256 << 20)),
        ("/dev/shm", WARN, "64 MiB", 1, changed("memory", "/dev/shm", to=64 << 20)),
        ("/dev/shm", WARN, "does not exist", 1, changed("memory", "/dev/shm", to=None)),
        ("shared memory", FAIL, "Operation not permitted", 1, changed("memfd", to="[Errno 1] Operation not permitted")),
        ("system calls", FAIL, "eventfd2: refused", 1, changed("refused calls", to={"eventfd2": "refused"})),
        ("address space", FAIL, "2 ranks need", 1, changed("limits", "address space", to=1 << 30)),
        ("address space", WARN, "11.4 GiB", 1, changed("limits", "address space", to=12_288_000_000)),
        ("file size", FAIL, "0 B", 1, changed("limits", "file size", to=0)),
        ("file size", WARN, "1 GiB", 1, changed("limits", "file size", to=1 << 30)),
        ("unix sockets", FAIL, "Permission denied", 1, changed("abstract socket", to="[Errno 13] Permission denied")),
        ("ptrace scope", WARN, "is 3", 1, changed("kernel", "ptrace scope", to=3)),
        ("names", WARN, "127.0.1.1", 2, changed("host name", to=LOOPBACK)),
        ("names", FAIL, "MASTER_ADDR h1", 2, changed("meeting place", to=LOOPBACK)),
        ("loopback", FAIL, "rank 1", 2, changed("core", "between_nodes", to=LONELY)),
        ("nodes", WARN, "user: 0 (rank 0)", 1, changed("identity", "user", to=4711)),
        ("nodes", WARN, "network namespace", 1, changed("identity", "network namespace", to="net:[1]")),
        ("versions", FAIL, "0.0.9 (rank 1)", 1, changed("version", to="0.0.9")),
        ("versions", WARN, "torch", 1, changed("torch", to="2.8.0")),
        ("GPU", FAIL, "/dev/nvidia0", 1, changed("devices", to=["/dev/nvidia0"])),
        ("libfabric", FAIL, "uverbs0", 1, changed("devices", to=["/dev/infiniband/uverbs0"])),
        ("locked memory", FAIL, "64 KiB", 1, over_a_fabric_with_little_locked_memory),
        ("threads", WARN, "not set", 1, changed("environment", to={"LOCAL_WORLD_SIZE": "2"})),
    ],
)
def test_a_change_of_one_fact_is_named_with_its_rank(here, line, status, words, hosts, change):
    if line in ("GPU", "libfabric") and (here["cuda"] or {}).get("found"):
        pytest.skip("this machine has what is to be missing")
    broken = job(here, change, hosts=hosts)
    found = [it for it in evaluate(broken) if it.name == line and it.status == status]
    assert [words in it.found for it in found] == [True], evaluate(broken)
    assert found[0].means and found[0].do
    if line in OF_RANK:
        assert found[0].ranks == (1,)
    text = "\n".join(report.lines("head", evaluate(broken), 2, 100))
    assert f"{'FAIL' if status == FAIL else 'warn'}  {line}" in text


def test_marks_are_coloured_without_another_change_of_the_text(here):
    lines = report.lines("head", evaluate(job(here, changed("environment", to={"LOCAL_WORLD_SIZE": "2"}))), 2, 100)
    coloured = report.coloured(lines)
    assert [line for line in coloured if line.startswith("  \x1b[33mwarn\x1b[0m  threads ")]
    assert [re.sub("\x1b\\[[0-9]+m", "", line) for line in coloured] == lines


def test_threads_of_a_rank_are_its_share_of_the_processors(here):
    broken = job(here, changed("environment", to={"LOCAL_WORLD_SIZE": "2"}))
    assert [it.do for it in evaluate(broken) if it.name == "threads" and it.do] == ["export OMP_NUM_THREADS=4"]


def test_failing_check_does_not_suppress_the_others(here):
    found = evaluate(job(here, changed("limits", to={})))
    assert {it.name for it in found} == NAMES
    assert [it.status for it in found if it.name == "open files"] == [OK, WARN]


def test_different_passing_findings_are_merged(here):
    many = job(here)
    many["present"] = {rank: copy.deepcopy(many["present"][0]) for rank in range(40)}
    for rank, its in many["present"].items():
        its["core"]["between_nodes"] = f"tcp eth0 10.0.0.{rank} (the only one between hosts)"
    many["present"][39]["core"]["between_nodes"] = "nothing: no interface is up"
    lines = [line for line in report.lines("head", evaluate(many), 40, 200) if " interfaces " in line]
    assert len(lines) == 5 and "rank 39: no interface is up" in lines[-1], lines


# ---- pairs ----


class Clock:
    """Simulated time of each rank, a thread of this process. Load of the machine does not change it."""

    def __init__(self) -> None:
        self._local = threading.local()

    def perf_counter(self) -> float:
        return getattr(self._local, "now", 0.0)

    def monotonic(self) -> float:
        return 0.0

    def advance(self, seconds: float) -> None:
        self._local.now = self.perf_counter() + seconds


class Timed:
    """A communicator whose messages take simulated time. delay: seconds that each message to rank `to` takes longer."""

    def __init__(self, comm: Any, clock: Clock, to: int | None = None, delay: float = 0.0) -> None:
        self._comm, self._clock, self._to, self._delay = comm, clock, to, delay

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def send(self, buffer: Any, dtype: int, dst: int, *rest: Any) -> Any:
        self._clock.advance(30e-6 + buffer[1] / 1e9 + (self._delay if dst == self._to else 0.0))
        return self._comm.send(buffer, dtype, dst, *rest)


def measured(delays: dict[int, tuple[int, float]], monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The pairs of four ranks, threads of this process; delays: by rank, to whom and how long."""
    store, name, clock = Values(), f"doctor-{time.monotonic_ns()}", Clock()
    monkeypatch.setattr(measure, "time", clock)

    def rank(me: int) -> list[dict[str, Any]]:
        from smddp._native import core

        comm = core().Comm.make(store, "create_group", name, me, 4, 30.0)
        rows = measure.Meter(Timed(comm, clock, *delays.get(me, ())), 20.0).run(measure.steps([0] * 4), 0.2)
        comm.close()
        return rows

    with ThreadPoolExecutor(4) as pool:
        rows = [row for each in pool.map(rank, range(4)) for row in each]
    return [{**row, "same node": True} for row in measure.best(rows)]


def linked(here, **values: int) -> Any:
    """The finding of the links of two hosts, for an estimate of 50 us and these values of rank 0's link."""
    whole = job(here, hosts=2)
    usual = {"rtt_us": 120, "min_rtt_us": 100, "receiver_limited": 0.0, "retransmits": 0}
    usual |= dict.fromkeys(("delivery_bytes_per_s", "mean_bytes_per_s"), 1_250_000_000)
    usual |= dict.fromkeys(("sent_bytes", "received_bytes"), 1448 * 20_000)
    network = {"latency_us": 50.0, "bytes_per_s": 1.25e9, "basis": "measured"}
    group = {"name": "doctor", "id": "1", "size": 2, "nodes": 2, "network": network}
    pairs = ((0, {**usual, "peer": 1, **values}), (1, {**usual, "peer": 0}))
    links = [{"host": f"h{rank}", "groups": [{**group, "rank": rank, "links": [link]}]} for rank, link in pairs]
    return next(it for it in evaluate({**whole, "links": links}) if it.name == "links")


def test_links_have_round_trips_ratios_and_retransmissions(here):
    found = linked(here, min_rtt_us=250, retransmits=3)
    times = "round trip 100 to 250 us, measured/estimated time 1 to 2.5"
    assert found.status == OK
    assert found.found == f"2 TCP connections, {times}, 3 of 40000 segments retransmitted"


def test_slow_link_and_lossy_link_are_reported_with_both_hosts(here):
    found = linked(here, min_rtt_us=400)
    assert found.status == WARN and found.means and "ethtool" in found.do
    assert "link from rank 0 (host h0) to rank 1 (host h1) of group `doctor` is 4.0 times slower" in found.found
    found = linked(here, retransmits=201)
    assert found.status == WARN
    assert found.found == "rank 0 (host h0) to rank 1 (host h1): 201 of 20000 segments retransmitted"


def test_links_that_were_not_read_are_a_warning(here):
    found = next(it for it in evaluate({**job(here), "links": None}) if it.name == "links")
    assert found.status == WARN and found.do == "see `group`"


@pytest.mark.parametrize(
    ("name", "change", "number"),
    [
        ("processors", changed("processors", "usable", to=1), "start 1 ranks on this host"),
        ("memory limit", changed("memory", "cgroup", to=600 << 20), "SMDDP_STAGING_BYTES="),
    ],
)
def test_remedy_has_the_number_of_this_machine(here, name: str, change: Any, number: str):
    found = next(it for it in evaluate(job(here, change)) if it.name == name and it.status != OK)
    assert number in found.do


def test_pair_with_delayed_messages_is_reported(here, monkeypatch):
    assert slow(measured({}, monkeypatch)) == []
    rows = measured({1: (3, 0.02)}, monkeypatch)
    assert sorted(row["ranks"] for row in rows) == [[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]]
    assert [row["ranks"] for row in slow(rows)] == [[1, 3]], rows
    whole = job(here)
    whole["present"] |= dict.fromkeys((2, 3), whole["present"][1])
    found = next(it for it in evaluate({**whole, "pairs": {"error": None, "rows": rows}}) if it.name == "pairs")
    assert found.status == FAIL and "ranks 1, 3" in found.found


def rows_of(size: int, figures: Callable[[int, int], tuple[float, float]]) -> list[dict[str, Any]]:
    pairs = [(a, b) for a in range(size) for b in range(a + 1, size)]
    return [
        {"ranks": [a, b], "latency us": late, "GB/s": wide, "same node": False}
        for (a, b) in pairs
        for late, wide in [figures(a, b)]
    ]


def test_noise_is_no_slow_pair_and_a_slow_host_is_named_by_itself():
    for seed in range(300):
        noise = random.Random(seed)
        # Noise of a busy machine in the best of several tries: up to half as much again, now and then twice.
        spoilt = lambda a, b: (30 * noise.uniform(1, 1.6), 1.2 / noise.choice([1, 1.1, 1.3, 2]))  # noqa: E731, B023
        assert slow(rows_of(noise.randint(2, 8), spoilt)) == []
        guilty = noise.randrange(4)
        rows = rows_of(4, lambda a, b: (30.0, 0.1) if guilty in (a, b) else spoilt(a, b))  # noqa: B023
        assert common(slow(rows), rows) == [guilty]
    two = [{"ranks": [0, 1], "latency us": 9e9, "GB/s": 1e-9, "same node": True}]
    assert slow(two) == []


def test_each_pair_is_measured_once_with_one_pair_per_rank_at_a_time():
    for nodes in ([0] * 5, [0, 0, 1, 1], list(range(9)), [0, 1, 1, 2, 0, 2, 2]):
        steps = measure.steps(nodes)
        pairs = [pair for step in steps for pair in step]
        assert len(set(pairs)) == len(pairs)
        assert all(len({rank for pair in step for rank in pair}) == 2 * len(step) for step in steps)
        within = [(a, b) for a, b in pairs if nodes[a] == nodes[b]]
        assert len(within) == sum(nodes.count(n) * (nodes.count(n) - 1) // 2 for n in set(nodes))
        assert len(pairs) - len(within) == len(set(nodes)) * (len(set(nodes)) - 1) // 2
    # A large job is measured in part: every node still with many others.
    large = measure.steps([rank // 8 for rank in range(8 * 200)])
    assert len(large) < 100


def test_heatmap_marks_slow_pairs_and_omits_unknown_ones():
    rows = rows_of(4, lambda a, b: (900.0, 0.1) if (a, b) == (0, 3) else (30.0, 1.0))
    root = ElementTree.fromstring(heatmap.drawn(rows, [0, 1, 2, 3], ["a", "b<", "c", "d"]))
    framed = [it for it in root.iter() if it.get("stroke") == "#d00000"]
    assert len(framed) == 4


# ---- the meeting ----


def test_foreign_client_is_rejected_without_effect_on_ranks():
    server = Server("127.0.0.1", 0, 2)
    with socket.create_connection(("127.0.0.1", server.port)) as foreign:
        foreign.sendall(b"GET / HTTP/1.1\r\n\r\n")
        foreign.settimeout(10)
        assert foreign.recv(100) == b""
    client = Client("127.0.0.1", server.port, 5)
    threading.Timer(0.05, lambda: Client("127.0.0.1", server.port, 5).publish("late", {"a": [1]})).start()
    assert client.ask("late", 5) == {"a": [1]}
    assert client.ask("never", 0.05) is None
    server.shutdown()
    server.server_close()


def test_connections_to_the_rendezvous_are_bounded():
    server = Server("127.0.0.1", 0, 2)
    with contextlib.ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=10)) for _ in range(80)
        ]
        assert silent[-1].recv(1) == b"", "one connection for each rank, and 64 more"
        assert threading.active_count() < 80
    Client("127.0.0.1", server.port, 5).publish("after", 1)
    server.shutdown()
    server.server_close()


def test_foreign_server_is_reported():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=lambda: listener.accept()[0].sendall(b"HTTP/1.1 400 Bad Request\r\n"))
        thread.start()
        with pytest.raises(ConnectionLost, match="another program"):
            Client("127.0.0.1", listener.getsockname()[1], 0)
        thread.join()


def launched_by(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value) if value is not None else monkeypatch.delenv(name, raising=False)
    return launch.launched()


@pytest.mark.parametrize(
    ("changes", "port"),
    [({}, 29500), ({"TORCHELASTIC_USE_AGENT_STORE": "True"}, 29501), ({"RANK": None, "WORLD_SIZE": None}, None)],
)
def test_the_launcher_is_read(changes, port, monkeypatch):
    whole = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "h0", "MASTER_PORT": "29500", "LOCAL_WORLD_SIZE": "2"}
    read = launched_by(monkeypatch, {**whole, **changes})
    assert (read.port if read else None) == port


@pytest.mark.parametrize("changes", [{"WORLD_SIZE": "x"}, {"RANK": "4"}, {"MASTER_ADDR": ""}, {"MASTER_PORT": "0"}])
def test_invalid_launcher_variables_are_rejected(changes, monkeypatch):
    whole = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "h0", "MASTER_PORT": "29500"}
    with pytest.raises(ValueError, match=next(iter(changes))):
        launched_by(monkeypatch, {**whole, **changes})


def test_hanging_call_times_out():
    with pytest.raises(TimeoutError, match=r"0\.05 s"):
        machine.within(0.05, threading.Event().wait)


# ---- where errors and pages speak of it ----


def test_errors_point_at_lines_that_exist_by_words_that_the_core_has():
    sources = "".join(path.read_text() for path in ROOT.glob("crates/smddp-*/src/**/*.rs"))
    for words, line in error_hints.HINTS:
        assert line in NAMES, line
        # The kernel's own words, and a sentence that is put together.
        assert words.removesuffix(" differs") in sources or words == "Too many open files", words
    assert error_hints.SETTING in NAMES
    text = 'group `g`: SMDDP_ALGO differs: "" on rank 0, "publish" on rank 1 (host h, pid 3)'
    assert error_hints.hint(text) == "; `smddp doctor` shows it: settings between ranks"
    assert error_hints.hint("anything else") == ""


def test_the_page_shows_lines_that_exist():
    page = (ROOT / "docs/guides/check-a-machine.md").read_text()
    screens = re.findall(r"```console\n\$ [^\n]*smddp doctor(.*?)```", page, re.DOTALL)
    shown = {
        match for screen in screens for match in re.findall(r"^  (?:ok  |warn|FAIL)  (\S.*?)(?:  |$)", screen, re.M)
    }
    assert shown and shown <= NAMES
