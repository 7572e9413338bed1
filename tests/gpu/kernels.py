"""Kernels and copies of collectives, as torch's profiler records them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

from gpu.processes import NOT_RUN, Rank


def trace(me: Rank) -> None:
    """Tests the number of kernels: none in a large all_gather, one in a small one, few in a reduction."""
    import torch
    import torch.distributed as dist

    if not me.on_cuda:
        me.record("no kernels in all_gather", NOT_RUN, "no CUDA")
        return
    from torch.profiler import ProfilerActivity, profile

    tensor = torch.ones(4 << 20, device=me.device)
    out = torch.empty(me.size * tensor.numel(), device=me.device)
    # Grid sizes of the launches of smddp's kernels, by trace.
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
        events = json.loads((me.folder / f"trace{me.rank}.json").read_text())["traceEvents"]
        ours = [event["args"] for event in events if event.get("name", "").startswith("smddp_") and "args" in event]
        grids.append({args["grid"][0] for args in ours if "grid" in args})
        on_device = [e.name for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        # Copies, torch's ranges, and the profiler's records of synchronization on the device.
        others = ("memcpy", "memset", "smddp:", "stream", "event", "context")
        own = [name for name in on_device if not name.lower().startswith(others)]
        return own, on_device

    # (name, call, rank that copies nothing)
    gathers = (
        ("all_gather", lambda: dist.all_gather_into_tensor(out, tensor), None),
        ("broadcast", lambda: dist.broadcast(tensor, 0), 0),
        ("all_to_all", lambda: dist.all_to_all_single(torch.empty_like(tensor), tensor), None),
    )
    for name, call, root in gathers:
        kernels, events = seen(call)
        detail = f"{len(events)} device events in 10 calls, kernels: {sorted(set(kernels)) or 'none'}"
        me.check(f"no kernels in {name}", not kernels and (len(events) > 0 or me.rank == root), detail)
    few, all_few = tensor[:256], out[: 256 * me.size]
    kernels, events = seen(lambda: dist.all_gather_into_tensor(all_few, few))
    copies = [name for name in events if name.lower().startswith("memcpy")]
    detail = f"in 10 calls {sorted(set(kernels))} x {len(kernels)}, {len(copies)} copies"
    me.check("only a kernel in a small all_gather", set(kernels) == {"smddp_copy"} and not copies, detail)
    kernels, events = seen(lambda: dist.all_reduce(tensor))
    me.check("kernels in all_reduce", 0 < len(set(kernels)) <= 2, f"{sorted(set(kernels))} x {len(kernels)}")
    allowed = int(os.environ.get("SMDDP_CUDA_SMS", "8"))
    took = grids[-1]
    me.check("multiprocessors of all_reduce", took == {allowed}, f"{sorted(took)} with a limit of {allowed}")
