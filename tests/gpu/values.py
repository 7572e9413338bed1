"""Results of collectives, compared bit for bit with values that each rank computes locally."""

from __future__ import annotations

import os
from collections.abc import Callable

from gpu.processes import Rank


def values(me: Rank) -> None:
    """Tests every collective, type and reduction."""
    import torch
    import torch.distributed as dist
    from backend.oracle import MOVING, REDUCING, contribution, reduced
    from smddp.torch.dtypes import code_of, reduction

    rank, size, device = me.rank, me.size, me.device
    moving = [t for t in MOVING if me.given.get("types") is None or str(t) in me.given["types"]]
    reducing = [t for t in REDUCING if t in moving]

    def mine(count, dtype, salt=0):
        return contribution(rank, count, dtype, salt).to(device)

    def everyone(count, dtype, salt=0):
        return [contribution(other, count, dtype, salt) for other in range(size)]

    def joined(parts):
        # Not every type can be concatenated.
        return torch.cat([part.view(torch.uint8) for part in parts]).view(parts[0].dtype)

    def empty(count, dtype):
        return torch.empty(count, dtype=dtype, device=device)

    for dtype in moving:
        for count in (1, 7, 1000, 65_537):
            what = f"{dtype} x {count}"
            every = everyone(count, dtype)
            whole = joined(every)
            out = empty(size * count, dtype)
            dist.all_gather_into_tensor(out, mine(count, dtype))
            me.same("all_gather", what, out, whole)
            out = empty(size * count, dtype)
            place = out[rank * count : (rank + 1) * count]
            place.copy_(mine(count, dtype))
            dist.all_gather_into_tensor(out, place)
            me.same("all_gather in place", what, out, whole)
            parts = [empty(count + other, dtype) for other in range(size)]
            dist.group.WORLD.allgather([parts], [mine(count + rank, dtype)]).wait()
            for other, part in enumerate(parts):
                me.same("all_gather uneven", what, part, contribution(other, count + other, dtype))
            root = count % size
            out = mine(count, dtype) if rank == root else empty(count, dtype)
            dist.broadcast(out, root)
            me.same("broadcast", what, out, every[root])
            parts = [empty(count, dtype) for _ in range(size)] if rank == root else None
            dist.gather(mine(count, dtype), parts, root)
            for other, part in enumerate(parts or ()):
                me.same("gather", what, part, every[other])
            out = empty(count, dtype)
            sources = [contribution(o, count, dtype, 1).to(device) for o in range(size)] if rank == root else None
            dist.scatter(out, sources, root)
            me.same("scatter", what, out, contribution(rank, count, dtype, 1))
            out = empty(size * count, dtype)
            dist.all_to_all_single(out, joined([contribution(rank, count, dtype, o) for o in range(size)]).to(device))
            me.same("all_to_all", what, out, joined([contribution(o, count, dtype, rank) for o in range(size)]))
            sends = [(rank + other) % 3 * count for other in range(size)]
            source = joined([contribution(rank, n, dtype, o) for o, n in enumerate(sends)]).to(device)
            out = empty(sum(sends), dtype)
            # (rank + other) % 3 is symmetric: equal sizes in both directions.
            dist.all_to_all_single(out, source, sends, sends)
            wanted = joined([contribution(o, n, dtype, rank) for o, n in enumerate(sends)])
            me.same("all_to_all uneven", what, out, wanted)
    for dtype in reducing:
        for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"):
            op = getattr(dist.ReduceOp, name)
            if dtype.is_complex and name == "PRODUCT":
                continue  # torch rejects it before it calls a backend
            try:
                reduction(dist.ReduceOp(op), dtype, code_of(dtype))
            except (TypeError, ValueError):
                continue
            for count in (1, 1000, 65_537):
                what = f"{name} {dtype} x {count}"
                wanted = reduced(everyone(count, dtype), name)
                out = mine(count, dtype)
                dist.all_reduce(out, op)
                me.same("all_reduce", what, out, wanted)
                out = mine(count, dtype)
                dist.reduce(out, count % size, op)
                if rank == count % size:
                    me.same("reduce", what, out, wanted)
                wanted = reduced(everyone(size * count, dtype), name)[rank * count : (rank + 1) * count]
                source = mine(size * count, dtype)
                out = empty(count, dtype)
                dist.reduce_scatter_tensor(out, source, op)
                me.same("reduce_scatter", what, out, wanted)
                place = source[rank * count : (rank + 1) * count]
                dist.reduce_scatter_tensor(place, source, op)
                me.same("reduce_scatter in place", what, place, wanted)
                parts = [mine(count, dtype, o) for o in range(size)]
                out = empty(count, dtype)
                dist.reduce_scatter(out, parts, op)
                me.same("reduce_scatter list", what, out, reduced(everyone(count, dtype, rank), name))
    factor = dist._make_nccl_premul_sum(0.5)
    out = mine(1000, torch.float32)
    dist.all_reduce(out, factor)
    me.same("premul_sum", "float32", out, reduced(everyone(1000, torch.float32), "SUM") * 0.5)
    more_values(me, mine, everyone, joined)


