"""bench/curves.py, which draws the chart of docs/results/one-host.md, on invented figures."""

import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
# Last: bench/hosts.py must not be what others get who import tests/hosts.
sys.path.append(str(BENCH))

import curves

NO_MATPLOTLIB = "matplotlib is not installed: pip install 'smddp[plot]'"
TIMES = {"smddp": 10.0, "smddp-core": 1.0, "gloo": 100.0, "impi": 2.0, "base": 5.0, "smddp-sealed": 7.0, "limit": 0.5}


def row(library, size, time, op="all_gather", wrong=0):
    # The other figures of a row differ from the median, which alone is drawn.
    figures = {"time_us": time / 2, "median_us": time, "min_us": time / 4}
    return {"op": op, "size": size, "type": "f32", "library": library, "wrong": wrong, **figures}


def rows(op="all_gather", sizes=(8, 1024, 65536)):
    return [row(name, size, time * (1 + size / 1024), op) for name, time in TIMES.items() for size in sizes]


def write(folder, name, rows, ranks=2, hosts=0):
    (folder / name).write_text(json.dumps({"ranks": ranks, "hosts": hosts, "about": {}, "rows": rows}))


def drawn(*words):
    words = [sys.executable, BENCH / "curves.py", *words]
    return subprocess.run([*map(str, words)], capture_output=True, text=True, timeout=120)


@pytest.fixture
def measured(tmp_path):
    """2 ranks' all_reduce and all_gather, 4 ranks' all_gather; smddp's sizes are not in order."""
    folder = tmp_path / "measured"
    folder.mkdir()
    write(folder, "n2.json", rows("all_reduce") + rows("all_gather")[::-1])
    write(folder, "n4.json", rows("all_gather", sizes=(1024,)), ranks=4)
    return folder


def test_a_panel_has_a_line_of_medians_for_each_known_library_that_was_measured(measured):
    pytest.importorskip("matplotlib", reason=NO_MATPLOTLIB)
    figure = curves.figure(curves.load(measured))
    assert [panel.get_title() for panel in figure.axes] == [
        "all_gather, 2 ranks",
        "all_reduce, 2 ranks",
        "all_gather, 4 ranks",
    ]
    expected = ["smddp through torch", "smddp core", "gloo through torch", "Intel MPI", "limit"]
    for panel in figure.axes:
        assert (panel.get_xscale(), panel.get_yscale()) == ("log", "log")
        assert (panel.get_xlabel(), panel.get_ylabel()) == ("size of the whole buffer (bytes)", "median time (us)")
        assert [line.get_label() for line in panel.get_lines()] == expected
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == expected
    core, limit = (figure.axes[0].get_lines()[number] for number in (1, -1))
    assert core.get_xydata().tolist() == [[8, 1 + 8 / 1024], [1024, 2], [65536, 65]]
    assert (limit.get_color(), limit.get_linestyle()) == ("grey", "--")


def test_plotted_libraries_are_those_of_peers_py():
    known = json.loads((BENCH / "lab" / "peers" / "peers.json").read_text())
    assert set(curves.STYLES) <= {*known, "limit"}


def test_equal_figures_are_equal_pictures_with_text_as_text(measured, tmp_path):
    pytest.importorskip("matplotlib", reason=NO_MATPLOTLIB)
    for name in ("a.svg", "b.svg", "c.png"):
        done = drawn(measured, tmp_path / name)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG\r\n")
    text = {element.text for element in ElementTree.parse(tmp_path / "a.svg").iter() if element.text}
    assert {"all_gather, 4 ranks", "Intel MPI", "limit", "8", "1K", "64K"} <= text


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, "no *.json there; `make bench-peers`"),
        ({"a.json": "{"}, "a.json: Expecting"),
        ({"a.json": "[]"}, "a.json: not what peers.py writes (TypeError"),
        ({"a.json": {"results": []}}, "a.json: not what peers.py writes (KeyError: 'hosts')"),
        ({"a.json": [{"library": "gloo"}]}, "a.json: not what peers.py writes (KeyError: 'op')"),
        ({"a.json": [row("base", 8, 1.0)]}, "no row of a library that is drawn (smddp, "),
        ({"a.json": [row("gloo", 8, 0)]}, "a.json: gloo, all_gather of 8 bytes on 2 ranks: 0 us has no place"),
        ({"a.json": [row("gloo", 8, float("nan"))]}, "nan us has no place"),
        ({"a.json": [row("gloo", 8, 1.0, wrong=3)]}, "gloo, all_gather of 8 bytes on 2 ranks: 3 wrong elements"),
        ({"a.json": [row("gloo", 8, 1.5)], "b.json": [row("gloo", 8, 2.5)]}, "b.json: gloo, all_gather of 8 bytes"),
        ({"a.json": {"ranks": 4, "hosts": 2, "rows": []}}, "a.json: a run between 2 hosts"),
    ],
)
def test_invalid_input_is_reported_without_a_picture(files, says, tmp_path):
    for name, content in files.items():
        if isinstance(content, list):
            write(tmp_path, name, content)
        else:
            (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    picture = tmp_path / "picture.svg"
    done = drawn(tmp_path, picture)
    assert done.returncode == 2 and says in done.stderr, done.stderr
    assert re.fullmatch(r"curves\.py: .*\n", done.stderr) and not picture.exists()


@pytest.mark.parametrize(("name", "says"), [("x.foo", "give a name that ends in .svg"), ("no/x.svg", "No such file")])
def test_unwritable_picture_is_reported(name, says, measured, tmp_path):
    pytest.importorskip("matplotlib", reason=NO_MATPLOTLIB)
    done = drawn(measured, tmp_path / name)
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr, done.stderr
