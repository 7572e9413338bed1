"""Validation of text from outside that becomes a path, a command word, a variable or a line of a script.

One function for each kind of text. Each returns the text, or raises ValueError with the argument, the value and the
rule. Values that are free text (hyperparameters, environment variables) are passed on unchanged; `escape_dollars`
protects them where a launcher replaces variables.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_NAME = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
_NAME_RULE = "letters, digits, '.', '_' and '-', not starting with '.' or '-'"


def _matching(text: object, argument: str, pattern: str, most: int, rule: str) -> str:
    if not isinstance(text, str) or len(text) > most or not re.fullmatch(pattern, text):
        raise ValueError(f"{argument}: invalid value {str(text)[:200]!r}: expected 1 to {most} characters: {rule}")
    return text


def job_name(text: object) -> str:
    """A job's name, which is also the name of its folder."""
    return _matching(text, "job_name", _NAME, 128, _NAME_RULE)


def host_name(text: object, argument: str = "hosts") -> str:
    """A host's name or IPv4 address, optionally after `USER@`, which is a word of ssh's command line."""
    return _matching(text, argument, f"({_NAME}@)?{_NAME}", 253, f"a host name or USER@HOST of {_NAME_RULE}")


def path_name(text: object, argument: str) -> str:
    """One component of a path, such as an input channel or a checkpoint's tag."""
    return _matching(text, argument, _NAME, 200, _NAME_RULE)


def relative_path(text: str, argument: str) -> str:
    """A path that stays inside the folder that it is relative to."""
    parts = line(text, argument).split("/")
    if text.startswith("/") or ".." in parts or not text.strip("./"):
        raise ValueError(f"{argument}: invalid value {text!r}: expected a path inside source_dir, relative to it")
    return text


def label(text: object, argument: str) -> str:
    """A name in another system, such as an instance type."""
    return _matching(text, argument, _NAME, 128, _NAME_RULE)


def dns_name(text: object, argument: str) -> str:
    """A name of an object in Kubernetes."""
    part = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
    return _matching(text, argument, rf"{part}(\.{part})*", 253, "a-z, 0-9, '-' and '.', as a name in Kubernetes")


def image_name(text: object) -> str:
    """The reference of a container image."""
    return _matching(text, "image_uri", "[A-Za-z0-9][A-Za-z0-9._:/@-]*", 512, "an image, as REGISTRY/NAME:TAG")


def interface_name(text: object) -> str:
    """A network interface, or a list of them in NCCL's syntax."""
    return _matching(text, "interface", r"[A-Za-z0-9_=^][A-Za-z0-9_.:,=^/@-]*", 256, "network interfaces, as eth0,eth1")


def port(number: object) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= 65535:
        raise ValueError(f"port: invalid value {number!r}: expected 1 to 65535")
    return number


def line(text: object, argument: str) -> str:
    """Text without control characters, such as a path or a value in a batch script."""
    if not isinstance(text, str) or not text.isprintable():
        raise ValueError(f"{argument}: invalid value {str(text)[:200]!r}: expected text without control characters")
    return text


def lines(value: Any, argument: str) -> Any:
    """Checks every text in nested lists and dicts as `line` does. Returns the value."""
    if isinstance(value, str):
        line(value, argument)
    elif isinstance(value, Mapping):
        for name, each in value.items():
            lines(each, f"{argument}: {line(name, argument)}")
    elif isinstance(value, (list, tuple)):
        for each in value:
            lines(each, argument)
    return value


def variable_name(text: object, argument: str = "environment") -> str:
    """The name of an environment variable, or of a hyperparameter, which becomes one."""
    if not isinstance(text, str) or not text.isprintable() or not re.fullmatch(r"[^\s=-][^\s=]*", text):
        raise ValueError(
            f"{argument}: invalid name {str(text)[:200]!r}: expected no space, control character or '=', and no '-' "
            "at its start"
        )
    return text


def variable_value(text: object, argument: str) -> str:
    """The value of an environment variable, or a word of a command."""
    if not isinstance(text, str) or "\0" in text:
        raise ValueError(f"{argument}: invalid value {str(text)[:200]!r}: expected text without a NUL character")
    return text


def environment(variables: Mapping[Any, Any]) -> dict[str, str]:
    """Environment variables of a job. Raises ValueError for values other than text, such as numbers."""
    for name, value in variables.items():
        if not isinstance(value, str):
            raise ValueError(
                f"environment variable {name}: invalid value {value!r} ({type(value).__name__}): expected text, "
                f"such as {str(value)!r}"
            )
    return {
        variable_name(name): variable_value(value, f"environment variable {name}") for name, value in variables.items()
    }


def seconds(text: str) -> float:
    """A time of a command line: more than zero, at most a year."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= 366 * 24 * 3600:
        raise ValueError(f"invalid time {text!r}: expected more than 0 seconds and at most a year")
    return number


def escape_dollars(text: str) -> str:
    """Doubles each `$`, for a launcher that replaces variables and reads `$$` as `$`: torchrun, torchx, Kubernetes."""
    return text.replace("$", "$$")
