"""Whether the historic package, which owns the same paths as smddp, is installed beside it.

pip writes one over the other without a word, and removing either removes files of both. `import torch` asks this, so it
stays light.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from importlib import metadata

# The distributions by name: looked up in every process that imports torch, where reading all there are would take long.
_NAMES = ("smdistributed-dataparallel", "smdistributed-modelparallel")
_TOP = "smdistributed"
_OURS = ("smdistributed/dataparallel/", "smdistributed/modelparallel/")

_warned = False


def told() -> str:
    """What is installed at our paths, whatever its name, and what to do; "" if nothing is. Reads all distributions."""
    names = set(metadata.packages_distributions().get(_TOP, [])) - {"smddp"}
    return _told(metadata.distribution(name) for name in names)


def warn_once() -> None:
    """A warning in the first process of a host if one of the historic distributions is there."""
    global _warned
    if _warned or os.environ.get("LOCAL_RANK", "0") != "0":
        return
    _warned = True
    text = _told(found for name in _NAMES for found in metadata.distributions(name=name))
    if text:
        warnings.warn(text, RuntimeWarning, stacklevel=3)


def _told(distributions: Iterable[metadata.Distribution]) -> str:
    theirs = sorted({f"{found.name} {found.version}" for found in distributions if _has_our_paths(found)})
    if not theirs:
        return ""
    names = " ".join(name.split()[0] for name in theirs)
    return (
        f"{', '.join(theirs)} has files at the same paths as smddp: which ones are there depends on what was installed "
        f"last, and removing either removes them; `pip uninstall {names}`, then install smddp again"
    )


def _has_our_paths(distribution: metadata.Distribution) -> bool:
    files = distribution.files
    # One without a list of its files is here for its name.
    return files is None or any(str(path).startswith(_OURS) for path in files)
