"""SMP: a small Llama with hybrid sharding, tensor and context parallelism, checkpointing and prefetching offload.

  torchrun --nproc-per-node 4 examples/smp.py --config '{"hybrid_shard_degree": 2, "tensor_parallel_degree": 2}'
  torchrun --nproc-per-node 4 examples/smp.py --config '{"hybrid_shard_degree": 4, "context_parallel_degree": 2}'
  torchrun --nproc-per-node 4 examples/smp.py --config '{"hybrid_shard_degree": 4}' --resume DIRECTORY
  python examples/smp.py --plain              # one process, without SMP: what the losses are held against

Each step trains on the same batch whatever the degrees, so the losses are those of one process.
"""

import argparse
import functools
import json
from pathlib import Path

import common
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    offload_wrapper,
)
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers import AutoModelForCausalLM, LlamaConfig

BATCH = 8  # sequences a step, over all ranks


def arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--config", type=json.loads, help="what tsm.init() gets, as JSON")
    p.add_argument("--plain", action="store_true", help="one process, without SMP")
    p.add_argument("--backend", default="smddp")
    p.add_argument("--steps", type=int, default=40)
    p.add_argument("--until", type=int, help="stop after this step (default: the last)")
    p.add_argument("--save", type=Path, help="write a checkpoint to this directory while the last steps run")
    p.add_argument("--resume", type=Path, help="go on from the checkpoint in this directory")
    p.add_argument("--losses", type=Path, help="write the losses to this file")
    p.add_argument("--compare", type=Path, help="hold the losses against those in this file")
    return p.parse_args()


def make():
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=common.VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    return AutoModelForCausalLM.from_config(config)


def sharded(o):
    """The page that SMP users copy from."""
    import torch.sagemaker as tsm
    from torch.sagemaker.tensor_parallel.transformer import TransformerLayer

    dist.init_process_group(backend=o.backend)
    tsm.init(o.config)
    model = tsm.transform(make())
    model = FSDP(
        model,
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={TransformerLayer}),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, TransformerLayer))
    # torch's state dict functions want the FSDP root, training the wrapper around it.
    return offload_wrapper(model), model, tsm


def step(model, optimizer, ids, clip):
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    clip(model, 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def main():
    o = arguments()
    torch.set_num_threads(1)
    text = common.Text()
    if o.plain:
        model, rank, part, parts, cut = make(), 0, 0, 1, lambda ids: ids
        clip = lambda model, most: torch.nn.utils.clip_grad_norm_(model.parameters(), most)  # noqa: E731
    else:
        model, root, tsm = sharded(o)
        from torch.sagemaker.context_parallel.utils import get_batch_for_cp_rank as cut
        from torch.sagemaker.distributed.checkpoint.state_dict_loader import load
        from torch.sagemaker.distributed.checkpoint.state_dict_saver import async_save, maybe_finalize_async_calls
        from torch.sagemaker.grad_norm import clip_grad_norm_ as clip

        rank, part, parts = dist.get_rank(), tsm.state.dp_rank, tsm.state.dp_size
    optimizer = torch.optim.AdamW(model.parameters(), 5e-4, betas=(0.9, 0.95), weight_decay=0.01)

    first = 0
    if o.resume:
        weights, moments = get_state_dict(root, optimizer)
        state = {"model": weights, "optimizer": moments, "step": torch.tensor(0)}
        load(state, checkpoint_id=str(o.resume))
        set_state_dict(root, optimizer, model_state_dict=weights, optim_state_dict=moments)
        first = int(state["step"])

    losses, last = {}, o.until or o.steps
    for number in range(first, last):
        ids = cut(text.batch(number, BATCH, 127).chunk(parts)[part])
        loss = step(model, optimizer, ids, clip)
        losses[number] = float(loss) if o.plain else common.mean(loss)
    if rank == 0:
        name = "one process" if o.plain else repr(tsm.state)
        print(f"{name}: steps {first} to {last}, loss {losses[first]:.4f} -> {losses[last - 1]:.4f}", flush=True)
    if o.save:
        weights, moments = get_state_dict(root, optimizer)
        async_save({"model": weights, "optimizer": moments, "step": torch.tensor(last)}, checkpoint_id=str(o.save))
        maybe_finalize_async_calls(blocking=True)
    if o.losses and rank == 0:
        o.losses.write_text(json.dumps(losses))
    if o.compare and rank == 0:
        wanted = {int(number): loss for number, loss in json.loads(o.compare.read_text()).items()}
        gap = max(abs(losses[number] - wanted[number]) for number in losses)
        print(f"greatest difference from one process: {gap:.1e}", flush=True)
        if not gap < 1e-3:
            raise SystemExit("the losses are not those of one process")
    if not o.plain:
        if rank == 0 and o.config:
            print("patches: " + ", ".join(patch.name for patch in tsm.patches()))
            print("paths: " + common.paths(o.backend), flush=True)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
