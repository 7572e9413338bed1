"""Groups without torch: `smddp.init()` and the collectives on arrays, with one process per rank."""

import math
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import job
import pytest
import smddp
from ranks.launching import LAUNCHERS, Launcher, clean, free_port, outputs, slurm, start, torchrun

JOB = str(Path(__file__).with_name("job.py"))
CASES = [case.__name__ for case in job.TOGETHER]


def run(case: str, size: int, environment: Launcher = torchrun, **more: str) -> list[str]:
    """Returns the output of each rank of a successful job."""
    ended = outputs(start([JOB, case], size, environment, **more))
    assert all(status == 0 for status, _ in ended), ended
    return [text for _, text in ended]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_call_returns_the_documented_result(size: int):
    """All cases of job.py, one group after the other in the same processes."""
    for text in run("together", size):
        assert re.findall(r"^(\w+): well$", text, re.MULTILINE) == CASES


@pytest.mark.parametrize("case", [case.__name__ for case in job.ALONE])
def test_cause_of_a_group_failure_is_reported(case: str):
    ended = outputs(start([JOB, case], 3 if case != "mismatch" else 2))
    statuses = [status for status, _ in ended]
    assert statuses == [0, -9, 0] if case == "killed" else set(statuses) == {0}, ended


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_come_from_the_launchers_environment(launcher):
    texts = run("said", 2, launcher)
    for rank, text in enumerate(texts):
        assert f"rank {rank} of 2" in text and f"local {rank} of 2" in text


def test_the_example_runs():
    example = Path(__file__).parents[2] / "examples" / "numpy_allreduce.py"
    ended = outputs(start([str(example)], 3))
    assert [status for status, _ in ended] == [0, 0, 0] and "3 ranks over shm" in ended[0][1], ended


def test_paths_are_logged_on_request():
    texts = run("said", 2, SMDDP_DEBUG="INFO")
    assert "group world of 2 ranks:" in texts[0] and "all_reduce" in texts[0]


def test_missing_rank_at_rendezvous_is_reported():
    script = "import smddp; smddp.init(timeout=1)"
    for rank in (0, 1):
        environment = {**clean(), **torchrun(rank, 3, free_port())}
        ended = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
        assert ended.returncode == 1
        last = ended.stderr.splitlines()[-1]
        # Rank 0 knows who is missing; the others only that rank 0 is not there.
        assert ("CollectiveTimeoutError" in last and "1, 2" in last) if rank == 0 else "rank 0 does not" in last, last


def test_used_port_is_reported():
    import socket

    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(smddp.TopologyError, match=str(port)):
            smddp.init(0, 2, f"127.0.0.1:{port}", timeout=5)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"rank": 0}, "rank and size go together"),
        ({"address": "a:1"}, "rank and size go together"),
        ({"rank": 0, "size": 2}, "address must be"),
        ({"rank": 0, "size": 2, "address": "host"}, "address must be"),
        ({"rank": 0, "size": 2, "address": "host:99999"}, "address must be"),
        ({"rank": 0, "size": 2, "address": "host:1", "port": 2}, "has a port, and port 2"),
        ({"rank": 0, "size": 2, "address": "host:1", "store": object()}, "not both"),
        ({"rank": 0, "size": 2, "port": 1, "store": object()}, "not both"),
        ({"rank": 2, "size": 2, "address": "host:1"}, "rank 2 is not in a group of 2"),
        ({"rank": 0, "size": 1, "timeout": 0}, "timeout must be"),
    ],
)
def test_invalid_arguments_are_reported(arguments: dict, says: str):
    with pytest.raises(ValueError, match=says):
        smddp.init(**arguments)


@pytest.mark.parametrize(
    ("form", "port"),
    [("[::1]:{port}", False), ("[::1]", True), ("::1", True), ("127.0.0.1:{port}", False), ("localhost", True)],
)
@pytest.mark.parametrize("timeout", [timedelta(seconds=30), math.inf, 2**70])
def test_every_form_of_an_address_and_of_a_timeout_makes_a_group(form: str, port: bool, timeout):
    """Two threads as ranks."""
    number = free_port()
    address, named = form.format(port=number), {"port": number} if port else {}
    with ThreadPoolExecutor(2) as pool:
        groups = list(pool.map(lambda rank: smddp.init(rank, 2, address, timeout=timeout, **named), range(2)))
        for group in groups:
            group.set_timeout(timeout)
        calls = [pool.submit(group.all_reduce, bytearray(b"\1"), timeout=timeout) for group in groups]
        assert [call.result()[0] for call in calls] == [2, 2]
        list(pool.map(lambda group: group.close(), groups))


