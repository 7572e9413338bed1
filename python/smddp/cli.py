"""The console commands `smddp` and `smddp-bench`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any


def main(argv: Sequence[str] | None = None) -> int:
    """`smddp info` and `smddp bench`. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="smddp", description="Collective communication for training.")
    commands = parser.add_subparsers(dest="command", required=True)
    info = commands.add_parser("info", help="what was found here, the settings, and the path each collective takes")
    info.add_argument("--json", action="store_true", help="the same for programs")
    info.add_argument("-n", "--ranks", type=int, default=2, help="processes on this machine to show the paths for")
    commands.add_parser("bench", help="measure collectives on this machine or across machines", add_help=False)
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == ["bench"]:
        # The benchmark reads its own arguments.
        return bench(given[1:])
    arguments = parser.parse_args(given)
    if arguments.ranks < 1:
        parser.error(f"--ranks must be at least 1, got {arguments.ranks}")
    try:
        return _info(arguments.ranks, arguments.json)
    except BrokenPipeError:
        # Whoever reads has seen enough; nothing is left to be flushed into the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ImportError as error:
        print(f"smddp: {error}", file=sys.stderr)
        return 1


def _info(ranks: int, as_json: bool) -> int:
    from smddp._info import collect, local_paths
    from smddp._native import core

    found = collect(start_cuda=True)
    found["libfabric"] = core().fabric()
    status = 0
    try:
        found["paths"] = {name: {"4 KiB": small, "64 MiB": large} for name, small, large in local_paths(ranks)}
    except (RuntimeError, ValueError) as error:
        found["paths"] = {"error": str(error)}
        status = 1
    if as_json:
        print(json.dumps(found, indent=2, default=str))
        return status
    print(f"smddp {found['version']}   torch {found['torch'] or 'not installed'}")
    print("\nmachine")
    for key, value in found["machine"].items():
        print(f"  {key:<20} {value}")
    print("\nCUDA")
    for line in _cuda(found["cuda"]):
        print(f"  {line}")
    print("\nlibfabric")
    for line in found["libfabric"]:
        print(f"  {line}")
    print(f"\npaths of {ranks} processes on this machine")
    for name, path in found["paths"].items():
        if isinstance(path, str):
            print(f"  {path}")
        else:
            print(f"  {name:<16} " + "   ".join(f"{size}: {way}" for size, way in path.items()))
    print("\nsettings (value, where it comes from)")
    for name, row in found["settings"].items():
        print(f"  {name:<28} {row['value']:<16} {row['from']:<12} {row['what']}")
    return status


def _cuda(found: dict[str, Any]) -> list[str]:
    if not found["found"]:
        return [f"CUDA tensors are not served: {found['why']}"]
    paths = [f"{where:<20} {path}" for where, path in found["paths"].items()]
    return [f"{'driver':<20} {found['driver']}", *found["devices"], *paths]


def bench(argv: Sequence[str] | None = None) -> int:
    """`smddp-bench`, the benchmark program of the native core. Returns the exit status."""
    import signal

    from smddp._native import core

    try:
        native = core()
    except ImportError as error:
        print(f"smddp-bench: {error}", file=sys.stderr)
        return 1
    given = list(sys.argv[1:] if argv is None else argv)
    # It runs without Python's help, and so does its end by Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # The subcommands that draw write their own files.
    if "--plot" not in given or given[0] in ("simulate", "explain", "tune"):
        return native.bench_main(given)
    at = given.index("--plot")
    if at + 1 == len(given):
        print("smddp-bench: --plot takes a file name (.svg or .png)", file=sys.stderr)
        return 2
    from smddp._plot import plotted

    return plotted(native.bench_main, given[:at] + given[at + 2 :], given[at + 1])


if __name__ == "__main__":
    sys.exit(main())