def more_values(me: Rank, mine: Callable, everyone: Callable, joined: Callable) -> None:
    """Tests large, strided and coalesced tensors, objects, and messages."""
    import torch
    import torch.distributed as dist
    from backend.oracle import contribution, reduced

    rank, size, device = me.rank, me.size, me.device
    count, f32 = (4 << 20) + 3, torch.float32
    out = mine(count, f32)
    dist.all_reduce(out)
    me.same("16 MiB", "all_reduce", out, reduced(everyone(count, f32), "SUM"))
    out = torch.empty(size * count, device=device)
    dist.all_gather_into_tensor(out, mine(count, f32))
    me.same("16 MiB", "all_gather", out, joined(everyone(count, f32)))
    base = torch.zeros(100, 2, device=device)
    base[:, 1] = mine(100, f32)
    dist.all_reduce(base[:, 1])
    me.same("strided", "all_reduce", base[:, 1].clone(), reduced(everyone(100, f32), "SUM"))
    base = torch.zeros(size * 100, 2, device=device)
    dist.all_gather_into_tensor(base[:, 0], mine(200, f32)[::2])
    me.same("strided", "all_gather", base[:, 0].clone(), joined([t[::2].clone() for t in everyone(200, f32)]))
    with dist._coalescing_manager(async_ops=True) as block:
        several = [mine(n, f32, n) for n in (5, 50, 500)]
        for tensor in several:
            dist.all_reduce(tensor)
    block.wait()
    for tensor in several:
        n = tensor.numel()
        me.same("coalesced", f"all_reduce of {n}", tensor, reduced(everyone(n, f32, n), "SUM"))
    found = [None] * size
    dist.all_gather_object(found, {"rank": rank, "tensor": torch.full((2,), rank)})
    me.check("objects", [one["rank"] for one in found] == list(range(size)))
    right, left = (rank + 1) % size, (rank - 1) % size
    for dtype in (f32, torch.bfloat16, torch.int64):
        me.busy()
        inbox = torch.empty(1000, dtype=dtype, device=device)
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, mine(1000, dtype), right), dist.P2POp(dist.irecv, inbox, left)]
        )
        for work in works:
            work.wait()
        me.same("messages", str(dtype), inbox, contribution(left, 1000, dtype))
    me.busy()
    dist.barrier()
    done = not me.on_cuda or torch.cuda.current_stream().query()
    me.check("a barrier waits for the stream", done)


def formats(me: Rank) -> None:
    """Tests that SMDDP_WIRE_FORMAT gives tensors of the device the same bits as tensors of the host."""
    import torch
    import torch.distributed as dist

    name = f"{os.environ.get('SMDDP_WIRE_FORMAT')} between nodes"
    for count in (20_000, 300_001):
        generator = torch.Generator().manual_seed(7 * me.rank)
        # Sums of whole numbers are exact in any order.
        given = torch.randint(-1000, 1000, (count * me.size,), generator=generator).float()
        found = []
        for device in ("cpu", me.device):
            whole = given.clone().to(device)
            block, gathered = whole[:count].clone(), torch.empty_like(whole)
            scattered = torch.empty_like(block)
            dist.all_gather_into_tensor(gathered, block)
            dist.reduce_scatter_tensor(scattered, whole)
            dist.all_reduce(whole)
            found.append([gathered.cpu(), scattered.cpu(), whole.cpu()])
        for what, host, device in zip(("all_gather", "reduce_scatter", "all_reduce"), *found):
            me.same(name, f"{what} of {count}", device, host)
