#!/usr/bin/env python3
"""Does it work on a GPU? Several processes on one device, every result held against torch's own arithmetic.

  python bench/gpu_check.py                    everything, under ten minutes
  python bench/gpu_check.py --part kill trace  some of it
  python bench/gpu_check.py --device cpu       the script itself, on CPU tensors

One line for each promise: PASS, FAIL, or "not run" with its reason. The last line counts them; the exit status is 1
if any failed. One GPU shows order, lifetimes and values; it does not show links between GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from gpu_ranks import FAIL, NOT_RUN, PASS, Rank, add_arguments, machine, no_gpu, rank_main, run, sharing

STEPS = 5
KILLED_WITHIN = 10.0


# What a rank does.


def values(me: Rank) -> None:
    """Every collective, type and reduction against what each rank can compute for itself."""
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
            # (rank + other) % 3 is symmetric: what goes comes.
            dist.all_to_all_single(out, source, sends, sends)
            wanted = joined([contribution(o, n, dtype, rank) for o, n in enumerate(sends)])
            me.same("all_to_all uneven", what, out, wanted)
    for dtype in reducing:
        for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"):
            op = getattr(dist.ReduceOp, name)
            if dtype.is_complex and name == "PRODUCT":
                continue  # torch refuses it before it asks a backend
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
    """Large ones, strided ones, coalesced ones, objects, messages."""
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
    me.judge("objects", [one["rank"] for one in found] == list(range(size)))
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
    me.judge("a barrier waits for the stream", done)


def order(me: Rank) -> None:
    """Calls come after what the caller's stream holds, results before what it gets, and no wait keeps the host."""
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
        why = "data that goes by the host keeps it" if me.on_cuda else "no CUDA"
        me.say("a wait does not keep the host", NOT_RUN, why)
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
    me.judge("a wait does not keep the host", good, f"20 calls returned after {took:.3f} s of {whole:.3f} s")


def late(me: Rank) -> None:
    """New memory while other streams wait for a rank that is late: the driver has to map it beside them."""
    import torch
    import torch.distributed as dist

    for turn in range(6):
        known = torch.ones(1000, device=me.device)
        for _ in range(12):
            dist.all_reduce(known)
        me.sync()
        if me.on_cuda:
            torch.cuda.empty_cache()
        if me.rank == turn % me.size:
            time.sleep(1)
        fresh = [torch.full((bytes_of >> 2,), 1.0, device=me.device) for bytes_of in (4 << 20, (turn + 1) << 25)]
        for tensor in fresh:
            dist.all_reduce(tensor)
            me.same(
                "new memory beside waiting streams",
                f"turn {turn}",
                tensor[::997].cpu(),
                torch.full((tensor.numel(),), float(me.size))[::997],
            )


def formats(me: Rank) -> None:
    """With SMDDP_WIRE_FORMAT a device's tensors come to what the host's do."""
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


def soak(me: Rank) -> None:
    """Random calls of several groups from several streams, inputs overwritten at once."""
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
    me.judge("soak", count == 0, f"{iterations} calls, {count} wrong elements, {took:.0f} s, {size} ranks")


def kill(me: Rank) -> None:
    """One rank is killed while data moves: the others raise PeerLostError in time, and the device goes on."""
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
        me.judge("kill", False, "no PeerLostError within 40 s")
        return
    took = raised - float(mark.read_text())
    me.judge("kill", took < KILLED_WITHIN and alive == 8, f"PeerLostError {took:.2f} s after the kill: {error}"[:160])
    me.judge("kill names the rank", me.given["killed"] in error.ranks, str(error.ranks))


