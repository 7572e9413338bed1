"""What a program's exception is told as, to the ranks that see its process go."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from smddp import PeerLostError
from smddp.exit_hooks import uncaught


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    core = SimpleNamespace(Error=uncaught.core().Error, stacks=lambda: False, leave_error=lines.append)
    monkeypatch.setattr(uncaught, "core", lambda: core)
    return lines


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


CASES = [(ValueError("two\nlines"), "ValueError: two lines"), (Unspeakable(), "Unspeakable: <exception")]


@pytest.mark.parametrize(("error", "words"), CASES)
def test_an_exception_is_one_line_whatever_its_text_does(told, monkeypatch, error, words) -> None:
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    uncaught.report_uncaught()
    assert len(told) == 1 and words in told[0] and "\n" not in told[0]


def test_what_came_of_a_groups_error_is_the_cores_to_tell(told, monkeypatch) -> None:
    error = RuntimeError("while cleaning up")
    error.__cause__ = PeerLostError("rank 1 died")
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    uncaught.report_uncaught()
    assert told == []
