"""One all_reduce of all ranks: prints what it gave, or the error, and ends with status 3 on an error.

--set RANK:NAME=VALUE sets a variable of one rank.
"""

import argparse
import datetime
import os
import sys

parser = argparse.ArgumentParser()
parser.add_argument("--backend", default="smddp")
parser.add_argument("--set", action="append", default=[])
arguments = parser.parse_args()
for rank, _, setting in (text.partition(":") for text in arguments.set):
    if rank == os.environ["RANK"]:
        name, _, value = setting.partition("=")
        os.environ[name] = value

import torch
import torch.distributed as dist

try:
    dist.init_process_group(arguments.backend, timeout=datetime.timedelta(seconds=20))
    tensor = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(tensor)
    print(f"sum {tensor.item():g}", flush=True)
    if arguments.backend == "smddp":
        import smddp

        print(f"paths {smddp.paths()}", flush=True)
    dist.destroy_process_group()
except Exception as error:
    print(f"error {type(error).__name__}: {error}", flush=True)
    sys.stdout.flush()
    # The end of the interpreter would wait for the others' answers in torch's own store.
    os._exit(3)
