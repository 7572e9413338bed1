"""One cell of the fault matrix: ranks that make one right call, then one with a fault in it, and say what they saw."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import os
import signal
import time
from typing import Any

_PR_SET_PDEATHSIG = 1
#: Of each call, and of the making of each group.
LIMIT = datetime.timedelta(seconds=3)
# Below and above what travels with its header, in float32 elements of a block.
_COUNTS = (4, 5_000)


def _all_reduce(t: Any, d: Any, r: int, n: int, c: int) -> tuple:
    data = t.full((c,), r + 1.0)
    return [d.all_reduce(data, async_op=True)], data, t.full((c,), n * (n + 1) / 2)


def _reduce(t: Any, d: Any, r: int, n: int, c: int) -> tuple:
    data = t.full((c,), r + 1.0)
    return (
        [d.reduce(data, 0, async_op=True)],
        data[: c if r == 0 else 0],
        t.full((c if r == 0 else 0,), n * (n + 1) / 2),
    )


def _broadcast(t: Any, d: Any, r: int, n: int, c: int) -> tuple:
    data = t.full((c,), r + 1.0)
    return [d.broadcast(data, 0, async_op=True)], data, t.ones(c)


def _all_gather(t: Any, d: Any, r: int, n: int, c: int) -> tuple:
    found = t.empty(n * c)
    work = d.all_gather_into_tensor(found, t.full((c,), r + 1.0), async_op=True)
    return [work], found, t.arange(1.0, n + 1).repeat_interleave(c)


def _reduce_scatter(t: Any, d: Any, r: int, n: int, c: int) -> tuple:
    found = t.empty(c)
    work = d.reduce_scatter_tensor(found, t.full((n * c,), r + 1.0), async_op=True)
    return [work], found, t.full((c,), n * (n + 1) / 2)


def _all_to_all(t: Any, d: Any, r: int, n: int, c: int) -> tuple:
    found = t.empty(n * c)
    work = d.all_to_all_single(found, t.full((n * c,), r + 1.0), async_op=True)
    return [work], found, t.arange(1.0, n + 1).repeat_interleave(c)


def _gather(t: Any, d: Any, r: int, n: int, c: int) -> tuple:
    outs = [t.empty(c) for _ in range(n)] if r == 0 else None
    work = d.gather(t.full((c,), r + 1.0), outs, 0, async_op=True)
    return [work], outs or [], [t.full((c,), k + 1.0) for k in range(n)] if r == 0 else []


def _scatter(t: Any, d: Any, r: int, n: int, c: int) -> tuple:
    found = t.empty(c)
    ins = [t.full((c,), k + 1.0) for k in range(n)] if r == 0 else None
    return [d.scatter(found, ins, 0, async_op=True)], found, t.full((c,), r + 1.0)


def _ring(t: Any, d: Any, r: int, n: int, c: int) -> tuple:
    found = t.empty(c)
    works = [d.isend(t.full((c,), r + 1.0), (r + 1) % n), d.irecv(found, (r - 1) % n)]
    return works, found, t.full((c,), (r - 1) % n + 1.0)


def _barrier(t: Any, d: Any, r: int, n: int, c: int) -> tuple:
    return [d.barrier(async_op=True)], t.empty(0), t.empty(0)


def _new_group(t: Any, d: Any, r: int, n: int, c: int) -> tuple:
    # Without a timeout of its own the group would have torch's half hour, whatever the first one has.
    group, data = d.new_group(list(range(n)), timeout=LIMIT), t.full((c,), r + 1.0)
    return [d.all_reduce(data, group=group, async_op=True)], data, t.full((c,), n * (n + 1) / 2)


_COLLECTIVES = (_all_reduce, _reduce, _broadcast, _all_gather, _reduce_scatter, _all_to_all, _gather, _scatter)
#: By name: each starts its call, and gives the works, what is found when they are done, and what is right.
CALLS = {make.__name__[1:]: make for make in (*_COLLECTIVES, _ring, _barrier, _new_group)}


def run(plan: dict, rank: int, pipe: Any) -> None:
    """Rank `rank` of the cell. Says ("fault", time), ("raised", time, text), ("right",) or ("wrong", text)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ.update(plan["environment"])
    if plan["way"] != "shm":
        os.environ["SMDDP_NODE"] = f"n{rank % 2}"
    try:
        _live(plan, rank, pipe)
    except BaseException as error:
        with contextlib.suppress(OSError):
            pipe.send(("raised", time.monotonic(), f"{type(error).__name__}: {error}"))
    finally:
        # Without destroy_process_group, as a script that failed ends; the manager ends who has to stay.
        if rank == plan["victim"] and plan["fault"] == "exception":
            time.sleep(60)
        os._exit(0)


def _live(plan: dict, rank: int, pipe: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(plan["file"], plan["size"])
    dist.init_process_group("smddp", store=store, rank=rank, world_size=plan["size"], timeout=LIMIT)
    count = _COUNTS[plan["seed"] % 2]

    def make(name: str) -> None:
        works, found, right = CALLS[name](torch, dist, rank, plan["size"], count)
        if rank == plan["victim"] and begun and plan["inside"]:
            _fail(plan, pipe)
        for work in works:
            work.wait()
        same = all(map(torch.equal, found, right)) if isinstance(found, list) else torch.equal(found, right)
        if not same:
            pipe.send(("wrong", name))
            os._exit(1)

    begun = False
    make("all_reduce")
    dist.barrier()
    begun = True
    if rank == plan["victim"] and not plan["inside"]:
        _fail(plan, pipe)
    make(plan["call"])
    # Who did not need the victim has a right result; what needs everybody must fail.
    dist.barrier()
    pipe.send(("right",))


def _fail(plan: dict, pipe: Any) -> None:
    pipe.send(("fault", time.monotonic(), os.getpid()))
    if plan["fault"] == "exit":
        os._exit(0)
    if plan["fault"] == "exception":
        raise RuntimeError("this rank fails before its call")
    os.kill(os.getpid(), signal.SIGKILL if plan["fault"] == "kill" else signal.SIGSTOP)
