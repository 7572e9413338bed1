"""Sources of the configuration of `tsm.init()`; `smddp.smp.v2_keys` has the keys.

Sources in order of precedence: degrees assigned to `tsm.state` before `init`, the launcher (the environment variable
SM_HP_MP_PARAMETERS, a JSON object), the argument of `init` (a dict, or the path of a JSON file), the defaults.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from smddp import files
from smddp.smp.launcher import LAUNCHER, read_json
from smddp.smp.v2_keys import KEYS, OLDER_NAMES, V1_ONLY, check, check_value

__all__ = ["KEYS", "OLDER_NAMES", "V1_ONLY", "check", "check_value", "read"]

log = logging.getLogger("smddp.sagemaker")


def read(argument: dict[str, Any] | str | os.PathLike | None, assigned: dict[str, int]) -> dict[str, int | bool]:
    """Returns the value of every key, merged from all sources.

    Args:
        argument: argument of `init`: a dictionary, the path of a JSON file, or None.
        assigned: degrees that the script assigned to `tsm.state` before `init`.

    Raises:
        TypeError, ValueError: as in `check`, or text that does not parse as a JSON object.
        OSError: the file cannot be read.
    """
    values: dict[str, int | bool] = {key.name: key.default for key in KEYS.values()}
    script: dict[str, Any] = {}
    if isinstance(argument, (str, os.PathLike)):
        source = f"the file {os.fspath(argument)!r} given to init()"
        try:
            text = files.read_text(argument)
        except FileNotFoundError as error:
            raise FileNotFoundError(error.errno, f"{source} is not there, seen from {os.getcwd()}") from None
        script = check(read_json(text, source), f"{argument}")
    elif argument is not None:
        script = check(argument, "init()")
    launcher = {}
    if os.environ.get(LAUNCHER, "").strip():
        launcher = check(read_json(os.environ[LAUNCHER], f"the environment variable {LAUNCHER}"), LAUNCHER)
    values.update(script)
    for name, value in launcher.items():
        if name in script and script[name] != value:
            log.warning("%s=%r from the launcher replaces the script's %r", name, value, script[name])
        values[name] = value
    for name, value in assigned.items():
        if name in launcher and launcher[name] != value:
            log.warning(
                "tsm.state.%s=%r, assigned before init(), replaces the launcher's %r", name, value, launcher[name]
            )
        values[name] = check_value(KEYS[name], name, value, "tsm.state")
    return values
