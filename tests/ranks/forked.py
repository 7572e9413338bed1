"""Runs code in processes that are forked from the server that has imported torch (conftest.py).

A new import takes seconds. Tests of the first import of torch need a new interpreter instead.
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

from ranks import process


def run(code: str, **environment: str) -> CompletedProcess[str]:
    """Runs `python -c code` with these variables besides those of this process."""
    (done,) = run_all([(code, environment)])
    return done


def run_all(programs: list[tuple[str, dict[str, str]]], seconds: float = 120) -> list[CompletedProcess[str]]:
    """Runs all programs at the same time. Kills the remaining ones after `seconds`."""
    with tempfile.TemporaryDirectory(prefix="smddp-forked-") as place:
        children = []
        for number, (code, environment) in enumerate(programs):
            logs = [os.path.join(place, f"{number}.{stream}") for stream in ("out", "err")]
            child, _ = process.start(_execute, code, environment=environment, logs=logs)
            children.append((child, logs))
        ended = []
        for child, logs in children:
            child.join(seconds)
            if child.is_alive():
                child.kill()
                child.join()
            texts = [Path(log).read_text(errors="replace") if os.path.exists(log) else "" for log in logs]
            ended.append(CompletedProcess("python -c", child.exitcode, *texts))
    return ended


def _execute(_pipe: Any, code: str) -> None:
    sys.argv = ["-c"]
    try:
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
