"""The console commands `smddp` and `smddp-bench`."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
from collections.abc import Sequence

from smddp import command_line


def parser() -> command_line.Parser:
    """Returns the parser of `smddp`."""
    smddp = command_line.Parser(prog="smddp", description="Collective communication for training.")
    smddp.add_argument("--version", action="store_true", help="print the versions of smddp and torch")
    commands = smddp.add_subparsers(dest="command")
    info = commands.add_parser("info", help="show this machine, the settings, and the path of each collective")
    info.add_argument("--json", action="store_true", help="print JSON")
    info.add_argument("-n", "--ranks", type=int, default=2, help="processes on this machine to show the paths for")
    doctor = commands.add_parser("doctor", help="check this machine, or a job under torchrun, and measure its links")
    from smddp.tools.doctor import command

    command.arguments(doctor)
    status = commands.add_parser(
        "status",
        help="show which rank a job waits for, and the current operation of each rank",
        description="Show which rank each job of this user waits for, and the current operation of each rank on all of "
        "its hosts. Run it on any host that has a rank of the job.",
        epilog="Exit status: 0: no call waits long; 1: a process does not answer; 2: invalid arguments; 3: a call has "
        "waited for the threshold or longer.",
    )
    status.add_argument("pid", nargs="*", type=int, help="only these processes of this host")
    status.add_argument("--all", action="store_true", help="every process of this user (as without PID)")
    status.add_argument("--host-only", action="store_true", help="only processes of this host")
    status.add_argument(
        "--threshold",
        type=command_line.seconds,
        default=5.0,
        metavar="SECONDS",
        help="time after which a pending call counts as waiting (default 5)",
    )
    status.add_argument("--json", action="store_true", help="print JSON")
    status.add_argument(
        "--watch", nargs="?", type=command_line.seconds, const=2.0, metavar="SECONDS", help="again every 2 seconds"
    )
    status.add_argument(
        "--dump",
        type=command_line.path,
        metavar="DIR",
        help="write the recorders' contents there, one file per process of this host",
    )
    trace = commands.add_parser("trace", help="merge the ranks' dumps into one trace for Perfetto or chrome://tracing")
    trace.add_argument(
        "dumps", nargs="+", metavar="DUMP", help="files of smddp.dump(), or folders of --dump or SMDDP_DUMP_DIR"
    )
    trace.add_argument(
        "-o", "--output", type=command_line.path, default="trace.json", help="output file; FILE.svg: a drawing"
    )
    text = "run a script on ranks here or on several hosts, as an estimator does"
    commands.add_parser("launch", help=text, add_help=False)
    commands.add_parser("bench", help="measure collectives on this machine or across machines", add_help=False)
    completion = commands.add_parser("completion", help="print a shell completion script for smddp and smddprun")
    completion.add_argument("shell", choices=("bash", "zsh", "fish"))
    man = commands.add_parser("man", help="print a manual page, or write all of them")
    man.add_argument("page", nargs="?", default="smddp", help="a command of smddp, such as doctor, or smddprun")
    man.add_argument("--to", type=command_line.path, metavar="DIR", help="write all pages to this folder")
    return smddp


def main(argv: Sequence[str] | None = None) -> int:
    """`smddp info`, `doctor`, `status`, `trace`, `launch`, `bench`, `completion` and `man`. Returns the exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    # These two commands parse their own arguments.
    if given[:1] == ["bench"]:
        return bench(given[1:])
    if given[:1] == ["launch"]:
        from smddp.estimator import shell

        return shell.main(given[1:])
    smddp = parser()
    arguments, unknown = smddp.parse_known_args(given)
    if unknown:
        program = f"smddp {arguments.command}" if arguments.command else "smddp"
        command_line.Parser(prog=program).error(f"unrecognized arguments: {' '.join(unknown)}")
    if arguments.version:
        return _version()
    if arguments.command is None:
        smddp.error("a command is missing: info, doctor, status, trace, launch, bench, completion or man")
    ranks = getattr(arguments, "ranks", None)
    if ranks is not None and ranks < 1:
        smddp.error(f"--ranks must be at least 1, got {ranks}")
    if arguments.command == "info":
        from smddp.observability.info import MOST_RANKS

        if arguments.ranks > MOST_RANKS:
            smddp.error(f"--ranks must be at most {MOST_RANKS}, got {arguments.ranks}")
    try:
        if arguments.command in ("completion", "man"):
            return _pages(smddp, arguments)
        if arguments.command == "doctor":
            from smddp.tools.doctor import command

            return command.run(arguments, _columns())
        if arguments.command == "status":
            from smddp.observability import status as _status

            options = _status.Options(
                pids=arguments.pid,
                as_json=arguments.json,
                watch=arguments.watch,
                folder=arguments.dump,
                host_only=arguments.host_only,
                threshold=arguments.threshold,
                columns=_columns(),
            )
            return _status.main(options)
        if arguments.command == "trace":
            from smddp.observability import trace as _trace

            return _trace.main(arguments.dumps, arguments.output)
        return _info(arguments.ranks, arguments.json)
    except BrokenPipeError:
        # The reader closed the pipe. Discards buffered output, which cannot be flushed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ImportError as error:
        print(f"smddp: {error}", file=sys.stderr)
        return 1


