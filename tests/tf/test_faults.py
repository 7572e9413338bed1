"""Ranks that die, halt or call something else while the others are inside a tf.function."""

import signal
import subprocess
import time
from pathlib import Path

from programs import HERE, words
from ranks.launching import outputs, start

SIZE = 3


def ended(kind: str) -> dict[int, dict]:
    """By rank, what each says of its end."""
    found = outputs(start([str(HERE / "faults.py"), kind], SIZE, OMP_NUM_THREADS="1"), 120)
    return {said["rank"]: said for _, output in found for said in words(output)}


def test_a_killed_rank_raises_in_all_others_within_a_second():
    said = ended("killed")
    assert sorted(said) == [0, 1]
    for rank in (0, 1):
        assert said[rank]["kind"] == "InternalError", said[rank]
        assert "smddp.PeerLostError" in said[rank]["text"] and "rank 2" in said[rank]["text"]
        assert said[rank]["ended"] - said[rank]["begun"] < 1, said[rank]


def test_mismatched_calls_raise_with_both_calls():
    said = ended("mismatch")
    assert len(said) == SIZE
    first = [each for each in said.values() if "smddp.MismatchError" in each["text"]]
    assert first and first[0]["kind"] == "InvalidArgumentError"
    assert "1000" in first[0]["text"] and "2000" in first[0]["text"], first[0]


def test_a_gradient_missing_on_one_rank_raises_on_all():
    said = ended("absent")
    assert len(said) == SIZE
    assert all("smddp." in each["text"] for each in said.values()), said
    assert any("smddp.MismatchError" in each["text"] for each in said.values()), said


def test_a_missing_rank_is_named_at_the_deadline():
    said = ended("timeout")
    for rank in (0, 1):
        assert said[rank]["kind"] in ("DeadlineExceededError", "InternalError"), said[rank]
    assert any("smddp.CollectiveTimeoutError" in each["text"] and "rank 2" in each["text"] for each in said.values())


def test_ctrl_c_ends_a_waiting_step_within_a_second():
    ranks = start([str(HERE / "faults.py"), "interrupted"], SIZE, OMP_NUM_THREADS="1")
    try:
        first = ranks[0]
        while "ready" not in first.stdout.readline():
            assert first.poll() is None
        wait_inside(first)
        begun = time.time()
        first.send_signal(signal.SIGINT)
        (said,) = words(first.communicate(timeout=60)[0])
        assert said["kind"] == "KeyboardInterrupt", said
        assert said["ended"] - begun < 1
        # The other ranks are notified and do not wait for the interrupted rank.
        (other,) = words(ranks[1].communicate(timeout=60)[0])
        assert "smddp." in other["text"], other
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def wait_inside(rank: subprocess.Popen) -> None:
    """Waits until the process uses no CPU time."""
    until, before = time.monotonic() + 30, -1
    while time.monotonic() < until:
        fields = Path(f"/proc/{rank.pid}/stat").read_text().rpartition(")")[2].split()
        now = int(fields[11]) + int(fields[12])
        if now == before:
            return
        before = now
        time.sleep(0.1)
