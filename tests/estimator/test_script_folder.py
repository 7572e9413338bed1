"""The default folder of `smddp launch`: the files that the ranks receive, and the limit of its size."""

import os
import socket
from pathlib import Path

import pytest
from smddp.estimator import shell, source
from smddp.estimator.job import Folder

ENGINES = ([], ["--engine", "slurm"], ["--engine", "kubernetes", "--image", "registry.example/train:1"])


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch) -> Path:
    """The folder of the script, beside other folders."""
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "train.py").write_text("print('ran')\n")
    return folder


def write(path: Path, size: int = 1) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(size)


def copied(place: Path, patterns=source.IGNORED) -> set[str]:
    folder = Folder(place.parent / "jobs" / "j")
    folder.make()
    source.copy(str(place), "train.py", (), folder, place.parent / "jobs", patterns)
    return {str(path.relative_to(folder.code)) for path in folder.code.rglob("*") if path.is_file()}


@pytest.mark.parametrize("engine", ENGINES, ids=["ssh", "slurm", "kubernetes"])
@pytest.mark.parametrize("linked", [False, True], ids=["inside", "linked"])
def test_large_folder_is_one_error_with_the_remedy(place, capsys, engine, linked):
    write(place.parent / "images" / "large", 65 << 20)
    if linked:
        (place / "data").symlink_to(place.parent / "images")
    else:
        (place.parent / "images").rename(place / "data")
    words = ["train.py", "-n", "1", "--dry-run", *engine]
    assert shell.main(words) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "more than 64 MiB or 5000 files" in error, error
    assert "--script-only" in error and "--source-dir" in error
    assert not Path("smddp-jobs").exists()
    if not engine:
        assert shell.main([*words, "--script-only"]) == 0
        assert shell.main([*words, "--source-dir", "."]) == 0


def test_count_of_files_is_limited_before_their_status_is_read(place, monkeypatch):
    for number in range(30):
        write(place / "data" / str(number))
    read = []
    monkeypatch.setattr(source, "is_job_folder", lambda path: read.append(path) and False)
    assert source.oversize(place, place / "jobs", 1 << 20, 20) and len(read) < 20
    assert not source.oversize(place, place / "jobs", 1 << 20, 40)


def test_hidden_files_and_environments_are_sent_only_with_source_dir(place):
    left_out = (
        ".env",
        ".git/config",
        ".venv/x.py",
        "venv/x.py",
        "node_modules/x.js",
        "lib/.netrc",
        "lib/__pycache__/x",
    )
    for name in (*left_out, "lib/help.py", "data.json"):
        write(place / name)
    # None of them counts.
    write(place / "venv" / "large", 65 << 20)
    assert shell.main(["train.py", "-n", "1", "--distribution", "{}", "--job-name", "j"]) == 0
    code = place / "smddp-jobs" / "j" / "code"
    sent = {str(path.relative_to(code)) for path in code.rglob("*") if path.is_file()}
    assert sent == {"train.py", "lib/help.py", "data.json"}
    assert {".env", "venv/x.py", "node_modules/x.js", "lib/.netrc"} <= copied(place)


def test_script_whose_name_is_left_out_is_sent(place):
    (place / ".train.py").write_text("")
    folder = Folder(place.parent / "jobs" / "j")
    folder.make()
    source.copy(".", ".train.py", (), folder, place.parent / "jobs", source.IGNORED_BY_DEFAULT)
    assert (folder.code / ".train.py").exists()


def test_sockets_fifos_and_links_in_circles_neither_fail_nor_repeat(place):
    os.mkfifo(place / "fifo")
    (place / "broken").symlink_to("nothing")
    outside = place.parent / "outside"
    write(outside / "one" / "a.txt")
    write(outside / "two" / "b.txt")
    (outside / "one" / "to-two").symlink_to(outside / "two")
    (outside / "two" / "to-one").symlink_to(outside / "one")
    (place / "lib").mkdir()
    (place / "lib" / "self").symlink_to(".")
    (place / "data").symlink_to(outside / "one")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        assert copied(place) == {"train.py", "data/a.txt", "data/to-two/b.txt"}
        assert not source.oversize(place, place / "jobs", 1 << 20, 10)


def test_file_that_cannot_be_read_is_one_error_with_the_remedy(place, capsys, monkeypatch):
    write(place / "secret")
    may = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "secret" and may(path, mode))
    assert shell.main(["train.py", "-n", "1", "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert "secret: Permission denied" in error and "--script-only" in error and error.count("\n") == 1, error
