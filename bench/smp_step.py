#!/usr/bin/env python3
"""The step of an SMP script over smddp against plain FSDP over gloo: same model, same data, same losses.

Both models live in the same four processes and take their steps in turn, so that whatever else the machine does
falls on both; the losses are compared in the same run.

  torchrun --standalone --nproc-per-node 4 bench/smp_step.py --shard 2
  torchrun --standalone --nproc-per-node 4 bench/smp_step.py --shard 4 --context 2 --seq 512
  torchrun --standalone --nproc-per-node 4 bench/smp_step.py --shard 4 --expert 2 --layers 4 --dim 256
"""

import argparse
import functools
import statistics
import time

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import torch.sagemaker as tsm  # isort: skip  (after transformers, as scripts have it)
from torch.sagemaker.context_parallel.utils import get_batch_for_cp_rank  # isort: skip
from torch.sagemaker.moe.moe_config import MoEConfig  # isort: skip
from torch.sagemaker.tensor_parallel.transformer import TransformerLayer  # isort: skip


def make(o):
    torch.manual_seed(1)
    size = {
        "vocab_size": o.vocab,
        "hidden_size": o.dim,
        "intermediate_size": 4 * o.dim,
        "num_hidden_layers": o.layers,
        "num_attention_heads": o.dim // 64,
        "num_key_value_heads": o.dim // 64,
    }
    if o.expert > 1:
        return MixtralForCausalLM(MixtralConfig(num_local_experts=8, num_experts_per_tok=2, **size))
    return LlamaForCausalLM(LlamaConfig(**size))


def wrap(model, layer, **options):
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={layer})
    return FSDP(model, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=True, **options)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--shard", type=int, default=2, help="hybrid_shard_degree")
    p.add_argument("--tensor", type=int, default=1, help="tensor_parallel_degree")
    p.add_argument("--context", type=int, default=1, help="context_parallel_degree")
    p.add_argument("--kind", default="all_gather", choices=("all_gather", "p2p"), help="cp_comm_type")
    p.add_argument("--expert", type=int, default=1, help="expert_parallel_degree, of a Mixtral of 8 experts")
    p.add_argument("--layers", type=int, default=6)
    p.add_argument("--dim", type=int, default=512)
    p.add_argument("--vocab", type=int, default=2048)
    p.add_argument("--seq", type=int, default=64)
    p.add_argument("--batch", type=int, default=1, help="sequences a rank")
    p.add_argument("--steps", type=int, default=8)
    o = p.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("smddp")
    gloo = dist.new_group(backend="gloo")
    degrees = {"hybrid_shard": o.shard, "tensor_parallel": o.tensor, "context_parallel": o.context}
    degrees["expert_parallel"] = o.expert
    tsm.init({f"{name}_degree": degree for name, degree in degrees.items()})

    plain = make(o)
    plain = wrap(plain, type(plain.model.layers[0]), process_group=gloo)
    # A balancing that changes no choice and no loss, so that both train alike.
    moe = {"config": MoEConfig(moe_load_balancing="none", moe_z_loss_coeff=0.0)} if o.expert > 1 else {}
    smp = wrap(tsm.transform(make(o), **moe, **({"cp_comm_type": o.kind} if o.context > 1 else {})), TransformerLayer)
    runs = {name: (m, torch.optim.AdamW(m.parameters(), 1e-4)) for name, m in (("gloo", plain), ("smp", smp))}
    # Every rank of a tensor group must see the same samples, and both models the same batch.
    share = {"gloo": (dist.get_rank(), dist.get_world_size()), "smp": (tsm.state.dp_rank, tsm.state.dp_size)}
    times, losses = {name: [] for name in runs}, {name: [] for name in runs}
    for step in range(1 + o.steps):
        ids = torch.randint(o.vocab, (o.batch * dist.get_world_size(), o.seq))
        dist.broadcast(ids, 0)
        for name, (model, optimizer) in runs.items():
            part, parts = share[name]
            mine = ids.chunk(parts)[part]
            if name == "smp" and o.context > 1:
                mine = get_batch_for_cp_rank(mine)
            dist.barrier()
            begun = time.perf_counter()
            loss = model(input_ids=mine, labels=mine, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            dist.barrier()
            if step:
                times[name].append(time.perf_counter() - begun)
            mean = loss.detach() / dist.get_world_size()
            dist.all_reduce(mean)
            losses[name].append(mean.item())
    if dist.get_rank() == 0:
        took = {name: statistics.median(found) for name, found in times.items()}
        gap = max(abs(a - b) for a, b in zip(losses["gloo"], losses["smp"]))
        parameters = sum(q.numel() for q in make(o).parameters())
        cells = (
            f"{parameters / 1e6:.1f} M",
            " ".join(f"{name} {degree}" for name, degree in degrees.items()),
            f"plain FSDP over gloo {took['gloo'] * 1e3:.0f} ms",
            f"SMP over smddp {took['smp'] * 1e3:.0f} ms",
            f"ratio {took['smp'] / took['gloo']:.2f}",
            f"losses differ by {gap:.0e}",
        )
        print("| " + " | ".join(cells) + " |", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