def _pages(smddp: command_line.Parser, arguments: argparse.Namespace) -> int:
    from smddp.tools import pages

    if arguments.command == "completion":
        print(pages.completion(smddp, arguments.shell), end="")
        return 0
    known = pages.parsers(smddp)
    name = next((name for name in (arguments.page, f"smddp-{arguments.page}") if name in known), None)
    if name is None:
        command_line.Parser(prog="smddp man").error(f"no page {arguments.page!r}: expected one of {', '.join(known)}")
    return pages.manual(smddp, name, arguments.to)


def _version() -> int:
    from importlib.metadata import PackageNotFoundError, version

    print(f"smddp {version('smddp')}")
    with contextlib.suppress(PackageNotFoundError):
        print(f"torch {version('torch')}")
    return 0


def _info(ranks: int, as_json: bool) -> int:
    """Prints `smddp info`, including errors. Returns 1 if there are problems."""
    from smddp._native import core
    from smddp.observability.info import collect, local_paths
    from smddp.tools import environment

    found = collect(start_cuda=True)
    found["surroundings"] = environment.collect()
    found["libfabric"], found["paths"] = [], {}
    if not found["problems"]:
        found["libfabric"] = core().fabric()
        try:
            found["paths"] = {name: {"4 KiB": small, "64 MiB": large} for name, small, large in local_paths(ranks)}
        except (RuntimeError, ValueError) as error:
            found["problems"].append(f"{ranks} local processes cannot form a group: {error}")
    if as_json:
        print(json.dumps(found, indent=2, default=str))
    else:
        from smddp.tools.info_text import lines

        print("\n".join(lines(found, ranks, _columns())))
    return 1 if found["problems"] else 0


def _columns() -> int:
    """Returns the terminal's width; lines for a file or a pipe are not wrapped."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() or "COLUMNS" in os.environ else 10_000


def bench(argv: Sequence[str] | None = None) -> int:
    """`smddp-bench`, the benchmark program of the native core. Returns the exit status."""
    import signal

    from smddp._native import core
    from smddp.launch.environment import launched

    try:
        native = core()
    except ImportError as error:
        print(f"smddp-bench: {error}", file=sys.stderr)
        return 1
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        command_line.check_utf8(given)
        native.info()
    except ValueError as error:
        # Prints the error once, not on every rank.
        print(f"smddp-bench: {error}", file=sys.stderr)
        return 2
    # The core runs without the interpreter, so Ctrl-C must end it directly.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # These subcommands write their own files.
    if given[:1] in (["simulate"], ["explain"], ["tune"]):
        return native.bench_main(given)
    if not any(word.startswith("--nproc") for word in given):
        try:
            launched()
        except ValueError as error:
            # The core reports missing variables if it needs them; a replay starts its own ranks. Only a failed query of
            # a process manager is reported here.
            if error.__cause__ is not None:
                print(f"smddp-bench: {error}", file=sys.stderr)
                return 2
    backends, rest = _option(given, "--torch")
    if backends is not None:
        try:
            from smddp.tools import bench_torch
        except ImportError as error:
            print(f"smddp-bench: --torch needs torch: {error}", file=sys.stderr)
            return 1
        return bench_torch.main(rest, backends)
    target, rest = _option(given, "--plot")
    if target is None:
        return native.bench_main(given)
    if not target:
        print("smddp-bench: --plot takes a file name (.svg or .png)", file=sys.stderr)
        return 2
    from smddp.tools.plot import plotted

    return plotted(native.bench_main, rest, target)


def _option(given: list[str], option: str) -> tuple[str | None, list[str]]:
    """Returns an option's value, or None, and the other arguments."""
    for at, word in enumerate(given):
        if word == option:
            return "".join(given[at + 1 : at + 2]), given[:at] + given[at + 2 :]
        if word.startswith(f"{option}="):
            return word.partition("=")[2], given[:at] + given[at + 1 :]
    return None, given


if __name__ == "__main__":
    sys.exit(main())
