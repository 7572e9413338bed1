"""Under torchrun, exits caused by a peer's failure are delayed by a bounded time; all other exits are not."""

from __future__ import annotations

import pytest
from smddp.exit_hooks import first_cause
from smddp.torch.errors import PeerLostError


class Clock:
    """A clock that advances only during sleep."""

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


def test_a_process_without_a_peer_failure_exits_immediately(clock) -> None:
    first_cause.delay_exit()
    assert clock.slept == 0


def test_a_process_after_a_peer_failure_waits_once_for_the_remaining_time(clock) -> None:
    first_cause.record_peer_failure()
    clock.now += 0.5
    first_cause.delay_exit()
    first_cause.delay_exit()
    assert clock.slept == 1.5


def test_a_process_that_handled_the_failure_exits_immediately(clock) -> None:
    first_cause.record_peer_failure()
    assert clock.slept == 0, "the error itself is not late"
    clock.now += 60
    first_cause.delay_exit()
    assert clock.slept == 0


def test_no_delay_without_torchrun(clock, monkeypatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    first_cause.record_peer_failure()
    first_cause.delay_exit()
    assert clock.slept == 0


def test_only_error_files_after_a_peer_failure_are_delayed(clock, monkeypatch) -> None:
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
