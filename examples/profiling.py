"""Profiling of a step: torch.profiler's timeline with the collectives, and smddp's timeline of all ranks.

torchrun --nproc-per-node 2 examples/profiling.py --steps 8 --out DIR
smddp trace DIR/rank*.dump.json -o DIR/ranks.json

The first command writes DIR/rank*.trace.json, one per rank, with the collectives, their sizes and their paths. The
second writes one file with all ranks' collectives from smddp's recorder, which is always on. Open both at
https://ui.perfetto.dev.
"""

from pathlib import Path

import common
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule


def main():
    def extend(p):
        p.add_argument("--out", metavar="DIR", default="profile")

    o = common.arguments(__doc__, extend)
    common.start(o)
    rank, out, text = dist.get_rank(), Path(o.out), common.Text()
    out.mkdir(parents=True, exist_ok=True)
    model = DistributedDataParallel(common.make(o))
    # The first steps are left out: they allocate.
    watched = schedule(wait=1, warmup=1, active=max(1, o.steps - 2))
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, schedule=watched) as profiler:
        for step in range(o.steps):
            common.timed_pass(model, text.batch(step * dist.get_world_size() + rank, o.batch, o.context))
            profiler.step()
    profiler.export_chrome_trace(str(out / f"rank{rank}.trace.json"))
    if o.backend == "smddp":
        import smddp

        smddp.dump(str(out / f"rank{rank}.dump.json"))
    if rank == 0:
        print("the collectives of rank 0, by the time they took:")
        rows = [row for row in profiler.key_averages() if "all_reduce" in row.key or "allreduce" in row.key]
        for row in sorted(rows, key=lambda row: -row.cpu_time_total):
            print(f"{row.key:60} {row.count:5} calls {row.cpu_time_total / row.count:10.1f} us each")
        print(f"timelines are in {out}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
