"""Report of a program's uncaught exception to the ranks that detect the end of its process."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from smddp import PeerLostError
from smddp.exit_hooks import uncaught


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    core = SimpleNamespace(Error=uncaught.core().Error, are_stacks_enabled=lambda: False, set_last_error=lines.append)
    monkeypatch.setattr(uncaught, "core", lambda: core)
    return lines


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


CASES = [(ValueError("two\nlines"), "ValueError: two lines"), (Unspeakable(), "Unspeakable: <exception")]


@pytest.mark.parametrize(("error", "words"), CASES)
def test_any_exception_is_reported_in_one_line(reported, monkeypatch, error, words) -> None:
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    uncaught.report_uncaught()
    assert len(reported) == 1 and words in reported[0] and "\n" not in reported[0]


def test_exceptions_caused_by_a_group_error_are_left_to_the_core(reported, monkeypatch) -> None:
    error = RuntimeError("while cleaning up")
    error.__cause__ = PeerLostError("rank 1 died")
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    uncaught.report_uncaught()
    assert reported == []
