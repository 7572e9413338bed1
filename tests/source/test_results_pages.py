"""docs/results/ and the README's table equal what scripts/results_pages.py writes from bench/results/."""

import contextlib
import importlib.util
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "results_pages.py"
SHOWN = "all_reduce | 64 MiB | 7,255 |"


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("results_pages", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["results_pages"] = module  # for its dataclasses
    spec.loader.exec_module(module)
    return module


def results_pages(root: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Runs the script's main function in this process, without the start of an interpreter for each case."""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        status = _script().main(["--root", str(root), *options])
    return subprocess.CompletedProcess([], status, out.getvalue(), errors.getvalue())


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The inputs and the pages, where a test may change them."""
    for folder in ("bench/results", "docs/results"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    shutil.copy(ROOT / "README.md", tmp_path)
    return tmp_path


def edit(root: Path, change, name: str = "one-host") -> None:
    path = root / "bench" / "results" / f"{name}.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def run_of(data: dict, name: str) -> dict:
    return next(run for run in data["runs"] if run["id"] == name)


def test_committed_pages_are_those_of_the_results():
    done = subprocess.run([sys.executable, SCRIPT, "--check"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), done.stderr


def test_changed_figure_is_found_by_check_and_reaches_page_chart_and_readme(copy: Path):
    def faster(data: dict) -> None:
        run = run_of(data, "epyc")
        column = run["columns"].index("smddp us")
        row = next(row for row in run["rows"] if row[0] == 2 and row[1] == "all_reduce" and row[2] == "64 MiB")
        row[column] = 4321

    assert SHOWN in (copy / "docs/results/one-host.md").read_text()
    edit(copy, faster)
    done = results_pages(copy, "--check")
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        f"{name} differs from bench/results/: run `make docs`"
        for name in ("docs/results/index.md", "docs/results/one-host.md", "README.md")
    ]
    assert SHOWN in (copy / "docs/results/one-host.md").read_text(), "--check writes nothing"
    assert results_pages(copy).returncode == 0
    for name in ("docs/results/index.md", "docs/results/one-host.md", "README.md"):
        assert "4,321" in (copy / name).read_text(), name
    assert results_pages(copy, "--check").returncode == 0


def test_slower_rows_cannot_be_left_out(copy: Path):
    def slower(data: dict) -> None:
        run = run_of(data, "hosts")
        run["rows"][0][run["columns"].index("÷ best other")] = 1.5

    edit(copy, slower, "multi-host")
    assert results_pages(copy).returncode == 0
    page = (copy / "docs/results/multi-host.md").read_text()
    assert "| 1.5 |" in page.partition("## Where smddp is slower")[2]


def test_page_without_results_is_reported_and_removed(copy: Path):
    extra = copy / "docs/results/old.md"
    extra.write_text("# Old\n")
    assert "docs/results/old.md differs" in results_pages(copy, "--check").stderr
    assert results_pages(copy).returncode == 0 and not extra.exists()


def test_charts_are_svg_with_every_figure(copy: Path):
    data = json.loads((copy / "bench/results/training.json").read_text())
    text = {element.text for element in ElementTree.parse(copy / "docs/results/training.svg").iter()}
    assert {f"{row[1]:,}" for row in run_of(data, "hosts")["rows"]} <= text


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda data: data.pop("answer"), "one-host.json: missing 'answer'"),
        (lambda data: data.update(page="other"), "one-host.json: page is 'other', expected 'one-host'"),
        (lambda data: run_of(data, "epyc").pop("commit"), "one-host.json: missing 'runs: commit'"),
        (lambda data: data["runs"][0]["rows"].append([1]), "run 'epyc' has 15 columns, and a row [1]"),
        (lambda data: data["runs"].append(data["runs"][0]), "one-host.json: two runs 'epyc'"),
        (lambda data: data["tables"][0].pop("heading"), "one-host.json: missing 'heading'"),
        (lambda data: data["tables"][0].update(run="none"), "one-host.json: no run 'none'"),
        (lambda data: data["tables"][0].pop("where"), "has 32 rows and 6 columns, the maximum is 12 and 6"),
        (lambda data: data["tables"][0]["columns"].append("price"), "run 'epyc' has no column 'price'"),
        (lambda data: data.update(answer="{epyc|smddp us|ranks=3}"), "0 rows for {epyc|smddp us|ranks=3}, expected 1"),
        (lambda data: data.update(answer="{epyc}"), "one-host.json: not a figure: '{epyc}'"),
        (lambda data: data.update(runs=5), "one-host.json: 'runs' is 5, expected a list"),
        (lambda data: data["runs"].append(7), "one-host.json: runs: expected an object, got 7"),
        (lambda data: run_of(data, "epyc").update(columns=None), "'runs: columns' is None, expected a list"),
        (lambda data: run_of(data, "epyc")["rows"].append(3), "run 'epyc' has 15 columns, and a row 3"),
        (lambda data: data["tables"][0].update(columns=None), "one-host.json: a value has the wrong form"),
        (lambda data: data["tables"].append("x"), "one-host.json: a value has the wrong form"),
        (lambda data: data["slower"][0].update(above="x"), "one-host.json: a value has the wrong form"),
        (lambda data: data["repeat"].pop("command"), "one-host.json: missing 'command'"),
        (lambda data: data["limits"].append(None), "one-host.json: a value has the wrong form"),
    ],
)
def test_invalid_results_are_one_line(change, says: str, copy: Path):
    edit(copy, change)
    done = results_pages(copy, "--check")
    assert done.returncode == 2 and says in done.stderr, done.stderr
    assert done.stderr.startswith("results_pages.py: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda data: data.pop("pages"), "index.json: missing 'pages'"),
        (lambda data: data.update(pages=[1, "gpu"]), "index.json: pages are [1, 'gpu']"),
        (lambda data: data.update(summary=[]), "index.json: 'summary' is [], expected an object"),
        (lambda data: data["summary"].pop("rows"), "index.json: missing 'rows'"),
        (lambda data: data["summary"].update(columns=None), "index.json: a value has the wrong form"),
        (lambda data: data["summary"]["rows"].append([None]), "index.json: a value has the wrong form"),
    ],
)
def test_invalid_index_is_one_line(change, says: str, copy: Path):
    edit(copy, change, "index")
    done = results_pages(copy, "--check")
    assert done.returncode == 2 and says in done.stderr, done.stderr
    assert done.stderr.startswith("results_pages.py: ") and done.stderr.count("\n") == 1


def test_missing_readme_is_one_line(copy: Path):
    (copy / "README.md").unlink()
    done = results_pages(copy)
    assert done.returncode == 2 and "README.md" in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_file_that_is_not_json_is_one_line(copy: Path):
    (copy / "bench/results/gpu.json").write_text("{")
    done = results_pages(copy)
    assert done.returncode == 2 and done.stderr.startswith("results_pages.py: gpu.json: Expecting"), done.stderr
    assert done.stderr.count("\n") == 1
