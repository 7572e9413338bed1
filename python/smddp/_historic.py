"""Detection of the historic package, which owns the same paths as smddp.

pip overwrites one with the other silently, and removing either removes files of both. `import torch` runs this check,
so it must be fast.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from importlib import metadata

# Distribution names, looked up in every process that imports torch. Reading all distributions would be slow.
_NAMES = ("smdistributed-dataparallel", "smdistributed-modelparallel")
_TOP = "smdistributed"
_OURS = ("smdistributed/dataparallel/", "smdistributed/modelparallel/")

_warned = False


def conflict() -> str:
    """Returns the conflicting distributions and the remedy, or "". Reads all distributions."""
    names = set(metadata.packages_distributions().get(_TOP, [])) - {"smddp"}
    return _conflict(metadata.distribution(name) for name in names)


def warn_once() -> None:
    """Warns in the first process of a host if a historic distribution is installed."""
    global _warned
    if _warned or os.environ.get("LOCAL_RANK", "0") != "0":
        return
    _warned = True
    text = _conflict(found for name in _NAMES for found in metadata.distributions(name=name))
    if text:
        warnings.warn(text, RuntimeWarning, stacklevel=3)


def _conflict(distributions: Iterable[metadata.Distribution]) -> str:
    theirs = sorted({f"{found.name} {found.version}" for found in distributions if _has_our_paths(found)})
    if not theirs:
        return ""
    names = " ".join(name.split()[0] for name in theirs)
    return (
        f"{', '.join(theirs)} has files at the same paths as smddp: the package installed last "
        f"provides them, and removing either removes them; `pip uninstall {names}`, then install smddp again"
    )


def _has_our_paths(distribution: metadata.Distribution) -> bool:
    files = distribution.files
    # A distribution without a file list matches by its name.
    return files is None or any(str(path).startswith(_OURS) for path in files)
