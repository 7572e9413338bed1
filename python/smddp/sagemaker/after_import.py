"""Patches of modules that a script may import later, or never."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Undo = Callable[[], None]


def after_import(name: str, change: Callable[[ModuleType], Undo]) -> Undo:
    """Apply ``change`` to module ``name``, now or as soon as it is imported.

    Args:
        name: full name of the module; it need not be installed.
        change: gets the module and returns a function that undoes the change.

    Returns:
        A function that undoes the change, or cancels it if the module has not been imported.
    """
    undo: list[Undo] = []
    finder = _Finder(name, lambda module: undo.append(change(module)))
    if name in sys.modules:
        undo.append(change(sys.modules[name]))
    else:
        sys.meta_path.insert(0, finder)  # type: ignore[arg-type]

    def undo_change() -> None:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)  # type: ignore[arg-type]
        while undo:
            undo.pop()()

    return undo_change


class _Finder:
    """Delegates to the other finders for one module, and reports its import once."""

    def __init__(self, name: str, imported: Callable[[ModuleType], None]) -> None:
        self._name, self._imported = name, imported

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._imported)  # type: ignore[assignment]
        return spec


class _Loader:
    """A loader that reports the module after its code has run, and leaves the original loader in its place."""

    def __init__(self, loader: Any, imported: Callable[[ModuleType], None]) -> None:
        self._loader, self._imported = loader, imported

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._imported(module)