def trace(me: Rank) -> None:
    """The profiler sees no kernel between the marks of a large all_gather, one in a small one, few in a reduction."""
    import torch
    import torch.distributed as dist

    if not me.on_cuda:
        me.say("no kernels in all_gather", NOT_RUN, "no CUDA")
        return
    from torch.profiler import ProfilerActivity, profile

    tensor = torch.ones(4 << 20, device=me.device)
    out = torch.empty(me.size * tensor.numel(), device=me.device)
    # Of our kernels, by trace: blocks of the launches.
    grids: list[set[int]] = []

    def seen(call: Callable[[], object]) -> tuple[list[str], list[str]]:
        call()
        me.sync()
        dist.barrier()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            for _ in range(10):
                call()
            me.sync()
        profiler.export_chrome_trace(str(me.folder / f"trace{me.rank}.json"))
        told = json.loads((me.folder / f"trace{me.rank}.json").read_text())["traceEvents"]
        ours = [event["args"] for event in told if event.get("name", "").startswith("smddp_") and "args" in event]
        grids.append({args["grid"][0] for args in ours if "grid" in args})
        on_device = [e.name for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        # Copies, what torch's own ranges and the profiler's synchronisation records look like on the device's line.
        others = ("memcpy", "memset", "smddp:", "stream", "event", "context")
        own = [name for name in on_device if not name.lower().startswith(others)]
        return own, on_device

    # (name, call, the rank that is only read from)
    gathers = (
        ("all_gather", lambda: dist.all_gather_into_tensor(out, tensor), None),
        ("broadcast", lambda: dist.broadcast(tensor, 0), 0),
        ("all_to_all", lambda: dist.all_to_all_single(torch.empty_like(tensor), tensor), None),
    )
    for name, call, root in gathers:
        kernels, events = seen(call)
        told = f"{len(events)} device events in 10 calls, kernels: {sorted(set(kernels)) or 'none'}"
        me.judge(f"no kernels in {name}", not kernels and (len(events) > 0 or me.rank == root), told)
    few, all_few = tensor[:256], out[: 256 * me.size]
    kernels, events = seen(lambda: dist.all_gather_into_tensor(all_few, few))
    copies = [name for name in events if name.lower().startswith("memcpy")]
    told = f"in 10 calls {sorted(set(kernels))} x {len(kernels)}, {len(copies)} copies"
    me.judge("a kernel alone in a small all_gather", set(kernels) == {"smddp_copy"} and not copies, told)
    kernels, events = seen(lambda: dist.all_reduce(tensor))
    me.judge("kernels in all_reduce", 0 < len(set(kernels)) <= 2, f"{sorted(set(kernels))} x {len(kernels)}")
    allowed = int(os.environ.get("SMDDP_CUDA_SMS", "8"))
    took = grids[-1]
    me.judge("multiprocessors of all_reduce", took == {allowed}, f"{sorted(took)} of {allowed} that it may take")


def make_model():
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x):
            batch, length, width = x.shape
            q, k, v = self.qkv(self.norms[0](x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
            return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(101, 64)
            self.blocks = nn.ModuleList([Block(64), Block(64)])
            self.head = nn.Linear(64, 101)

        def forward(self, ids):
            x = self.embed(ids)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    torch.manual_seed(3)
    return Transformer(), Block


def training(me: Rank) -> None:
    """DDP, FSDP1 and FSDP2 train a small transformer to the losses of one process on the CPU."""
    import torch
    import torch.distributed as dist
    from torch import nn

    device, size = me.device, me.size
    data = torch.Generator().manual_seed(5)
    batches = [torch.randint(101, (2 * size, 17), generator=data) for _ in range(STEPS)]

    def losses(model, where, part, parts, optimizer=None) -> list[float]:
        optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.2)
        found = []
        for ids in batches:
            ids = ids.chunk(parts)[part].to(where)
            logits = model(ids[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            mean = loss.detach().clone()
            if parts > 1:
                dist.all_reduce(mean, dist.ReduceOp.AVG)
            found.append(float(mean))
        return found

    wanted = losses(make_model()[0], "cpu", 0, 1)

    def compare(name: str, model, optimizer=None) -> None:
        found = losses(model, device, me.rank, size, optimizer)
        gap = max(abs(a - b) / abs(b) for a, b in zip(found, wanted))
        me.judge(name, gap < 5e-5 and wanted[-1] < wanted[0], f"losses differ by {gap:.1e} from the CPU's at most")

    ids = [device] if me.on_cuda else None
    compare("DDP", nn.parallel.DistributedDataParallel(make_model()[0].to(device), device_ids=ids))
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    hooked = nn.parallel.DistributedDataParallel(make_model()[0].to(device), device_ids=ids)
    hooked.register_comm_hook(None, default_hooks.allreduce_hook)
    compare("DDP with a hook", hooked)
    import functools

    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    plain, block = make_model()
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={block})
    compare(
        "FSDP1",
        FullyShardedDataParallel(plain.to(device), auto_wrap_policy=policy, device_id=device, use_orig_params=True),
    )
    try:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
    except ImportError:
        me.say("FSDP2", NOT_RUN, "this torch has none")
        return
    plain, _ = make_model()
    plain.to(device)
    mesh = init_device_mesh(device.type, (size,))
    for layer in plain.blocks:
        fully_shard(layer, mesh=mesh)
    compare("FSDP2", fully_shard(plain, mesh=mesh))


def bad_input(me: Rank) -> None:
    """A clear error before anything moves, and a group that goes on."""
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
            me.judge(name, not missing, f"{type(error).__name__}: {error}"[:150])
        except Exception as error:
            me.judge(name, False, f"{type(error).__name__} instead: {error}"[:200])
        else:
            me.judge(name, False, "no error")
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
            me.say(name, NOT_RUN, "no CUDA")
    else:
        freed = torch.ones(1000, device=device)
        freed.untyped_storage().resize_(0)
        refused("freed memory", (ValueError, RuntimeError), (), lambda: dist.all_reduce(freed))

        def captured() -> None:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                dist.all_reduce(one)

        refused("capture", RuntimeError, ("CUDA graph",), captured)
        if torch.cuda.device_count() < 2:
            me.say("wrong device", NOT_RUN, "it takes two GPUs")
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


def offload(me: Rank) -> None:
    """Activation offload: the copies run beside the computation, memory falls as computed, time hardly grows."""
    import torch

    name = "offload"
    if not me.on_cuda:
        me.say(name, NOT_RUN, "no CUDA")
        return
    try:
        import transformers  # noqa: F401
    except ImportError:
        me.say(name, NOT_RUN, "transformers is not installed")
        return
    import statistics

    # A step in 32 bits would take a second.
    torch.backends.cuda.matmul.allow_tf32 = True
    import offload_memory
    from smddp.sagemaker import offload
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrappers
    from torch.profiler import ProfilerActivity, profile

    horizon = 2
    sizes = argparse.Namespace(layers=12, hidden=2048, tokens=2048, batch=4, device=str(me.device))
    own = wrappers.OffloadWrapper.forward
    medians, peaks, losses, overlap = {}, {}, {}, 0.0
    for kind in ("plain", "offloaded"):
        offload.reset()
        made = whole = offload_memory.checkpointed(offload_memory.model(sizes))
        if kind == "offloaded":
            wrappers.OffloadWrapper.forward = offload.prefetching_forward(own, lambda: horizon)
            whole = wrappers.offload_wrapper(made)
        ids = torch.randint(0, 512, (sizes.batch, sizes.tokens), generator=torch.Generator().manual_seed(1))
        ids = ids.to(me.device)

        def step(whole=whole, made=made, ids=ids):
            loss = whole(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            made.zero_grad(set_to_none=False)
            return loss.detach()

        try:
            for _ in range(3):
                losses[kind] = float(step())
            counter = offload_memory.OnGpu()
            with counter:
                step()
            peaks[kind] = counter.largest
            times = []
            for _ in range(10):
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                step()
                end.record()
                me.sync()
                times.append(begin.elapsed_time(end))
            medians[kind] = statistics.median(times)
            if kind == "offloaded":
                with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                    step()
                    me.sync()
                overlap = overlapped(profiler.events())
        finally:
            wrappers.OffloadWrapper.forward = own
        del whole, made, step
        torch.cuda.empty_cache()
    ratio = medians["offloaded"] / medians["plain"]
    # One layer's input is kept on the device for each of the horizon's layers and the one at work.
    layer = sizes.batch * sizes.tokens * sizes.hidden * 4
    saved, promised = peaks["plain"] - peaks["offloaded"], (sizes.layers - horizon - 2) * layer
    me.judge("offload: step time", ratio <= 1.05, f"{ratio:.3f} of no offload ({medians['plain']:.1f} ms)")
    me.judge("offload: peak memory", saved >= 0.95 * promised, f"{saved >> 20} MiB less, computed {promised >> 20} MiB")
    me.judge("offload: overlap", overlap >= 0.8, f"{overlap:.0%} of the copies' time has kernels beside it")
    me.judge("offload: losses", losses["plain"] == losses["offloaded"], f"{losses}")


def overlapped(events) -> float:
    """The part of host-device copies' time during which kernels ran."""
    import torch

    on_device = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
    spans = {
        copies: sorted(
            (e.time_range.start, e.time_range.end)
            for e in on_device
            if copies == any(way in e.name for way in ("HtoD", "DtoH"))
        )
        for copies in (True, False)
    }
    busy = []
    for start, end in spans[False]:
        if busy and start <= busy[-1][1]:
            busy[-1][1] = max(busy[-1][1], end)
        else:
            busy.append([start, end])
    total = sum(end - start for start, end in spans[True])
    covered = sum(max(0, min(end, b) - max(start, a)) for start, end in spans[True] for a, b in busy)
    return covered / total if total else 0.0


CASES = {
    f.__name__: f for f in (values, order, late, formats, soak, kill, trace, training, bad_input, offload)
}  # fmt: skip


# What is run.


class Report:
    """Prints the table and counts."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.counts = {PASS: 0, FAIL: 0, NOT_RUN: 0}

    def case(self, label: str, case: str, size: int, seconds: float, env=None, **given) -> None:
        begun = time.monotonic()

        def whole(rank: int) -> dict[str, str]:
            # MPS does not promise that its other clients go on where one is killed.
            alone = {"CUDA_MPS_PIPE_DIRECTORY": "/nowhere"} if "killed" in given else {}
            return {**(env(rank) if env else {}), **alone}

        found = run(os.path.abspath(__file__), case, size, seconds, device=self.arguments.device, env=whole, **given)
        for name, verdict, detail in found:
            self.line(label, name, verdict, detail)
        print(f"  {'':<34} {time.monotonic() - begun:.0f} s", flush=True)

    def line(self, label: str, name: str, verdict: str, detail: str) -> None:
        self.counts[verdict] += 1
        print(f"{verdict:<8} {label:<26} {name:<36} {' '.join(detail.split())}", flush=True)


def segments(report: Report) -> dict[str, Callable[[int], dict[str, str]]]:
    if report.arguments.device == "cpu":
        return {"": lambda rank: {}}
    return {
        "": lambda rank: {"PYTORCH_CUDA_ALLOC_CONF": ""},
        " expandable": lambda rank: {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    }


def part_values(report: Report) -> None:
    for size in (2, 4, 8):
        for label, env in segments(report).items():
            # Neither the second allocator nor the largest group need to see every type again.
            types = ["torch.float32", "torch.bfloat16", "torch.int64", "torch.uint8"] if label or size > 4 else None
            report.case(f"values {size} ranks{label}", "values", size, 150, env, types=types)


def part_order(report: Report) -> None:
    for label, env in segments(report).items():
        report.case(f"order 4 ranks{label}", "order", 4, 90, env)


def part_host(report: Report) -> None:
    """The way of devices that cannot reach each other."""

    def env(rank: int) -> dict[str, str]:
        return {"SMDDP_CUDA_PATH": "host"}

    few = ["torch.float32", "torch.bfloat16", "torch.uint8"]
    report.case("by the host, 4 ranks", "values", 4, 150, env, types=few)
    report.case("by the host, 4 ranks", "order", 4, 90, env)
    report.case("by the host, 4 ranks", "kill", 4, 90, env, killed=3, timeout=60)


def part_late(report: Report) -> None:
    for label, env in segments(report).items():
        report.case(f"late, 4 ranks{label}", "late", 4, 60, env)


def part_soak(report: Report) -> None:
    for label, env in segments(report).items():
        share = report.arguments.iterations if not label else max(report.arguments.iterations // 10, 100)
        report.case(f"soak{label}", "soak", 4, 180, env, iterations=share)


def part_kill(report: Report) -> None:
    for size in (2, 4):
        report.case(f"kill of 1 of {size}", "kill", size, 90, killed=size - 1, timeout=60)


def part_trace(report: Report) -> None:
    # One rank has its own opinion of what a reduction may take.
    report.case("trace 4 ranks", "trace", 4, 90, lambda rank: {"SMDDP_CUDA_SMS": "3"} if rank == 3 else {})


def part_training(report: Report) -> None:
    for label, env in segments(report).items():
        report.case(f"training 4 ranks{label}", "training", 4, 120, env)


def part_nodes(report: Report) -> None:
    few = ["torch.float32", "torch.bfloat16", "torch.int32"]
    ways = {"tcp": {"SMDDP_TRANSPORT": "tcp"}}
    fabric = {"SMDDP_TRANSPORT": "fabric", "SMDDP_FABRIC_PROVIDER": "tcp"}
    reason = no_libfabric()
    if reason is None:
        ways["libfabric"] = fabric
    else:
        report.line("2 nodes over libfabric", "values", NOT_RUN, reason)
    for way, settings in ways.items():

        def env(rank: int, settings=settings) -> dict[str, str]:
            return {**settings, "SMDDP_NODE": f"node{rank // 2}"}

        report.case(f"2 nodes over {way}", "values", 4, 150, env, types=few)
        report.case(f"2 nodes over {way}", "training", 4, 120, env)
        report.case(f"2 nodes over {way}", "kill", 4, 90, env, killed=3, timeout=60)
    for wire_format in ("bf16", "f16", "int8"):

        def coded(rank: int, wire_format=wire_format) -> dict[str, str]:
            return {"SMDDP_TRANSPORT": "tcp", "SMDDP_NODE": f"node{rank // 2}", "SMDDP_WIRE_FORMAT": wire_format}

        report.case("2 nodes over tcp", "formats", 4, 90, coded)


def no_libfabric() -> str | None:
    import ctypes

    try:
        ctypes.CDLL(os.environ.get("SMDDP_LIBFABRIC") or "libfabric.so.1")
    except OSError as error:
        return f"{error}; SMDDP_LIBFABRIC may name the file"
    return None


def part_bad(report: Report) -> None:
    report.case("bad input 2 ranks", "bad_input", 2, 90)


def part_offload(report: Report) -> None:
    report.case("offload", "offload", 1, 180)


PARTS = {
    "values": part_values,
    "order": part_order,
    "bad": part_bad,
    "trace": part_trace,
    "kill": part_kill,
    "training": part_training,
    "host": part_host,
    "nodes": part_nodes,
    "soak": part_soak,
    "late": part_late,
    "offload": part_offload,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS), help="only these")
    parser.add_argument("--iterations", type=int, default=10_000, help="of the soak")
    add_arguments(parser)
    arguments = parser.parse_args()
    if arguments.case:
        return rank_main(CASES, arguments)
    if arguments.device != "cpu":
        reason = no_gpu()
        if reason is not None:
            print(f"nothing was checked: {reason}. `--device cpu` checks the script itself.")
            return 2
    report = Report(arguments)
    begun = time.monotonic()
    with sharing(arguments.device != "cpu" and not arguments.turns) as how:
        if arguments.device != "cpu":
            print(f"{machine()}; {how}", flush=True)
        for part in arguments.part:
            PARTS[part](report)
    counts = report.counts
    print(
        f"\n{'FAIL' if counts[FAIL] else 'PASS'}: {counts[PASS]} passed, {counts[FAIL]} failed, "
        f"{counts[NOT_RUN]} not run, {time.monotonic() - begun:.0f} s"
    )
    return 1 if counts[FAIL] else 0


if __name__ == "__main__":
    sys.exit(main())
