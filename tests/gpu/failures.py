"""Killed ranks and invalid input."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from gpu.processes import NOT_RUN, Rank

#: Maximum time from a kill to the PeerLostError of the other ranks, in seconds.
KILLED_WITHIN = 10.0


def kill(me: Rank) -> None:
    """Tests that the other ranks raise PeerLostError soon after a rank died, and that the device stays usable."""
    import smddp
    import torch
    import torch.distributed as dist

    tensor = torch.ones(4 << 20, device=me.device)
    out = torch.empty(me.size * tensor.numel(), device=me.device)
    dist.all_reduce(torch.ones(1, device=me.device))
    me.sync()
    mark = me.folder / "killed"
    if me.rank == me.given["killed"]:

        def die() -> None:
            mark.write_text(repr(time.time()))
            os.kill(os.getpid(), 9)

        threading.Timer(1.0, die).start()
    error = None
    limit = time.monotonic() + 40
    while time.monotonic() < limit:
        try:
            for _ in range(10):
                dist.all_gather_into_tensor(out, tensor)
            me.sync()
        except smddp.PeerLostError as found:
            error = found
            break
    raised = time.time()
    me.sync()
    alive = int(torch.ones(8, device=me.device).sum())
    if error is None:
        me.check("kill", False, "no PeerLostError within 40 s")
        return
    took = raised - float(mark.read_text())
    me.check("kill", took < KILLED_WITHIN and alive == 8, f"PeerLostError {took:.2f} s after the kill: {error}"[:160])
    me.check("kill names the rank", me.given["killed"] in error.ranks, str(error.ranks))


def bad_input(me: Rank) -> None:
    """Tests that invalid input raises an error before the transfer, and that the group stays usable."""
    import smddp
    import torch
    import torch.distributed as dist

    device, size = me.device, me.size

    def usable(after: str) -> None:
        out = torch.full((3,), me.rank + 1.0, device=device)
        dist.all_reduce(out)
        me.same("the group works after bad input", after, out, torch.full((3,), sum(range(1, size + 1)) * 1.0))

    def refused(name: str, kind, words: tuple[str, ...], call: Callable[[], object]) -> None:
        try:
            call()
        except kind as error:
            missing = [word for word in words if word not in str(error)]
            me.check(name, not missing, f"{type(error).__name__}: {error}"[:150])
        except Exception as error:
            me.check(name, False, f"{type(error).__name__} instead: {error}"[:200])
        else:
            me.check(name, False, "no error")
        me.sync()
        usable(name)

    usable("nothing")
    one = torch.ones(2, device=device)
    two = torch.empty(2 * size, device="cpu" if me.on_cuda else "meta")
    refused(
        "different devices", ValueError, (str(device), str(two.device)), lambda: dist.all_gather_into_tensor(two, one)
    )
    refused("sizes", ValueError, ("(5,)",), lambda: dist.all_gather_into_tensor(torch.empty(5, device=device), one))
    refused("an expanded output", ValueError, ("one place",), lambda: dist.all_reduce(one[:1].expand(4)))
    if not me.on_cuda:
        for name in ("freed memory", "wrong device", "capture"):
            me.record(name, NOT_RUN, "no CUDA")
    else:
        freed = torch.ones(1000, device=device)
        freed.untyped_storage().resize_(0)
        refused("freed memory", (ValueError, RuntimeError), (), lambda: dist.all_reduce(freed))

        def captured() -> None:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                dist.all_reduce(one)

        refused("capture", RuntimeError, ("CUDA graph",), captured)
        if torch.cuda.device_count() < 2:
            me.record("wrong device", NOT_RUN, "needs two GPUs")
        else:
            bound = dist.new_group(device_id=torch.device("cuda", 1))
            refused("wrong device", ValueError, ("cuda:1", "cuda:0"), lambda: dist.all_reduce(one, group=bound))
    lonely = dist.new_group(range(size))
    wrong = torch.ones(10 + me.rank, device=device)

    def unequal() -> None:
        dist.all_reduce(wrong, group=lonely)
        me.sync()
        dist.all_reduce(wrong, group=lonely)

    refused("unequal sizes of ranks", smddp.MismatchError, (), unequal)
