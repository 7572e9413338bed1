"""`smddp launch`: an estimator's job from a shell."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from smddp import command_line, files
from smddp.estimator import inputs, source
from smddp.estimator.classes import PyTorch
from smddp.estimator.commands import MASTER_PORT
from smddp.estimator.engines import ENGINES, NO_IMAGE
from smddp.estimator.running import LaunchError
from smddp.text import printable

#: Largest folder of a script that is sent without --source-dir.
_MOST_BYTES, _MOST_FILES = 64 << 20, 5000


def main(argv: Sequence[str]) -> int:
    """The exit status: 0 the job ended well, else that of the rank that failed first (1 where none is known), 2 for bad
    arguments, 130 after a Ctrl-C."""
    words = list(argv)
    at = words.index("--") if "--" in words else len(words)
    given = parser().parse_args(words[:at])
    try:
        script, source_dir = _source(given)
        estimator = PyTorch(
            script,
            source_dir=source_dir,
            instance_type=given.instance_type,
            image_uri=given.image or NO_IMAGE,
            distribution=_distribution(given.distribution),
            output_path=given.output,
        )
        estimator.script_arguments = words[at + 1 :]
        hosts = given.hosts.split(",") if given.hosts else None
        if given.nodes is not None and given.engine is None:
            raise ValueError("--nodes is for --engine: name the hosts by --hosts")
        estimator.instance_count = given.nodes or len(hosts or [1])
        places = _inputs(given.input)
        source.check(source_dir, script)
        if given.engine is None:
            for place in places.values():
                inputs.local_path(place)
        if source_dir is not None and given.source_dir is None:
            estimator.ignore_patterns = source.IGNORED_BY_DEFAULT
            _check_default_folder(script, source_dir, estimator.root())
        estimator.fit(
            places,
            job_name=given.job_name,
            hosts=hosts,
            dry_run=given.dry_run,
            interface=given.interface,
            port=given.port,
            rsh=given.rsh,
            processes_per_host=given.ranks,
            engine=given.engine,
            engine_options=_options(given.option) or None,
        )
    except (OSError, ValueError, TypeError, ImportError) as error:
        print(f"smddp launch: {printable(_reason(error))}", file=sys.stderr)
        return 2
    except LaunchError as error:
        print(f"smddp launch: {error}", file=sys.stderr)
        status = error.failure.status if error.failure else 1
        return 128 - status if status < 0 else status
    except KeyboardInterrupt:
        return 130
    return 0


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    launch = command_line.Parser(
        prog="smddp launch",
        usage="%(prog)s [options] SCRIPT [-- ARGUMENTS]",
        description="Run a script on ranks here or on several hosts, as an estimator does.",
        epilog="The script receives the arguments after --.",
        allow_abbrev=False,
    )
    launch.add_argument("script", metavar="SCRIPT", help="the Python file that each rank runs")
    launch.add_argument("--distribution", metavar="JSON", help="as of an estimator, or its file (default: torchrun)")
    launch.add_argument("--hosts", metavar="A:8,B:8", help="hosts and their ranks, over ssh (default: this one)")
    launch.add_argument("-n", "--ranks", type=int, help="ranks of each host without :N in --hosts")
    launch.add_argument("--instance-type", default="local", metavar="TYPE", help="SageMaker type: GPUs, EFA and rules")
    launch.add_argument(
        "--input", action="append", default=[], metavar="CHANNEL=PATH", help="data; once for each channel"
    )
    launch.add_argument("--output", metavar="DIR", help="parent of the job's folder (default: ./smddp-jobs)")
    code = launch.add_mutually_exclusive_group()
    code.add_argument(
        "--source-dir", metavar="DIR", help="folder to send; SCRIPT is relative to it (default: SCRIPT's folder)"
    )
    code.add_argument("--script-only", action="store_true", help="send SCRIPT without the other files of its folder")
    launch.add_argument("--job-name", metavar="NAME")
    launch.add_argument("--interface", metavar="NAME", help="the network interface between hosts")
    launch.add_argument("--port", type=int, default=MASTER_PORT, help="port of torchrun's rendezvous on the first host")
    launch.add_argument("--rsh", default="ssh", metavar="COMMAND", help="replacement of ssh")
    launch.add_argument("--engine", choices=ENGINES, help="scheduler that runs the job in place of ssh")
    launch.add_argument("--nodes", type=int, help="number of nodes for --engine (default: 1)")
    launch.add_argument("--image", metavar="URI", help="container image for --engine kubernetes")
    launch.add_argument("-o", "--option", action="append", default=[], metavar="NAME=VALUE", help="engine option")
    launch.add_argument("--dry-run", action="store_true", help="print the commands without starting them")
    return launch


def _source(given: argparse.Namespace) -> tuple[str, str | None]:
    """Returns the script, and the folder that is sent: the script's own by default."""
    if given.source_dir is not None or given.script_only:
        return given.script, given.source_dir
    return Path(given.script).name, str(Path(given.script).parent)


def _check_default_folder(script: str, source_dir: str, jobs: Path) -> None:
    """Raises ValueError if the folder of the script cannot be sent to the ranks."""
    try:
        if not source.oversize(Path(source_dir), jobs, _MOST_BYTES, _MOST_FILES, source.IGNORED_BY_DEFAULT):
            return
        reason = f"has more than {_MOST_BYTES >> 20} MiB or {_MOST_FILES} files"
    except OSError as error:
        reason = f"cannot be read ({_reason(error)})"
    raise ValueError(
        f"the folder {source_dir!r} of {script}, which is sent to the ranks by default, {reason}: give --script-only "
        "to send the script alone, or --source-dir to send another folder"
    )


def _reason(error: Exception) -> str:
    """Returns an error's text, with the file before the reason of an OSError."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror


def _distribution(text: str | None) -> dict[str, Any]:
    if text is None:
        return {"torch_distributed": {"enabled": True}}
    if not text.lstrip().startswith(("{", "[")):
        try:
            text = files.read_text(text)
        except (OSError, ValueError) as error:
            raise ValueError(f"--distribution: {_reason(error)}") from None
    try:
        return dict(json.loads(text))
    except (json.JSONDecodeError, RecursionError, TypeError) as error:
        raise ValueError(f"--distribution: invalid JSON object {text[:200]!r}: {error}") from None


def _inputs(given: Sequence[str]) -> dict[str, str]:
    pairs = [text.partition("=") for text in given]
    for name, separator, place in pairs:
        if not name or not separator or not place:
            raise ValueError(f"--input takes CHANNEL=PATH, not {name + separator + place!r}")
    return {name: place for name, _, place in pairs}


def _options(given: Sequence[str]) -> dict[str, Any]:
    """Each value as JSON where it is, else as text."""
    found: dict[str, Any] = {}
    for text in given:
        name, separator, value = text.partition("=")
        if not name or not separator:
            raise ValueError(f"--option takes NAME=VALUE, not {text!r}")
        try:
            found[name] = json.loads(value)
        except (json.JSONDecodeError, RecursionError):
            found[name] = value
    return found
