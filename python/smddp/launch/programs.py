"""`smddprun`, `smddpsinglenode`, `smddp_singlenode_dev`, `smddpmprun`: what toolkits put before a rank's command.

mpirun -np 16 --host a:8,b:8 smddprun python -m mpi4py script.py
srun -n 16 smddprun python script.py
smddprun --nproc 4 python script.py                        # no launcher: four ranks on this machine
smddprun --nproc 4 --tag-output python script.py           # each line of their output begins with [RANK]
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from smddp.launch import environment

#: Maximum number of ranks of one host, as in smddp-bench.
MAX_RANKS = 4096
_OPTIONS = "[--nproc N] [--tag-output] [-x NAME[=VALUE]]"


class _Asked:
    """Parsed command line: options of the program, then the rank's command."""

    def __init__(self) -> None:
        self.size: int | None = None
        self.tags_output = False
        self.variables: dict[str, str] = {}
        self.command: list[str] = []


def smddprun() -> int:
    """Under a launcher: executes the command as the launcher's rank. Otherwise starts local ranks."""
    return _main("smddprun", sys.argv[1:])


def smddpmprun() -> int:
    """The same for modelparallel jobs; the instance type has no effect here."""
    return _main("smddpmprun", sys.argv[1:], valued=("-i", "--instance-type"), flags=("--allow-bypass",))


def smddpsinglenode() -> int:
    """Starts local ranks under any launcher."""
    return _main("smddpsinglenode", sys.argv[1:], alone=True)


def smddp_singlenode_dev() -> int:
    return _main("smddp_singlenode_dev", sys.argv[1:], alone=True)


def _main(
    program: str, argv: Sequence[str], valued: Sequence[str] = (), flags: Sequence[str] = (), alone: bool = False
) -> int:
    try:
        asked = _parse(program, argv, valued, flags)
        os.environ.update(asked.variables)
        if not alone and asked.size is None and environment.complete():
            if asked.tags_output:
                raise ValueError(
                    "--tag-output is for local ranks; here a launcher reads their output: use its own option "
                    "(mpirun --tag-output, srun --label, torchrun --tee 3)"
                )
            return _become(program, asked.command)
        from smddp.launch import local  # imported lazily: ranks of a launcher do not need it

        size = asked.size or local.count_devices()
        if size == 0:
            raise ValueError(
                "no launcher started this process and no CUDA device is found: say how many ranks with --nproc N, or "
                "start it by mpirun, srun or torchrun"
            )
    except ValueError as error:
        sys.stderr.write(f"{program}: {error}\n")
        return 2
    return local.run(asked.command, size, program, asked.tags_output)


def _parse(program: str, argv: Sequence[str], valued: Sequence[str], flags: Sequence[str]) -> _Asked:
    """Parses a command line. Raises ValueError if it is invalid."""
    asked, rest = _Asked(), list(argv)
    while rest and rest[0].startswith("-"):
        name, _, given = rest.pop(0).partition("=")
        if name == "--":
            break
        if name in flags:
            continue
        if name in ("-h", "--help"):
            print(f"usage: {program} {_OPTIONS} COMMAND ...\n\n{__doc__}")
            raise SystemExit(0)
        if name in ("-V", "--version"):
            from importlib.metadata import version  # imported lazily: slow

            print(f"{program} {version('smddp')}")
            raise SystemExit(0)
        if name == "--tag-output":
            if given:
                raise ValueError("--tag-output has no value")
            asked.tags_output = True
            continue
        if name not in ("-x", "-n", "-np", "--nproc", "--nproc-per-node", *valued):
            raise ValueError(f"unknown option {name}; usage: {program} {_OPTIONS} COMMAND ...")
        if not given:
            if not rest:
                raise ValueError(f"{name} needs a value")
            given = rest.pop(0)
        if name == "-x":
            variable, assigned, value = given.partition("=")
            # Without a value: the ranks inherit the caller's value anyway.
            if assigned:
                from smddp.validation import variable_name  # imported lazily: rarely needed

                asked.variables[variable_name(variable, "-x")] = value
        elif name not in valued:
            if not given.isdecimal() or len(given) > 9 or not 1 <= int(given) <= MAX_RANKS:
                raise ValueError(f"{name} must be a number of ranks from 1 to {MAX_RANKS}, not {given!r}")
            asked.size = int(given)
    if not rest:
        raise ValueError(f"a command is missing; usage: {program} {_OPTIONS} COMMAND ...")
    asked.command = rest
    return asked


def _become(program: str, command: list[str]) -> int:
    """Replaces this process by the command, which keeps its exit status and signals."""
    if asked := sys.modules.get("smddp.launch.process_manager"):
        asked.leave()
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"{program}: cannot start {command[0]!r}: {error.strerror}\n")
        return 127 if isinstance(error, FileNotFoundError) else 126
