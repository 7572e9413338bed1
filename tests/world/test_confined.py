"""Ranks under limits, seccomp filters and in sandboxes: there is a group, or the error names the limit."""

from pathlib import Path

import pytest
from ranks.launching import outputs, start

CONFINED = str(Path(__file__).with_name("confined.py"))
GROUP = str(Path(__file__).with_name("small_group.py"))
SLOW_STORE = str(Path(__file__).with_name("slow_store_group.py"))


def confined(how: str, **environment: str) -> list[tuple[int, str]]:
    ended = outputs(start([CONFINED, how, GROUP], 2, **environment))
    if any(status == 77 for status, _ in ended):
        pytest.skip("this user may not make a mount namespace")
    return ended


@pytest.mark.parametrize(
    ("how", "path", "logged"),
    [
        ("no-proc", "shm", None),
        ("address-space-34-gib", "shm", None),
        ("address-space-2-gib", "shm", None),
        ("file-size-512-mib", "shm", None),
        ("address-space-1-gib", "tcp", "ulimit -v"),
        ("no-files", "tcp", "ulimit -f"),
        ("no-memfd", "tcp", "the system call memfd_create failed: Operation not permitted"),
    ],
)
def test_a_confined_rank_gets_a_group_and_logs_why_it_shares_no_memory(how, path, logged):
    for status, text in confined(how):
        assert status == 0 and f"over {path}" in text, text
        assert ("SMDDP WARN" in text) == (logged is not None) and (logged or "") in text, text


def test_a_group_without_shared_memory_needs_no_memfd():
    for status, text in confined("no-memfd", SMDDP_NODE="%r"):
        assert status == 0 and "over tcp" in text, text


def test_a_rank_that_cannot_map_an_unlimited_peer_names_its_own_limit():
    for status, text in confined("address-space-2-gib", CONFINED_RANK="1"):
        last = text.strip().splitlines()[-1]
        assert status == 1 and "ulimit -v" in last and "SMDDP_NODE=%r" in last, text
        assert "unix socket" not in last, "the peer is blamed: " + text


def test_a_rank_that_fails_in_init_is_not_reported_as_dead_before_its_reason_arrives(tmp_path):
    script = [CONFINED, "address-space-2-gib", SLOW_STORE, str(tmp_path / "store"), "8"]
    for status, text in outputs(start(script, 2, CONFINED_RANK="1")):
        reasons = [line for line in text.splitlines() if "Error: " in line or line == "made"]
        assert status == 0 and len(reasons) == 8, text
        assert all("ulimit -v" in reason for reason in reasons), text


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("address-space-256-mib", ["ulimit -v", "MiB", "is in use"]),
        ("no-eventfd", ["the system call eventfd2 failed", "seccomp"]),
        ("no-epoll", ["the system call epoll_create1 failed", "seccomp"]),
    ],
)
def test_no_group_is_an_error_that_names_the_limit_or_the_system_call(how, words):
    ended = confined(how)
    assert [status for status, _ in ended] == [1] * len(ended), ended
    lasts = [text.strip().splitlines()[-1] for _, text in ended]
    assert all(word in lasts[0] for word in words), lasts
    # Rank 0 may fail before it serves the rendezvous store: then the others name rank 0.
    for last in lasts[1:]:
        assert all(word in last for word in words) or "rank 0" in last, lasts
