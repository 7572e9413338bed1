"""The code of a job: copied into its folder, and the command that runs its entry point."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path

from smddp.estimator.job import Folder, is_job_folder

IGNORED = ("__pycache__", ".git")


def ignored(patterns: Iterable[str]) -> Callable[[str], bool]:
    """Returns a function that says whether a file's name matches one of the patterns."""
    return lambda name: any(fnmatchcase(name, pattern) for pattern in patterns)


def copy(
    source_dir: str | None,
    entry_point: str,
    dependencies: Sequence[str],
    folder: Folder,
    jobs: Path,
    patterns: Iterable[str] = IGNORED,
) -> None:
    """Copies the code into the job's folder. jobs: the folder of all jobs, which is not copied.

    patterns: names in source_dir that are not copied.

    Raises ValueError for a missing script, source_dir or dependency.
    """
    script = check(source_dir, entry_point)
    if source_dir is not None:
        _copy_tree(Path(source_dir), folder.code, jobs, patterns)
    else:
        shutil.copy(script, folder.code)
    for each in dependencies:
        if not Path(each).exists():
            raise ValueError(f"dependencies: there is nothing at {each!r}")
        # "." and "x/.." have names only once they are resolved.
        name = Path(each).resolve().name
        if not name:
            raise ValueError(f"dependencies: {each!r} is the root folder: give a folder or a file")
        if Path(each).is_dir():
            _copy_tree(Path(each), folder.code / name, jobs, ())
        else:
            shutil.copy(each, folder.code)
    if not is_python(entry_point):
        copied = folder.code / (entry_point if source_dir is not None else script.name)
        copied.chmod(copied.stat().st_mode | 0o755)


def check(source_dir: str | None, entry_point: str) -> Path:
    """Returns the path of the script. Raises ValueError for a missing script or source_dir."""
    script = Path(entry_point) if source_dir is None else Path(source_dir, entry_point)
    if source_dir is not None and not os.path.isdir(source_dir):
        raise ValueError(f"source_dir: folder {source_dir!r} does not exist")
    if not os.path.isfile(script):
        raise ValueError(f"entry_point: file {str(script)!r} does not exist")
    return script


def fits(source: Path, jobs: Path, most_bytes: int, most_files: int, patterns: Iterable[str] = IGNORED) -> bool:
    """Returns whether the files that `copy` takes from a folder are at most `most_bytes` and `most_files`."""
    left_out, size, count = _without_jobs(source, jobs, patterns), 0, 0
    for folder, folders, names in os.walk(source):
        without = left_out(folder, [*folders, *names])
        folders[:] = [name for name in folders if name not in without]
        kept = [Path(folder, name) for name in names if name not in without]
        count += len(kept) + len(folders)
        size += sum(path.stat().st_size for path in kept if path.is_file())
        if size > most_bytes or count > most_files:
            return False
    return True


def _copy_tree(source: Path, to: Path, jobs: Path, patterns: Iterable[str]) -> None:
    shutil.copytree(source, to, dirs_exist_ok=True, ignore=_without_jobs(source, jobs, patterns))


def _without_jobs(source: Path, jobs: Path, patterns: Iterable[str]) -> Callable[[str, list[str]], set[str]]:
    """Returns a filter for copytree: without the folders of jobs, links to a folder around the source, broken links.

    The first two would copy a folder into itself.
    """
    top, jobs, is_ignored = source.resolve(), jobs.resolve(), ignored(patterns)
    jobs_inside = top in jobs.parents

    def left_out(folder: str, entries: list[str]) -> set[str]:
        found = set()
        for entry in entries:
            path = Path(folder, entry)
            real = path.resolve()
            unusable = path.is_symlink() and (real == top or real in top.parents or not real.exists())
            of_jobs = is_job_folder(path) or (jobs_inside and (real == jobs or jobs in real.parents))
            if is_ignored(entry) or unusable or of_jobs:
                found.add(entry)
        return found

    return left_out


def is_python(entry_point: str) -> bool:
    """Returns whether Python runs the entry point; /bin/sh runs other files, as in SageMaker's training toolkit."""
    return entry_point.endswith(".py")


def command(folder: Folder, entry_point: str, arguments: Sequence[str], python: str, mpi4py: bool = False) -> list[str]:
    """Returns the command of a rank. entry_point: its path in the code folder, which is the working folder.

    mpi4py: run Python by `-m mpi4py`, which ends all ranks after an uncaught exception.
    """
    if not is_python(entry_point):
        return ["/bin/sh", "-c", shlex.join([f"./{entry_point}", *arguments])]
    runner = ["-m", "mpi4py"] if mpi4py and find_spec("mpi4py") else []
    return [python, *runner, str(folder.code / entry_point), *arguments]


def python_path(code: Path) -> str:
    """Returns PYTHONPATH with the code folder first."""
    before = os.environ.get("PYTHONPATH")
    return f"{code}:{before}" if before else str(code)
