"""SMP v1: GPT-2, whose first and last layer share a weight, as a pipeline of any number of stages.

  torchrun --nproc-per-node 4 examples/smp_v1.py --config '{"partitions": 4, "microbatches": 4}'
  torchrun --nproc-per-node 4 examples/smp_v1.py --config '{"partitions": 2, "microbatches": 2, "ddp": true}' \\
      --resume DIRECTORY
  python examples/smp_v1.py --plain                         # one process: what the losses are held against
  python examples/smp_v1.py --plain --pretrained DIRECTORY  # one loss of a saved model, by transformers alone

Each step trains on the same batch whatever the degrees, so the losses are those of one process.
"""

import argparse
import json
from pathlib import Path

import common
import torch
from transformers import GPT2Config, GPT2LMHeadModel, logging

BATCH = 8  # sequences a step, over all replicas
# The name under which transformers looks for a model of plain torch.
WHOLE = "pytorch_model.bin"


def arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--config", type=json.loads, help="what smp.init() gets, as JSON")
    p.add_argument("--plain", action="store_true", help="one process, without SMP")
    p.add_argument("--steps", type=int, default=20)
    p.add_argument("--until", type=int, help="stop after this step (default: the last)")
    p.add_argument("--save", type=Path, help="save parts, and the whole model for transformers, to this directory")
    p.add_argument("--resume", type=Path, help="go on from the parts in this directory")
    p.add_argument("--pretrained", type=Path, help="with --plain: the next loss of the model in this directory")
    p.add_argument("--losses", type=Path, help="write the losses to this file")
    p.add_argument("--compare", type=Path, help="hold the losses against those in this file")
    return p.parse_args()


def make():
    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=common.VOCABULARY,
        n_positions=128,
        n_embd=128,
        n_layer=8,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return GPT2LMHeadModel(config)


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), 1e-3, betas=(0.9, 0.95), weight_decay=0.01)


def plain(o, text):
    """Yields (step, loss) of one process."""
    model = GPT2LMHeadModel.from_pretrained(o.pretrained) if o.pretrained else make()
    if o.pretrained:
        number = json.loads((o.pretrained / "step.json").read_text())
        ids = text.batch(number, BATCH, 127)
        yield number, model(input_ids=ids, labels=ids, use_cache=False).loss.item()
        return
    optimizer = optimizer_of(model)
    for number in range(o.until or o.steps):
        ids = text.batch(number, BATCH, 127)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield number, loss.item()


def pipeline(o, text):
    """The page that SMP users copy from. Yields (step, loss)."""
    import smdistributed.modelparallel.torch as smp

    smp.init(o.config)

    @smp.step
    def train_step(model, ids):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        model.backward(loss)
        return loss

    model = smp.DistributedModel(make())
    optimizer = smp.DistributedOptimizer(optimizer_of(model))
    first = smp.resume_from_checkpoint(o.resume)["step"] if o.resume else 0
    last = o.until or o.steps
    for number in range(first, last):
        ids = text.batch(number, BATCH, 127).chunk(smp.dp_size())[smp.dp_rank()]
        loss = train_step(model, ids).reduce_mean()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        # The mean over replicas; each of them has the mean over its microbatches.
        yield number, sum(smp.allgather(loss.item())) / smp.size()
    if o.save:
        smp.save_checkpoint(o.save, f"step{last}", user_content={"step": last})
        # transformers reads a whole model and its configuration.
        smp.save_checkpoint(o.save / "whole", WHOLE, partial=False)
        if smp.rank() == 0:
            model.get_module().config.save_pretrained(o.save / "whole")
            (o.save / "whole" / "step.json").write_text(json.dumps(last))
    if smp.rank() == 0:
        print(smp.explain(), flush=True)


def main():
    o = arguments()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    losses = dict(plain(o, common.Text()) if o.plain else pipeline(o, common.Text()))
    if not o.plain and torch.distributed.get_rank() != 0:
        return torch.distributed.destroy_process_group()
    first, last = min(losses), max(losses)
    name = "transformers alone" if o.pretrained else "one process" if o.plain else f"{o.config}"
    print(f"{name}: steps {first} to {last}, loss {losses[first]:.4f} -> {losses[last]:.4f}", flush=True)
    if o.losses:
        o.losses.write_text(json.dumps(losses))
    if o.compare:
        wanted = {int(number): loss for number, loss in json.loads(o.compare.read_text()).items()}
        gap = max(abs(losses[number] - wanted[number]) for number in losses)
        print(f"greatest difference from one process: {gap:.1e}", flush=True)
        if not gap < 1e-4:
            raise SystemExit("the losses are not those of one process")
    if not o.plain:
        torch.distributed.destroy_process_group()
    return None


if __name__ == "__main__":
    main()
