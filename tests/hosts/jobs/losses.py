"""Trains the examples' GPT for a few steps and prints "losses HEX HEX ...": with DDP, with FSDP2, or in one process.

One process works on the batches of `--world` ranks. All make the same model and take the same steps.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

import common
import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("kind", choices=["ddp", "fsdp2", "one"])
parser.add_argument("--backend", default="smddp")
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--dim", type=int, default=128)
parser.add_argument("--world", type=int, default=1, help="ranks that one process stands for")
arguments = parser.parse_args()
torch.set_num_threads(1)
torch.manual_seed(1)
model = common.GPT(layers=2, dim=arguments.dim)
mine = range(arguments.world)
if arguments.kind != "one":
    dist.init_process_group(arguments.backend)
    mine = range(dist.get_rank(), dist.get_rank() + 1)
if arguments.kind == "ddp":
    model = torch.nn.parallel.DistributedDataParallel(model)
elif arguments.kind == "fsdp2":
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
text = common.Text(limit=1 << 20)
# Plain steps: an optimizer that divides by the gradient's size would blow up differences of rounding.
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
losses = []
for step in range(arguments.steps):
    total = torch.zeros((), dtype=torch.float64)
    for rank in mine:
        loss = common.loss_of(model, text.batch(1000 * step + rank, 2, 64)) / len(mine)
        loss.backward()
        total += loss.detach()
    optimizer.step()
    optimizer.zero_grad()
    if arguments.kind != "one":
        dist.all_reduce(total)
        total /= dist.get_world_size()
    losses.append(total.item())
print("losses " + " ".join(loss.hex() for loss in losses), flush=True)
if arguments.kind != "one":
    dist.destroy_process_group()
