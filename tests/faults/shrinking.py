"""Program of test_shrinking.py: a world of four ranks shrinks after one rank is killed or excluded."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from smddp._register import register
from torch.distributed import distributed_c10d as dist_c10d

SIZE = 4
OUT = 1
LIMIT = timedelta(seconds=60)


def _in_shrunk(me: int) -> None:
    """torch's state of the default group covers the remaining ranks 0, 2 and 3, now ranks 0, 1 and 2."""
    remaining = [0, 2, 3]
    assert (dist.get_world_size(), dist.get_rank()) == (3, remaining.index(me))
    assert dist.get_process_group_ranks(dist.group.WORLD) == [0, 1, 2]
    mine = torch.tensor([me])
    dist.all_reduce(mine)
    assert int(mine) == sum(remaining)
    dist.broadcast(mine.fill_(me), 2)
    assert int(mine) == 3
    found = [None] * 3
    dist.all_gather_object(found, me)
    assert found == remaining
    # As many as there were before, so that a name that was used would come again.
    for ranks in ([0, 1, 2], [0, 2]):
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            dist.all_reduce(mine.fill_(me), group=group)
            assert int(mine) == sum(remaining[rank] for rank in ranks)
    if dist.get_rank() == 2:
        return
    dist.shrink_group([2])
    dist.all_reduce(mine.fill_(me))
    assert int(mine) == 2 and dist.get_world_size() == 2


def _rank(me: int, path: str, killed: bool) -> float:
    """Returns the seconds from the end of a call of all ranks to the remaining ranks' first correct result."""
    store = dist.FileStore(path)
    dist.init_process_group("smddp", store=store, rank=me, world_size=SIZE, timeout=LIMIT)
    for ranks in (range(SIZE), [OUT, 2]):
        group = dist.new_group(list(ranks))
    mine = torch.ones(1)
    dist.all_reduce(mine)
    begun = time.monotonic()
    if me == OUT and killed:
        os.kill(os.getpid(), signal.SIGKILL)
    if me == OUT or killed:
        try:
            dist.all_reduce(mine)
        except dist.DistBackendError as error:
            assert ("left the group" in str(error)) is not killed, error
        else:
            raise AssertionError(f"rank {me}: a call of four ranks among three")
    if me != OUT:
        shrunk = dist.shrink_group([OUT], None, dist_c10d.SHRINK_ABORT if killed else dist_c10d.SHRINK_DEFAULT)
        assert shrunk is dist.group.WORLD and group is not None
        dist.barrier()
        seconds = time.monotonic() - begun
        _in_shrunk(me)
    else:
        seconds = 0.0
    dist.destroy_process_group()
    return seconds


def _round(path: str, killed: bool) -> list[float]:
    said, says = os.pipe()
    pids = []
    for me in range(SIZE):
        if pid := os.fork():
            pids.append(pid)
            continue
        status = 1
        try:
            os.write(says, json.dumps(_rank(me, path, killed)).encode() + b"\n")
            status = 0
        finally:
            if status:
                sys.excepthook(*sys.exc_info())
            os._exit(status)
    os.close(says)
    with os.fdopen(said) as lines:
        found = [json.loads(line) for line in lines]
    ended = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert ended == [0, -signal.SIGKILL if killed else 0, 0, 0], ended
    return found


if __name__ == "__main__":
    register()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        rounds = {what: _round(f"{directory}/{what}", what == "killed") for what in ("killed", "left out")}
    json.dump(rounds, sys.stdout)
