"""Step time, memory and copies of activation offload."""

from __future__ import annotations

import argparse

from gpu.processes import NOT_RUN, Rank


def offload(me: Rank) -> None:
    """Tests that copies overlap with computation, that memory falls as computed, and that the step time stays."""
    import torch

    name = "offload"
    if not me.on_cuda:
        me.record(name, NOT_RUN, "no CUDA")
        return
    try:
        import transformers  # noqa: F401
    except ImportError:
        me.record(name, NOT_RUN, "transformers is not installed")
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
    # The device keeps the inputs of the current layer and of the layers of the horizon.
    layer = sizes.batch * sizes.tokens * sizes.hidden * 4
    saved, promised = peaks["plain"] - peaks["offloaded"], (sizes.layers - horizon - 2) * layer
    me.check("offload: step time", ratio <= 1.05, f"{ratio:.3f} of no offload ({medians['plain']:.1f} ms)")
    me.check("offload: peak memory", saved >= 0.95 * promised, f"{saved >> 20} MiB less, computed {promised >> 20} MiB")
    me.check("offload: overlap", overlap >= 0.8, f"kernels ran during {overlap:.0%} of the copies' time")
    me.check("offload: losses", losses["plain"] == losses["offloaded"], f"{losses}")


def overlapped(events) -> float:
    """Returns the fraction of the host-device copies' time during which kernels ran."""
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
