"""Rank of a group that loses and gains ranks: repeats calls and checks each result."""

from __future__ import annotations

import contextlib
import datetime
import os
import random
import sys
import time
import traceback
from typing import Any

# Seconds to wait for the next configuration; the manager learns of every death at once.
_TOLD = 30.0
#: Timeout of each call and of each reconfiguration.
SECONDS = 20.0


def run(pipe: Any, number: int, address: tuple[str, int]) -> None:
    """Runs member `number` until the pipe closes: receives (uuid, members, handles), sends reports."""
    try:
        _Member(number, address, pipe).live()
    except (EOFError, BrokenPipeError):
        pass
    except BaseException:
        with contextlib.suppress(OSError):
            pipe.send(("failed", number, traceback.format_exc()))
    finally:
        # Pending messages to other ranks must not delay the manager.
        sys.stdout.flush()
        os._exit(0)


class _Member:
    def __init__(self, number: int, address: tuple[str, int], pipe: Any) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        self._torch, self._dist, self._pipe = torch, dist, pipe
        self._number = number
        limit = datetime.timedelta(seconds=SECONDS)
        store = dist.TCPStore(*address, is_master=False, wait_for_workers=False, timeout=limit)
        # A group of one rank, which every torch can create; the first plan adds the others.
        dist.init_process_group("smddp", store=store, rank=0, world_size=1, timeout=limit)
        self._group = dist.group.WORLD
        self._pipe.send(("handle", number, self._group.get_reconfigure_handle()))

    def live(self) -> None:
        plan = self._next(None)
        while True:
            try:
                self._join(plan)
                self._work(plan)
            except self._dist.DistBackendError as error:
                self._pipe.send(("lost", self._number, plan["uuid"], f"{type(error).__name__}: {error}"))
            plan = self._next(plan)

    def _next(self, plan: dict | None) -> dict:
        """Returns the newest plan other than `plan`."""
        if not self._pipe.poll(_TOLD):
            raise RuntimeError(f"no new configuration after {plan}")
        while self._pipe.poll(0):
            plan = self._pipe.recv()
        assert plan is not None
        return plan

    def _join(self, plan: dict) -> None:
        from smddp.torch.reconfigure import ReconfigureOptions

        limit = datetime.timedelta(seconds=SECONDS)
        options = ReconfigureOptions(plan["uuid"], plan["handles"], limit)
        self._group.reconfigure(options)

    def _work(self, plan: dict) -> None:
        dist, members = self._dist, plan["members"]
        assert dist.get_world_size() == len(members)
        assert dist.get_rank() == members.index(self._number)
        # All ranks draw the same calls.
        draw = random.Random(plan["uuid"])
        for step in range(sys.maxsize):
            self._call(draw, members, step)
            if step == 0:
                self._pipe.send(("right", self._number, plan["uuid"], time.monotonic()))
            if self._pipe.poll(0):
                return

    def _call(self, draw: random.Random, members: list[int], step: int) -> None:
        torch, dist = self._torch, self._dist
        size, me = len(members), dist.get_rank()
        kind = "all_reduce" if step == 0 else draw.choice(_KINDS)
        count = draw.choice((1, 7, 1000, 100_000))
        asynchronous = draw.random() < 0.3
        mine = torch.full((count,), float(self._number + 1))
        values = [float(member + 1) for member in members]
        work = None
        if kind == "all_reduce":
            work, found, right = dist.all_reduce(mine, async_op=asynchronous), mine, torch.full((count,), sum(values))
        elif kind == "all_gather":
            found = torch.empty(size * count)
            work = dist.all_gather_into_tensor(found, mine, async_op=asynchronous)
            right = torch.tensor(values).repeat_interleave(count)
        elif kind == "reduce_scatter":
            found = torch.empty(count)
            work = dist.reduce_scatter_tensor(found, mine.repeat(size), async_op=asynchronous)
            right = torch.full((count,), sum(values))
        elif kind == "broadcast":
            root = draw.randrange(size)
            work, found, right = (
                dist.broadcast(mine, root, async_op=asynchronous),
                mine,
                torch.full((count,), values[root]),
            )
        elif kind == "all_to_all":
            found = torch.empty(size * count)
            work = dist.all_to_all_single(found, mine.repeat(size), async_op=asynchronous)
            right = torch.tensor(values).repeat_interleave(count)
        elif kind == "ring" and size > 1:
            found = torch.empty(count)
            sent = dist.isend(mine, (me + 1) % size)
            work, right = dist.irecv(found, (me - 1) % size), torch.full((count,), values[me - 1])
            sent.wait()
        else:
            dist.barrier()
            return
        if work is not None:
            work.wait()
        assert torch.equal(found, right), f"step {step}: {kind} of {count} among {members} is wrong"


_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "ring", "barrier")
