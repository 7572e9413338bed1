"""A pipeline by torch.distributed.pipelining: the blocks of a GPT on several ranks, which send each other activations.

torchrun --nproc-per-node 4 examples/pipeline.py --backend smddp

Each step's batch is cut into microbatches; under 1F1B a rank has the forward pass of one and the backward pass of an
earlier one at a time. The last rank has the losses. `--check` trains the same model in one process beside it.
"""

import common
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B


class Stage(nn.Module):
    """This rank's part of the model: the first has the embeddings, the last what makes logits."""

    def __init__(self, model, rank, size):
        super().__init__()
        first, last = (len(model.blocks) * at // size for at in (rank, rank + 1))
        self.blocks = model.blocks[first:last]
        if rank == 0:
            self.token, self.position = model.token, model.position
        if rank == size - 1:
            self.norm, self.head = model.norm, model.head

    def forward(self, x):
        if hasattr(self, "token"):
            x = self.token(x) + self.position(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if hasattr(self, "head") else x


def loss_of(logits, ids):
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


def one_process(o, text):
    """The losses of the same model without a pipeline."""
    torch.manual_seed(1)
    model, losses = common.make(o), []
    optimizer = torch.optim.AdamW(model.parameters(), o.rate)
    for step in range(o.steps):
        ids = text.batch(step, o.batch, o.context)
        loss = loss_of(model(ids[:, :-1]), ids[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main():
    def extend(p):
        p.add_argument("--microbatches", type=int, default=4)
        p.add_argument("--check", action="store_true", help="hold the losses against those of one process")

    o = common.arguments(__doc__, extend)
    common.start(o)
    rank, size = dist.get_rank(), dist.get_world_size()
    if o.layers < size or o.batch % o.microbatches:
        rule = f"--layers {o.layers} must be {size} or more, and --microbatches {o.microbatches} a divisor"
        raise SystemExit(f"{rule} of --batch {o.batch}")
    text, last = common.Text(), rank == size - 1
    part = Stage(common.make(o), rank, size)
    stage = PipelineStage(part, rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, o.microbatches, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(part.parameters(), o.rate)
    progress, losses = common.Progress(o.steps), []
    for step in range(o.steps):
        ids = text.batch(step, o.batch, o.context)
        parts = []
        if last:
            schedule.step(target=ids[:, 1:], losses=parts)
            losses.append(torch.stack(parts).mean().item())
            progress.show(step + 1, f"loss {losses[-1]:.3f}")
        else:
            schedule.step(*([ids[:, :-1]] if rank == 0 else []))
        optimizer.step()
        optimizer.zero_grad()
    if last:
        print(f"{size} stages, {o.microbatches} microbatches: loss {losses[0]:.3f} -> {losses[-1]:.3f}", flush=True)
        if o.check:
            apart = max(abs(a - b) for a, b in zip(losses, one_process(o, text), strict=True))
            print(f"at most {apart:.1e} from the losses of one process", flush=True)
            if apart > 1e-3:
                raise SystemExit("the pipeline's losses are others")
    dist.barrier()
    if rank == 0:
        print("paths: " + common.paths(o.backend), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
