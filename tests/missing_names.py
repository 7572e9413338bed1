"""Removal of private names of torch and transformers, in one process per name.

The process removes the name before it imports smddp, as a later release may, and then uses every feature.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ranks import forked

# Processes at a time.
AT_ONCE = 8
removed = ""
# Features that are off, features in which torch or transformers itself fails, and number of warnings.
Call = Callable[[], Any]
Result = tuple[list[str], list[str], int]


def remove(path: str, models: Iterable[Any]) -> None:
    """Removes a name: a module, an attribute of a module, or of a class with its bases and the models' subclasses."""
    parts = path.split(".")
    owner = importlib.import_module(parts[0])
    for at, part in enumerate(parts[1:-1], 2):
        owner = getattr(owner, part, None) or importlib.import_module(".".join(parts[:at]))
    if path in sys.modules:
        sys.modules[path] = None
    owners = [owner, *getattr(owner, "__mro__", ())]
    for model in models if isinstance(owner, type) else ():
        for each in model.modules():
            owners += [kind for kind in type(each).__mro__ if issubclass(kind, owner)]
            if isinstance(each, owner):
                vars(each).pop(parts[-1], None)
    for each in set(owners) if isinstance(owner, type) else [owner]:
        if parts[-1] in vars(each):
            delattr(each, parts[-1])


def outcome(feature: Callable[[], Any]) -> str:
    """Returns "on", "off" if smddp reports the missing name, or "itself" if torch or transformers needs it, too."""
    try:
        feature()
    except (RuntimeError, AttributeError, NameError, TypeError) as error:
        # A step reports the error of a microbatch as another error.
        if "not available" in str(error):
            assert removed in str(error), error
            return "off"
        if removed.rpartition(".")[2] in str(error):
            return "itself"
        raise
    return "on"


def use(
    path: str, begin: Callable[[], None], features: Sequence[Callable[[], Any]], models: Iterable[Any] = ()
) -> None:
    """Removes the name, also from the classes of ``models``, begins, uses each feature, and prints the result."""
    global removed
    removed = path
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        if path:
            remove(path, models)
        outcomes = {"begin": outcome(begin)}
        if outcomes["begin"] == "on":
            outcomes |= {feature.__name__: outcome(feature) for feature in features}
    texts = [str(each.message) for each in found if "which smddp uses" in str(each.message)]
    assert all(path in text for text in texts), texts
    off, itself = ([name for name, how in outcomes.items() if how == kind] for kind in ("off", "itself"))
    print(json.dumps([off, itself, len(texts)]))


def check_each(module: str, file: str, expected: dict[str, Result]) -> None:
    """Removes each path of ``expected``, and none, in one process each, which runs ``main(path)`` of ``module``.

    Args:
        module: name of a module beside ``file``.
        expected: result by path. Releases differ in what they use of the names: the second list may be shorter.
    """
    places = [os.path.dirname(os.path.abspath(each)) for each in (__file__, file)]
    expected = {"": ([], [], 0), **expected}
    code = f"import sys; sys.path[:0] = {places!r}; import {module}; {module}.main"
    programs = [(f"{code}({path!r})", {}) for path in expected]
    done = [one for at in range(0, len(programs), AT_ONCE) for one in forked.run_all(programs[at : at + AT_ONCE])]
    for path, one in zip(expected, done, strict=True):
        assert one.returncode == 0, (path, one.stderr)
        off, itself, warned = json.loads(one.stdout.splitlines()[-1])
        print(f"{path}: off: {', '.join(off) or 'nothing'}; {warned} warnings")
        assert (off, warned) == (expected[path][0], expected[path][2]), path
        assert set(itself) <= set(expected[path][1]), (path, itself)
