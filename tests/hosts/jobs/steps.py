"""Collectives one after the other, until one raises: prints "step N" and the error, and ends with status 3.

Sizes alternate, so that a fault meets small calls and calls that are under way for long.
"""

import argparse
import datetime
import os
import signal
import threading

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--backend", default="smddp")
parser.add_argument("--timeout", type=float, default=60.0, help="of the group, in seconds")
parser.add_argument("--steps", type=int, default=100_000)
parser.add_argument("--print-after", type=int, help="print a line one second after this step, independent of the group")
parser.add_argument("--absent", type=int, help="this rank skips the step after --print-after")
parser.add_argument("--child", action="store_true", help="ranks fork a child, which stays, as data loaders have them")
arguments = parser.parse_args()
dist.init_process_group(arguments.backend, timeout=datetime.timedelta(seconds=arguments.timeout))
rank, size = dist.get_rank(), dist.get_world_size()
try:
    for step in range(arguments.steps):
        count = 1 << (10 if step % 2 else 18)
        dist.all_reduce(torch.ones(count))
        dist.all_gather_into_tensor(torch.empty(size * count), torch.ones(count))
        if step % 10 == 5:
            print(f"step {step}", flush=True)
        if step == arguments.print_after:
            if arguments.child and os.fork() == 0:
                # The lab kills a rank's process group, and waits for the end of its output.
                os.setsid()
                os.closerange(0, 3)
                signal.pause()
            if rank == 0:
                threading.Timer(1.0, print, ["a second later"], {"flush": True}).start()
            if rank == arguments.absent:
                signal.pause()
except Exception as error:
    ranks = getattr(error, "ranks", [getattr(error, "rank", None)])
    print(f"error {type(error).__name__} ranks={ranks}: {error}", flush=True)
    os._exit(3)
dist.destroy_process_group()
