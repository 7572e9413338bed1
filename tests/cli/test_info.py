"""Tests of `smddp info`, with and without problems."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from ranks import forked
from smddp.observability import info as _info
from smddp.text import format_size, named_ranks
from smddp.tools import environment as _surroundings
from smddp.tools import info_text


def smddp(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "smddp", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )


def test_version_is_printed_without_a_command():
    answer = smddp("--version")
    assert (answer.returncode, answer.stderr) == (0, "")
    assert answer.stdout.startswith("smddp 0.") and "torch 2." in answer.stdout


def test_a_missing_command_is_a_usage_error():
    answer = smddp()
    assert answer.returncode == 2 and "info, doctor, status, trace, launch, bench, completion or man" in answer.stderr


def test_all_sections_are_there_and_no_line_is_wider_than_the_terminal():
    answer = smddp("info", COLUMNS="100")
    assert answer.returncode == 0, answer.stderr
    for words in (
        "machine",
        "glibc",
        "NUMA",
        "memory that can be locked",
        'has backend="smddp"',
        "all_gather",
        "SMDDP_ALGO",
        "Deprecated settings",
    ):
        assert words in answer.stdout
    assert [line for line in answer.stdout.splitlines() if len(line) > 100] == []


def test_invalid_setting_is_reported_with_the_remaining_facts():
    wrong = {"SMDDP_ALGO": "foo", "SMDDP_STAGING_BYTES": "1", "SMDDP_DEBUG": "debug"}
    info = "import sys; from smddp.tools.cli import main; sys.exit(main(['info', {}]))"
    programs = [(info.format("'--json'"), {setting: value}) for setting, value in wrong.items()]
    *answers, text = forked.run_all([*programs, (info.format(""), {"SMDDP_ALGO": "foo"})])
    for (setting, value), answer in zip(wrong.items(), answers):
        assert answer.returncode == 1 and answer.stderr == "", answer.stderr
        found = json.loads(answer.stdout)
        assert [setting in problem and value.upper() in problem.upper() for problem in found["problems"]] == [True]
        assert found["settings"][setting]["value"] == value
        assert "backend" in found["surroundings"]["torch"]
    assert "Problems" in text.stdout


def test_deprecated_setting_sets_its_replacement_and_warns_once():
    answer = smddp("info", "--json", SMDDP_SHM="0", SMDDP_NODE="")
    found = json.loads(answer.stdout)
    assert (answer.returncode, found["problems"], found["unknown settings"]) == (0, [], {})
    assert answer.stderr.count("SMDDP WARN SMDDP_SHM=0 is deprecated: set SMDDP_NODE=%r instead") == 1
    assert (found["settings"]["SMDDP_NODE"]["value"], found["settings"]["SMDDP_NODE"]["from"]) == ("%r", "environment")
    row = {"replacement": "SMDDP_NODE", "equivalents": "0: %r", "value": "0"}
    assert found["deprecated settings"]["SMDDP_SHM"] == row
    text = smddp("info", SMDDP_SHM="0", SMDDP_NODE="", COLUMNS="100").stdout
    assert "0 (environment): use SMDDP_NODE (0: %r)" in text and "unknown setting" not in text


def test_disabled_backend_discovery_is_reported():
    found = json.loads(smddp("info", "--json", TORCH_DEVICE_BACKEND_AUTOLOAD="0").stdout)
    answer = found["surroundings"]["torch"]
    # From 2.14 on torch finds the name when it is first used, whatever the variable says.
    assert "AUTOLOAD=0" in answer or 'has backend="smddp"' in answer


def test_conflicting_package_is_reported(tmp_path, monkeypatch):
    about = tmp_path / "smdistributed_dataparallel-2.1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: smdistributed-dataparallel\nVersion: 2.1\n")
    (about / "RECORD").write_text("smdistributed/dataparallel/torch/__init__.py,,\n")
    assert _surroundings.historic() == "not installed"
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "smdistributed-dataparallel 2.1" in _surroundings.historic()
    assert "pip uninstall smdistributed-dataparallel" in _surroundings.historic()


def cuda_of(monkeypatch: pytest.MonkeyPatch, **found) -> str:
    monkeypatch.setattr(_info, "core", lambda: SimpleNamespace(cuda=lambda start: found))
    return "\n".join(f"{name} {text}" for name, text in info_text.cuda(_info.cuda()))


def test_missing_driver_is_reported_with_its_reason(monkeypatch):
    text = cuda_of(monkeypatch, found=False, why="libcuda.so.1 was not found", driver="", devices=[])
    assert text == " CUDA tensors are not supported: libcuda.so.1 was not found"


def test_driver_devices_and_paths_are_reported(monkeypatch):
    text = cuda_of(monkeypatch, found=True, why="", driver="580.95, CUDA 13.0", devices=["0: NVIDIA H200"])
    for words in ("580.95, CUDA 13.0", "0: NVIDIA H200", "copy engines", "pinned host memory"):
        assert words in text


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 B"), (1023, "1023 B"), (1288490189, "1.2 GiB"), (3 << 42, "12 TiB")]
)
def test_sizes_have_units(number, text):
    assert format_size(number) == text


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([5], "rank 5"),
        ([1, 0], "ranks 0, 1"),
        ({4, 0, 1, 2}, "ranks 0-2, 4"),
        (range(0, 4096, 2), "ranks 0, 2, 4,"),
        (range(0, 4096, 2), " more"),
    ],
)
def test_ranks_are_named_in_ranges_and_long_lists_are_cut(ranks, text):
    named = named_ranks(ranks)
    assert named.startswith(text) or named.endswith(text)
    assert len(named) < 500
