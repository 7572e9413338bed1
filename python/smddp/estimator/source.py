"""The code of a job: copied into its folder, and the command that runs its entry point."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path

from smddp.estimator.job import Folder, is_job_folder

IGNORED: tuple[str, ...] = ("__pycache__", ".git")
#: Names in the folder of a script that are not copied unless the caller names that folder: hidden files may be secrets.
IGNORED_BY_DEFAULT: tuple[str, ...] = (".*", "__pycache__", "node_modules", "venv")


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
        copied = folder.code / entry_point
        if not copied.exists():  # a pattern matches its name
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(script, copied)
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


def oversize(source: Path, jobs: Path, most_bytes: int, most_files: int, patterns: Iterable[str] = IGNORED) -> bool:
    """Returns whether the files that `copy` takes from a folder are more than `most_bytes` or `most_files`.

    Raises OSError for a file or folder that cannot be read.
    """
    left_out, is_ignored, size, count = _left_out(source, jobs, patterns), ignored(patterns), 0, 0
    for folder, folders, names in os.walk(source, followlinks=True, onerror=_fail):
        entries = [name for name in [*folders, *names] if not is_ignored(name)]
        if len(entries) > most_files:  # before it reads the status of each entry
            return True
        without = left_out(folder, entries)
        folders[:] = [name for name in folders if name in entries and name not in without]
        kept = [Path(folder, name) for name in names if name in entries and name not in without]
        for path in kept:
            if not os.access(path, os.R_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            size += path.stat().st_size
        count += len(kept) + len(folders)
        if size > most_bytes or count > most_files:
            return True
    return False


def _fail(error: OSError) -> None:
    raise error


def _copy_tree(source: Path, to: Path, jobs: Path, patterns: Iterable[str]) -> None:
    shutil.copytree(source, to, dirs_exist_ok=True, ignore=_left_out(source, jobs, patterns))


def _left_out(source: Path, jobs: Path, patterns: Iterable[str]) -> Callable[[str, list[str]], set[str]]:
    """Returns a filter for copytree, which follows links to folders.

    It omits the folders of jobs, links to a folder around the source, folders inside themselves by a link, broken links
    and files that are not regular (sockets, FIFOs, devices). The first three would copy a folder into itself.
    """
    top, jobs, is_ignored = source.resolve(), jobs.resolve(), ignored(patterns)
    jobs_inside = top in jobs.parents

    def left_out(folder: str, entries: list[str]) -> set[str]:
        here = Path(folder)
        inside = len(here.relative_to(source).parts)
        chain = {each.resolve() for each in [here, *here.parents][: inside + 1]}
        real_folder, found = here.resolve(), set()
        for entry in entries:
            path = here / entry
            real = path.resolve() if path.is_symlink() else real_folder / entry
            recursive = real in chain or (path.is_symlink() and real in top.parents)
            of_jobs = is_job_folder(path) or (jobs_inside and (real == jobs or jobs in real.parents))
            if is_ignored(entry) or recursive or of_jobs or not (path.is_file() or path.is_dir()):
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