def test_an_argument_of_a_wrong_type_is_named_by_every_call():
    with smddp.init(0, 1) as comm:
        ones = bytearray(b"\1")
        for call, says in (
            (lambda: comm.broadcast(ones, root="0"), "root must be an integer, not str"),
            (lambda: comm.send(ones, None), "dst must be an integer, not NoneType"),
            (lambda: comm.recv(ones, 1.5), "src must be an integer, not float"),
            (lambda: comm.send(ones, 0, "7"), "tag must be an integer, not str"),
            (lambda: comm.all_reduce(ones, timeout="1"), "timeout must be a number of seconds or a datetime.timedelta"),
            (lambda: comm.set_timeout("1"), "timeout must be a number of seconds or a datetime.timedelta"),
        ):
            with pytest.raises(TypeError, match=says):
                call()
        for timeout in (math.nan, -1, timedelta(0)):
            with pytest.raises(ValueError, match="positive number of seconds"):
                comm.all_reduce(ones, timeout=timeout)


def test_a_second_process_of_a_joined_rank_is_reported_immediately():
    """Before the group exists: meeting.rs. Here once it does."""
    script = "import smddp, sys; comm = smddp.init(timeout=60); print('in', flush=True); sys.stdin.read(); comm.close()"
    port = free_port()

    def process(rank: int) -> subprocess.Popen[str]:
        environment = {**clean(), **torchrun(rank, 2, port)}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen([sys.executable, "-c", script], env=environment, text=True, **pipes)

    joined = [process(0), process(1)]
    try:
        assert [one.stdout.readline() for one in joined] == ["in\n", "in\n"]
        late = process(1)
        _, text = late.communicate(timeout=40)
        assert f"two processes claim rank 1 of group 'world': pid {joined[1].pid} on host" in text, text
        assert f"and pid {late.pid} on host" in text, text
    finally:
        for one in joined:
            one.communicate("")


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not set"),
        ({"WORLD_SIZE": "2"}, "RANK is not set"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK is 'x'"),
        ({"OMPI_COMM_WORLD_RANK": "4", "OMPI_COMM_WORLD_SIZE": "2"}, "there are 2 ranks"),
    ],
)
def test_an_environment_that_makes_no_sense_is_named(environment: dict, says: str, monkeypatch):
    for name in (*slurm(0, 1, 1), *torchrun(0, 1, 1)):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(smddp.ConfigError, match=says):
        smddp.init()


def test_ranks_meet_at_a_store_of_torch_or_of_their_own(tmp_path):
    """Threads as ranks: torch's FileStore, and the least that a store can be."""
    from smddp.observability.values import Values
    from torch.distributed import HashStore

    for store in (HashStore(), Values()):
        with ThreadPoolExecutor(3) as pool:
            groups = list(pool.map(lambda rank, store=store: smddp.init(rank, 3, store=store, timeout=20), range(3)))
            totals = list(pool.map(lambda comm: comm.all_reduce(bytearray(b"\1"))[0], groups))
            list(pool.map(lambda comm: comm.close(), groups))
        assert totals == [3, 3, 3]


def test_torch_tensors_and_types_of_ml_dtypes_go_too():
    import torch

    with smddp.init(0, 1) as comm:
        tensor = torch.arange(6, dtype=torch.bfloat16)
        assert comm.all_gather(tensor, out=torch.empty(1, 6, dtype=torch.bfloat16)).tolist() == [list(range(6))]
        assert comm.all_reduce(tensor) is tensor
        with pytest.raises(ValueError, match="not contiguous"):
            comm.all_reduce(torch.ones(3, 4).T)
        ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
        import numpy

        for name in ("bfloat16", "float8_e4m3fn"):
            array = numpy.arange(4).astype(getattr(ml_dtypes, name))
            assert (comm.all_gather(array)[0] == array).all()
