"""SMDDP_JOB_TOKEN_FILE: ranks with the same file form a group; otherwise the error names the setting."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks.cases import Cases
from ranks.pool import Pool

LIMIT = datetime.timedelta(seconds=15)
SECRET = "0123456789abcdef" * 4


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    folder = tmp_path_factory.mktemp("tokens")
    for rank in range(3):
        write(folder / f"rank{rank}.token", SECRET)
    with Pool(
        3,
        lambda rank: {
            "SMDDP_JOB_TOKEN_FILE": str(folder / f"rank{rank}.token"),
            # One of the ranks is on another node.
            "SMDDP_NODE": f"node{rank // 2}",
        },
    ) as made:
        yield made


cases = Cases()


def write(path: Path, text: str, mode: int = 0o600) -> None:
    path.write_text(text)
    path.chmod(mode)


def mine() -> Path:
    return Path(os.environ["SMDDP_JOB_TOKEN_FILE"])


def _error_of_a_group() -> str:
    """Returns the error of creating a group on this rank."""
    begun = time.monotonic()
    with pytest.raises((RuntimeError, ValueError)) as raised:
        dist.new_group(timeout=LIMIT)
    assert time.monotonic() - begun < LIMIT.total_seconds(), raised.value
    return str(raised.value)


@cases
def the_same_file_forms_a_group() -> None:
    # White space around the secret is ignored.
    write(mine(), f"{SECRET}\n" if dist.get_rank() else SECRET)
    summed = torch.ones(3)
    dist.all_reduce(summed, group=dist.new_group(timeout=LIMIT))
    assert summed.eq(3).all()


@cases
def a_different_file_is_reported_on_all_ranks() -> None:
    for odd in range(3):
        dist.barrier()
        write(mine(), SECRET[::-1] if dist.get_rank() == odd else SECRET)
        text = _error_of_a_group()
        assert "SMDDP_JOB_TOKEN_FILE" in text, f"rank {odd} has another one: {text}"
    dist.barrier()


@cases
def a_file_that_cannot_be_used_is_named() -> None:
    bad: list[tuple[Callable[[], None], str]] = [
        (lambda: mine().unlink(), "cannot be read"),
        (lambda: write(mine(), ""), "expected at least 32 bytes, found 0"),
        (lambda: write(mine(), SECRET, 0o644), "mode 644: chmod 600"),
    ]
    for spoil, words in bad:
        dist.barrier()
        write(mine(), SECRET)
        if dist.get_rank() == 1:
            spoil()
        text = _error_of_a_group()
        # All ranks name the invalid file.
        assert "SMDDP_JOB_TOKEN_FILE" in text and "rank1.token" in text and words in text, text
    dist.barrier()


@cases
def a_changed_record_is_refused() -> None:
    """Rank 1 reads rank 0's record after a modification in the store."""
    get = dist.Store.get

    def changed(store: dist.Store, key: str) -> bytes:
        value = get(store, key)
        return value[:-80] + bytes([value[-80] ^ 1]) + value[-79:] if key.endswith("smddp/card/0") else value

    write(mine(), SECRET)
    try:
        if dist.get_rank() == 1:
            dist.Store.get = changed
        text = _error_of_a_group()
    finally:
        dist.Store.get = get
    assert "does not verify under SMDDP_JOB_TOKEN_FILE" in text and "changed in the store" in text, text
    dist.barrier()


@pytest.mark.parametrize("case", cases)
def test_job_token(pool: Pool, case: str):
    pool.run(__name__, case, 60.0)
