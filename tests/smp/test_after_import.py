"""Patches of modules that are imported before, after, or never."""

import importlib
import sys

import pytest
from smddp.sagemaker.after_import import after_import


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The name of an importable module that is not imported yet."""
    (tmp_path / "imported_later.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield "imported_later"
    sys.modules.pop("imported_later", None)


def change(module):
    before, module.value = module.value, 2
    return lambda: setattr(module, "value", before)


@pytest.mark.parametrize("first", [True, False])
def test_a_module_is_changed_whether_it_is_imported_before_or_after(module, first):
    finders = list(sys.meta_path)
    if first:
        importlib.import_module(module)
    undo = after_import(module, change)
    found = importlib.import_module(module)
    assert found.value == 2 and sys.meta_path == finders
    assert type(found.__spec__.loader).__module__.startswith(("importlib", "_frozen_importlib"))
    assert found.__loader__ is found.__spec__.loader
    undo()
    assert found.value == 1


def test_an_undone_change_of_a_module_that_is_not_imported_yet_is_not_made(module):
    finders = list(sys.meta_path)
    after_import(module, change)()
    assert sys.meta_path == finders and importlib.import_module(module).value == 1


def test_a_module_that_does_not_exist_is_missing_as_before():
    undo = after_import("imported_never", change)
    with pytest.raises(ModuleNotFoundError, match="imported_never"):
        importlib.import_module("imported_never")
    undo()
