"""Order of calls on streams, asynchronous allocation, and random calls of several groups."""

from __future__ import annotations

import os
import random
import time

from gpu.processes import NOT_RUN, Rank


def order(me: Rank) -> None:
    """Tests that calls run between earlier and later work of the caller's stream, and that no wait blocks the host."""
    import torch
    import torch.distributed as dist

    device, size = me.device, me.size
    total = float(sum(range(1, size + 1)))
    for where, stream in (("current stream", None), ("another stream", me.new_stream())):
        with me.stream(stream):
            for count in (1000, 1 << 20):
                for _ in range(20):
                    tensor = torch.zeros(count, device=device)
                    me.busy(2_000_000)
                    tensor.fill_(me.rank + 1)
                    work = dist.all_reduce(tensor, async_op=True)
                    work.wait()
                    result = tensor.clone()
                    tensor.fill_(-1)
                    me.same("stream order", f"{where} x {count}", result[::997], torch.full((count,), total)[::997])
                    future = dist.all_reduce(torch.full((count,), me.rank + 1.0, device=device), async_op=True)
                    doubled = future.get_future().then(lambda f: f.value()[0] * 2)
                    me.same(
                        "futures", f"{where} x {count}", doubled.wait()[::997], torch.full((count,), 2 * total)[::997]
                    )
    if not me.on_cuda or os.environ.get("SMDDP_CUDA_PATH") == "host":
        why = "transfers through host memory block it" if me.on_cuda else "no CUDA"
        me.record("a wait does not block the host", NOT_RUN, why)
        return
    dist.barrier()
    me.busy(2_000_000_000)  # about a second
    begun = time.perf_counter()
    tensor = torch.ones(1 << 20, device=device)
    for _ in range(10):
        dist.all_reduce(tensor, async_op=True).wait()
        dist.all_reduce(tensor)
    took = time.perf_counter() - begun
    idle = torch.cuda.current_stream().query()
    me.sync()
    whole = time.perf_counter() - begun
    good = not idle and took < 0.5 * whole
    me.check("a wait does not block the host", good, f"20 calls returned after {took:.3f} s of {whole:.3f} s")


def late(me: Rank) -> None:
    """Tests new memory, which the driver must map while other streams wait for a late rank."""
    import torch
    import torch.distributed as dist

    for attempt in range(6):
        known = torch.ones(1000, device=me.device)
        for _ in range(12):
            dist.all_reduce(known)
        me.sync()
        if me.on_cuda:
            torch.cuda.empty_cache()
        if me.rank == attempt % me.size:
            time.sleep(1)
        fresh = [torch.full((bytes_of >> 2,), 1.0, device=me.device) for bytes_of in (4 << 20, (attempt + 1) << 25)]
        for tensor in fresh:
            dist.all_reduce(tensor)
            me.same(
                "new memory beside waiting streams",
                f"round {attempt}",
                tensor[::997].cpu(),
                torch.full((tensor.numel(),), float(me.size))[::997],
            )


def soak(me: Rank) -> None:
    """Tests random calls of several groups from several streams, with inputs overwritten immediately."""
    import torch
    import torch.distributed as dist

    rank, size, device = me.rank, me.size, me.device
    iterations = me.given["iterations"]
    halves = [dist.new_group(range(0, size // 2)), dist.new_group(range(size // 2, size))]
    again = dist.new_group(range(size))
    half = halves[rank >= size // 2]
    groups = {
        "world": (dist.group.WORLD, range(size)),
        "again": (again, range(size)),
        "half": (half, range(size // 2) if rank < size // 2 else range(size // 2, size)),
    }
    # On the device, so that no iteration waits for a copy.
    numbers = {(len(m), m[0]): torch.tensor(list(m), device=device) for _, m in groups.values()}
    streams = [me.new_stream() for _ in range(3)]
    wrong = [torch.zeros((), dtype=torch.int64, device=device) for _ in streams]
    draw = random.Random(1)
    waiting = []
    begun = time.monotonic()

    def finish(work, index, out, wanted):
        with me.stream(streams[index]):
            work.wait()
            wrong[index].add_((out != wanted).sum())
            out.fill_(-3)

    for i in range(iterations):
        group, members = groups[draw.choice(list(groups))]
        index = draw.randrange(3)
        count = draw.choice((1, 33, 1024, 20_000, 65_536)) if i % 500 else 2 << 20
        kind = draw.choice(("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"))
        late = draw.random() < 0.3
        n, at = len(members), list(members).index(rank)
        each = [float((m + i) % 97) for m in members]
        with me.stream(streams[index]):
            if kind == "all_reduce":
                out = source = torch.full((count,), each[at], device=device)
                work = dist.all_reduce(out, group=group, async_op=True)
                wanted = sum(each)
            elif kind == "broadcast":
                out = source = torch.full((count,), each[at], device=device)
                work = dist.broadcast(out, members[i % n], group=group, async_op=True)
                wanted = each[i % n]
            elif kind == "reduce_scatter":
                source = torch.full((count * n,), each[at], device=device)
                out = torch.empty(count, device=device)
                work = dist.reduce_scatter_tensor(out, source, group=group, async_op=True)
                wanted = sum(each)
            else:
                source = torch.full((count * (n if kind == "all_to_all" else 1),), each[at], device=device)
                out = torch.empty(count * n, device=device)
                call = dist.all_to_all_single if kind == "all_to_all" else dist.all_gather_into_tensor
                work = call(out, source, group=group, async_op=True)
                wanted = ((numbers[len(members), members[0]] + i) % 97).float().repeat_interleave(count)
            if source is not out and not late:
                work.wait()
                source.fill_(-2)
        if late:
            del source
            waiting.append((work, index, out, wanted))
            if len(waiting) > 4:
                finish(*waiting.pop(0))
        else:
            finish(work, index, out, wanted)
        if i % 250 == 0:
            me.sync()
    for entry in waiting:
        finish(*entry)
    me.sync()
    count = sum(int(w) for w in wrong)
    took = time.monotonic() - begun
    me.check("soak", count == 0, f"{iterations} calls, {count} wrong elements, {took:.0f} s, {size} ranks")
