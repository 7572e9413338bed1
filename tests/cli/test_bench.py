"""`smddp-bench` as Python's console command has it: pictures, comparisons, backends of torch side by side."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import forked
from ranks.launching import free_port

BENCH = Path(sys.executable).parent / "smddp-bench"
PNG = b"\x89PNG\r\n"


def bench(*words: object, cwd: Path | None = None, **settings: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **settings}
    return subprocess.run([BENCH, *map(str, words)], capture_output=True, text=True, timeout=120, cwd=cwd, env=env)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Two runs through torch: figures-smddp.json, figures-gloo.json."""
    folder = tmp_path_factory.mktemp("runs")
    sizes = ("-b", 0, "-e", "64K", "-f", 64, "-n", 5, "-w", 1)
    done = bench("all_reduce", "--torch", "smddp,gloo", "--nproc", 2, *sizes, "-J", "figures.json", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if not line.startswith("#")]
    assert [row[0] for row in rows] == ["0", "8", "512", "32768", "65536"]
    assert all(row[5] == row[8] == "0" and float(row[9]) > 0 for row in rows), done.stdout
    assert "# Out of bounds values : 0 OK" in done.stdout
    return folder


def test_backends_of_torch_leave_a_file_each(runs):
    for name in ("smddp", "gloo"):
        found = json.loads((runs / f"figures-{name}.json").read_text())
        assert (found["backend"], found["ranks"], len(found["results"])) == (name, 2, 5)


@pytest.mark.parametrize(
    ("collective", "op"),
    [("all_gather", "sum"), ("reduce_scatter", "prod"), ("all_to_all", "sum"), ("broadcast", "sum"), ("reduce", "max")],
)
def test_collectives_through_torch_are_checked(collective, op):
    """In ranks that a launcher started, such as torchrun; `runs` are of the program's own."""
    words = [collective, "--torch=smddp", "-b", "1K", "-e", "1K", "-n", "1", "-w", "1", "-d", "int32", "-o", op]
    code = f"import sys; from smddp.tools.cli import bench; sys.exit(bench({words}))"
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    own = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(3)]
    ended = forked.run_all([(code, {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", **meeting, **one}) for one in own])
    assert [done.returncode for done in ended] == [0, 0, 0], ended
    assert "# Out of bounds values : 0 OK" in ended[0].stdout


def test_two_runs_are_compared_with_a_verdict_for_each_row_and_drawn(runs):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'smddp[plot]'")
    files = ("figures-gloo.json", "figures-smddp.json")
    done = bench("compare", *files, "--plot", "both.png", cwd=runs)
    assert done.returncode in (0, 1), done.stderr
    assert "# B/A " in done.stdout and "# A: figures-gloo.json all_reduce" in done.stdout
    assert (runs / "both.png").read_bytes().startswith(PNG)
    slower = json.loads((runs / files[1]).read_text())
    for row in slower["results"]:
        row["out_of_place"]["time"] = row["in_place"]["time"] = 1e9
    (runs / "slower.json").write_text(json.dumps(slower))
    judged = bench("compare", files[0], "slower.json", cwd=runs)
    assert judged.returncode == 1 and judged.stdout.count("SLOWER") == 5
    same = bench("compare", files[0], files[0], cwd=runs)
    assert same.returncode == 0 and "5 the same" in same.stdout


def test_a_run_is_drawn_a_barrier_too(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'smddp[plot]'")
    done = bench("all_gather", "--nproc", 2, "-b", 8, "-e", "64K", "-f", 64, "-n", 2, f"--plot={tmp_path}/a.svg")
    assert done.returncode == 0, done.stderr
    drawn = (tmp_path / "a.svg").read_text()
    assert "<svg" in drawn and "all_gather, 2 ranks" in drawn
    assert bench("barrier", "--nproc", 2, "-n", 2, "--plot", tmp_path / "b.png").returncode == 0
    assert (tmp_path / "b.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize("collective", ["all_reduce", "latency", "iall_gather"])
def test_terminal_shows_transient_progress_by_row(collective):
    master, slave = pty.openpty()
    words = [BENCH, collective, "--nproc", "2", "-b", "8", "-e", "512", "-f", "8", "-n", "2", "-w", "1", "-N", "2"]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=slave, text=True, timeout=120)
    os.close(slave)
    shown_text = os.read(master, 1 << 16).decode()
    os.close(master)
    assert done.returncode == 0, shown_text
    shown = [f"row {row} of 6" for row in range(1, 7)]
    blank = f"\r{' ' * len(shown[0])}\r"
    assert shown_text == "".join(text + blank for text in shown)
    assert "row 1" not in done.stdout


def test_pipe_receives_only_the_table():
    done = bench("all_reduce", "--nproc", 2, "-b", 8, "-e", 8, "-n", 2)
    assert done.returncode == 0 and done.stderr == "" and "row 1" not in done.stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("barrier", "--plot"), "--plot takes a file name"),
        (("barrier", "--plot", "x.foo"), "give a name that ends in .avif"),
        (("barrier", "--plot", "no/such/x.png"), "the folder does not exist"),
        (("explain", "all_gather", "--draw", "x.png"), "expected a file name that ends in .svg"),
        (("simulate", "all_gather", "--plot", "x.png"), "expected a file name that ends in .svg"),
        (("all_reduce", "--torch", "smddp,smddp"), "each once"),
        (("all_reduce", "--torch", "smddp", "-b", "8T"), "invalid size '8T'"),
        (("all_reduce", "--torch", "smddp", "-o", "avg", "-d", "int32"), "avg of int32"),
        (("compare", __file__, __file__), "is not a -J file"),
    ],
)
def test_invalid_arguments_are_rejected_before_the_measurement(words, says, tmp_path):
    if "x.foo" in words or "no/such/x.png" in words:
        pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'smddp[plot]'")
    done = bench(*words, cwd=tmp_path)
    assert done.returncode == 2 and says in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("setting", "value", "reason"),
    [
        ("SMDDP_ALGO", "hier", "requested by SMDDP_ALGO"),
        ("SMDDP_ALGO", "tree", "SMDDP_ALGO requests hier-tree, which does not support this call; lowest cost by"),
        ("SMDDP_TUNE", "all_gather:1m-2m:@ring", "requested by a row of SMDDP_TUNE"),
        ("SMDDP_TUNE", "all_gather:1k-2k:@ring", "lowest cost by the planner's formula"),
    ],
)
def test_explain_reports_the_origin_of_the_algorithm(setting, value, reason):
    done = bench("explain", "all_gather", "--bytes", "1M", "--nodes", "4", **{setting: value})
    assert reason in done.stdout, done.stdout + done.stderr
