"""Lookup of private names of torch and transformers, which a release may rename without notice.

Each package lists its names in one module: `smddp.torch.compat`, `smddp.sagemaker.private_names` and
`smddp.modelparallel.private_names`. A missing name disables its feature: with one warning if results remain right, else
with an error where the feature is used.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable
from typing import Any


class MissingNameError(RuntimeError):
    """A feature is used that needs a private name, and the installed release does not have that name."""


class PrivateName:
    """One private name, looked up at its first use.

    Attributes of a module or class are read through this object: `pytree.tree_leaves(x)`.

    Args:
        path: dotted path of the name. Its first part is the package.
        feature: noun phrase for the feature that needs the name.
        off: consequence of a missing name, for a feature that goes on without it; None if its use is an error.
    """

    def __init__(self, path: str, feature: str, off: str | None = None) -> None:
        self.path, self.feature, self.off = path, feature, off
        self.attribute = path.rpartition(".")[2]

    def find(self) -> Any:
        """Returns the object, or None if the release lacks it."""
        try:
            return _resolve(self.path)
        except (ImportError, AttributeError):
            return None

    def get(self) -> Any:
        """Returns the object; raises MissingNameError if the release lacks it."""
        found = self.find()
        if found is None:
            raise self.error()
        return found

    def owner(self) -> Any:
        """Returns the module or class that has the name; raises MissingNameError if the release lacks either."""
        self.get()
        return _resolve(self.path.rpartition(".")[0])

    def of(self, owner: Any) -> Any:
        """Returns this attribute of ``owner``, an instance of the class in the path; raises MissingNameError."""
        try:
            return getattr(owner, self.attribute)
        except AttributeError:
            raise self.error() from None

    def of_or_warn(self, owner: Any) -> Any:
        """As `of`, but returns None with one RuntimeWarning if ``owner`` lacks the attribute."""
        if not hasattr(owner, self.attribute):
            self.warn()
        return getattr(owner, self.attribute, None)

    def find_or_warn(self) -> Any:
        """Returns the object, or None with one RuntimeWarning if the release lacks it."""
        found = self.find()
        if found is None:
            self.warn()
        return found

    def warn(self) -> None:
        """Reports once that the feature is off."""
        warn_missing(self.path, self.off or self.feature)

    def error(self) -> MissingNameError:
        """Returns the error of a use without the name."""
        return MissingNameError(
            f"{self.feature}: not available, because {_release(self.path)} has no {self.path}. "
            "Update smddp, or install a release that docs/reference/supported-versions.md lists"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # as of copies and of inspection
            raise AttributeError(name)
        value = getattr(self.get(), name)
        self.__dict__[name] = value
        return value


_reported: set[str] = set()


def warn_missing(name: str, lost: str) -> None:
    """Warns once that this release has no `name`. Never raises, even if warnings are errors."""
    if name in _reported:
        return
    _reported.add(name)
    try:
        warnings.warn(
            f"{_release(name)} has no {name}, which smddp uses: {lost}. Update smddp, or report it.",
            RuntimeWarning,
            stacklevel=2,
        )
    except RuntimeWarning:
        pass


def private(path: str, lost: str, fallback: Callable[..., Any]) -> Any:
    """Returns the object at ``path``, or the fallback after a RuntimeWarning. lost: the missing feature."""
    found = PrivateName(path, lost, lost).find_or_warn()
    return fallback if found is None else found


def _release(path: str) -> str:
    package = path.partition(".")[0]
    return f"{package} {getattr(sys.modules.get(package), '__version__', '')}".rstrip()


def _resolve(path: str) -> Any:
    module, *parts = path.split(".")
    found: Any = importlib.import_module(module)
    for part in parts:
        module = f"{module}.{part}"
        try:
            found = getattr(found, part)
        except AttributeError:
            found = importlib.import_module(module)
    return found
