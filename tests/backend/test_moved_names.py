"""Former names of moved modules and functions: each works, and warns once."""

import warnings

import pytest
from ranks import forked
from smddp import _alias

CODE = """
import importlib, warnings, torch
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    found = {expression}
    again = {expression}
print(found is again, *(f"{{each.category.__name__}} {{each.message}} {{each.filename}}" for each in caught), sep="\\n")
print(found is {real})
"""


def _messages(expression: str, real: str) -> list[str]:
    done = forked.run(CODE.format(expression=expression, real=real))
    assert done.returncode == 0, done.stderr
    same, *messages, is_real = done.stdout.splitlines()
    assert (same, is_real) == ("True", "True")
    return messages


@pytest.mark.parametrize(("former", "real"), _alias.MOVED.items())
def test_a_moved_module_warns_once(former, real):
    (message,) = _messages(f"importlib.import_module({former!r})", f"importlib.import_module({real!r})")
    assert message.startswith(f"DeprecationWarning {former} is deprecated: import {real} ")


@pytest.mark.parametrize("name", _alias.EXPERIMENTAL)
def test_an_experimental_function_warns_once_under_its_former_name(name):
    (message,) = _messages(
        f"importlib.import_module('smddp').{name}", f"importlib.import_module('smddp.experimental').{name}"
    )
    assert message.startswith(f"DeprecationWarning smddp.{name} is deprecated: use smddp.experimental.{name} ")


def test_former_names_are_not_exported():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        namespace: dict[str, object] = {}
        exec("from smddp import *", namespace)
    assert not set(_alias.EXPERIMENTAL) & namespace.keys()
