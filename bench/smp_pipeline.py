#!/usr/bin/env python3
"""The step of an SMP v1 pipeline against one process that accumulates: same GPT-2, same microbatches, same loss.

The two take turns, so that whatever else the machine does falls on both. An even pipeline of p stages takes
(m + p - 1) / (m p) of one process's time for m microbatches: "of ideal" is the measured ratio over that. "All at once"
is the work of one process on every rank at the same time: what sharing the machine's memory and cores costs by itself.

  torchrun --standalone --nproc-per-node 2 bench/smp_pipeline.py --microbatches 8
"""

import argparse
import statistics
import time

import smdistributed.modelparallel.torch as smp
import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel


def make(o):
    torch.manual_seed(1)
    sizes = {"n_embd": o.dim, "n_layer": o.layers, "n_head": o.dim // 64, "vocab_size": o.vocab, "n_positions": o.seq}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--microbatches", type=int, default=8)
    p.add_argument("--pipeline", default="interleaved", choices=("interleaved", "simple"))
    p.add_argument("--layers", type=int, default=8)
    p.add_argument("--dim", type=int, default=512)
    p.add_argument("--vocab", type=int, default=2048)
    p.add_argument("--seq", type=int, default=128)
    p.add_argument("--rows", type=int, default=2, help="sequences of a microbatch")
    p.add_argument("--rounds", type=int, default=9)
    o = p.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("smddp")
    stages, m = dist.get_world_size(), o.microbatches
    smp.init({"partitions": stages, "microbatches": m, "pipeline": o.pipeline})
    alone = make(o)
    model = smp.DistributedModel(make(o))
    ids = torch.randint(0, o.vocab, (m * o.rows, o.seq))

    @smp.step
    def train_step(model, ids):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        model.backward(loss)
        return loss

    def accumulate():
        total = 0.0
        for part in ids.chunk(m):
            loss = alone(input_ids=part, labels=part, use_cache=False).loss / m
            loss.backward()
            total += loss.item()
        return total

    times = {"one process": [], "all at once": [], "pipeline": []}
    for turn in range(o.rounds + 1):
        for name in times:
            q = model if name == "pipeline" else alone
            for parameter in q.parameters():
                parameter.grad = None
            dist.barrier()
            begun = time.perf_counter()
            if name == "pipeline":
                loss = train_step(model, ids).reduce_mean().item()
            elif name == "all at once" or smp.rank() == 0:
                expected = accumulate()
            dist.barrier()
            if turn:  # the first cuts the model
                times[name].append(time.perf_counter() - begun)
    text = smp.explain()
    if smp.rank() == 0:
        assert abs(loss - expected) < 1e-5, (loss, expected)
        print(text)
        one = times["one process"]
        ideal = (m + stages - 1) / (m * stages)
        print(f"{'':12}{'median ms':>10}{'ratio':>8}{'ideal':>8}{'of ideal':>10}")
        for name, found in times.items():
            ratio = statistics.median(b / a for a, b in zip(one, found))
            goal = ideal if name == "pipeline" else 1.0
            print(f"{name:12}{statistics.median(found) * 1e3:10.1f}{ratio:8.3f}{goal:8.3f}{ratio / goal:10.3f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
