"""`smddp-bench replay` repeats a job's recorded calls with the same outcome."""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import smddp
import torch
import torch.distributed as dist
from ranks.cases import on_ranks
from smddp.torch.errors import CollectiveTimeoutError, MismatchError


def raised(call) -> type | None:
    try:
        call()
    except RuntimeError as error:
        return type(error)
    return None


@on_ranks(3)
def test_a_mismatch_and_a_missing_rank_are_reproduced() -> None:
    """The replay also reports properties of calls that a dump lacks."""
    rank = dist.get_rank()
    second = datetime.timedelta(seconds=1)
    differ, hung = (dist.new_group(backend="cpu:smddp", timeout=second) for _ in range(2))
    for group in (differ, hung):
        for count in (10, 5000):
            dist.all_reduce(torch.ones(count, dtype=torch.bfloat16), group=group)
        parts = [torch.empty(part + 1) for part in range(3)]
        dist.all_gather(parts, torch.ones(rank + 1), group=group)
    assert raised(lambda: dist.all_reduce(torch.ones(10 + (rank == 1)), group=differ)) is MismatchError
    if rank != 2:
        assert raised(lambda: dist.all_reduce(torch.ones(10), group=hung)) is CollectiveTimeoutError
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    files = [str(Path(folder[0], f"{each}.json")) for each in range(3)]
    smddp.dump(files[rank])
    dist.barrier()
    if rank == 0:
        names = [part for group in (differ, hung) for part in ("--group", group.group_name)]
        replay = subprocess.run(
            [sys.executable, "-m", "smddp", "bench", "replay", *files, *names, "--here", "--timeout", "1"],
            env={**os.environ, "SMDDP_DUMP_DIR": ""},
            capture_output=True,
            text=True,
            timeout=50,
        )
        text = replay.stdout + replay.stderr
        assert replay.returncode == 1, text
        for group in (differ, hung):
            assert f"# Group `{group.group_name}` ended as recorded\n" in replay.stdout, text
        assert "missing: rank 2 " in replay.stdout.rpartition("# replayed:")[2], text
        assert "sizes of uneven blocks are not recorded" in replay.stdout, text
    dist.barrier()
