"""What follows from a peer's end is late where torchrun looks, by a bounded time, and nothing else is."""

from __future__ import annotations

import pytest
from smddp.exit_hooks import first_cause
from smddp.torch.errors import PeerLostError


class Clock:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(first_cause, "time", made)
    monkeypatch.setattr(first_cause, "_failed_at", None)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    return made


def test_a_process_that_no_peers_end_was_told_leaves_at_once(clock) -> None:
    first_cause.delay_exit()
    assert clock.slept == 0


def test_who_follows_another_waits_once_and_only_for_what_is_left(clock) -> None:
    first_cause.record_peer_failure()
    clock.now += 0.5
    first_cause.delay_exit()
    first_cause.delay_exit()
    assert clock.slept == 1.5


def test_who_handled_the_error_and_went_on_leaves_at_once(clock) -> None:
    first_cause.record_peer_failure()
    assert clock.slept == 0, "the error itself is not late"
    clock.now += 60
    first_cause.delay_exit()
    assert clock.slept == 0


def test_nobody_waits_without_torchrun(clock, monkeypatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    first_cause.record_peer_failure()
    first_cause.delay_exit()
    assert clock.slept == 0


def test_an_error_file_is_late_for_what_follows_from_a_peers_end_and_for_nothing_else(clock, monkeypatch) -> None:
    from torch.distributed.elastic.multiprocessing.errors import error_handler

    written = []
    monkeypatch.setattr(error_handler.ErrorHandler, "record_exception", lambda self, e: written.append(str(e)))
    first_cause.record_peer_failure()
    handler = error_handler.ErrorHandler()
    handler.record_exception(ValueError("its own"))
    assert clock.slept == 0
    try:
        try:
            raise PeerLostError("rank 1 died")
        except PeerLostError:
            raise RuntimeError("while cleaning up")
    except RuntimeError as error:
        handler.record_exception(error)
    assert clock.slept == 2
    assert written == ["its own", "while cleaning up"]
