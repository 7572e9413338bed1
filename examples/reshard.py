"""Resumes a checkpoint with another number of ranks: FSDP2, saved and loaded by torch.distributed.checkpoint.

torchrun --nproc-per-node 4 examples/reshard.py --save DIR --steps 20
torchrun --nproc-per-node 2 examples/reshard.py --load DIR --steps 20

Each rank writes its shards of parameters and optimizer, and reads the parts that overlap with its new ones. A step's
batch is distributed over the present ranks, so the second run prints the losses of an uninterrupted first run.
"""

import common
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

SEQUENCES = 8  # of a step, for 1, 2, 4 or 8 ranks


def state_of(model, optimizer, step):
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "step": torch.tensor(step)}


def main():
    def extend(p):
        p.add_argument("--save", metavar="DIR", help="write a checkpoint there after half of the steps")
        p.add_argument("--load", metavar="DIR", help="go on from that one")

    o = common.arguments(__doc__, extend)
    common.start(o)
    rank, size = dist.get_rank(), dist.get_world_size()
    if SEQUENCES % size:
        raise SystemExit(f"{SEQUENCES} sequences of a step cannot be shared out evenly among {size} ranks")
    model = common.make(o)
    mesh = init_device_mesh("cpu", (size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), o.rate)
    begin, text = 0, common.Text()
    if o.load:
        state = state_of(model, optimizer, 0)
        dcp.load(state, checkpoint_id=o.load)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        begin = int(state["step"])
    for step in range(begin, o.steps):
        mine = text.batch(step, SEQUENCES, o.context).chunk(size)[rank]
        loss = common.loss_of(model, mine)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = common.mean(loss.detach())
        if rank == 0:
            print(f"step {step + 1}: loss {loss:.4f}", flush=True)
        if o.save and step + 1 == o.steps // 2:
            dcp.save(state_of(model, optimizer, step + 1), checkpoint_id=o.save)
    if rank == 0:
        print(f"{size} ranks, steps {begin + 1} to {o.steps}; paths: {common.paths(o.backend)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
