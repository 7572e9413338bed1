#!/usr/bin/env python3
"""Peak activation memory with and without offloading, as a Markdown table.

    python bench/offload_memory.py [--layers 8] [--hidden 256] [--tokens 512] [--batch 2] [--horizon 0 1 2]

"After forward" is what the graph keeps for backward, "largest" the peak of the step with one layer's recomputation.
On the CPU both count the bytes of every tensor made and still alive, parameters' gradients left out; host buffers
do not count, as they would not on a GPU. With --device cuda they are the allocator's.
"""

import argparse
import contextlib
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "python"))

import torch
from smddp.sagemaker import offload
from smddp.sagemaker.offload.parameters import parameter_storages, storage_key
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrappers
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def model(sizes: argparse.Namespace) -> torch.nn.Module:
    """A Llama of ``sizes``, in training mode."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=sizes.hidden,
        intermediate_size=4 * sizes.hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=sizes.tokens,
        use_cache=False,
    )
    # Made where it will live: a processor takes minutes to draw the parameters of a large one.
    with torch.device(sizes.device):
        made = transformers.AutoModelForCausalLM.from_config(config)
    return made.to(sizes.device).train()


def checkpointed(made: torch.nn.Module) -> torch.nn.Module:
    kind = type(made.model.layers[0])
    wrappers.apply_activation_checkpointing(made, check_fn=lambda module: isinstance(module, kind))
    return made


class Alive(TorchDispatchMode):
    """Counts the bytes of tensors made while it is active and still alive; gradients of parameters are left out."""

    def __init__(self, made: torch.nn.Module) -> None:
        super().__init__()
        self._parameters = list(made.parameters())
        self._own = parameter_storages(made)
        self._host: dict[int, StorageWeakRef] = {}
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.largest = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            # Host buffers start as bytes; on the CPU nothing else distinguishes them from device buffers.
            if tensor.dtype == torch.uint8:
                self._host[key] = StorageWeakRef(storage)
            elif key not in self._host and key not in self._own and key not in self._storages:
                self._storages[key] = (StorageWeakRef(storage), storage.nbytes())
        self.largest = max(self.largest, self.now())
        return result

    def now(self) -> int:
        """Bytes alive."""
        self._storages = {key: entry for key, entry in self._storages.items() if not entry[0].expired()}
        gradients = {storage_key(p.grad) for p in self._parameters if p.grad is not None}
        return sum(nbytes for key, (_, nbytes) in self._storages.items() if key not in gradients)


class OnGpu(contextlib.AbstractContextManager):
    """The same two numbers from the CUDA allocator; gradients, which it cannot tell apart, are counted."""

    def __enter__(self) -> "OnGpu":
        torch.cuda.reset_peak_memory_stats()
        self._before = torch.cuda.memory_allocated()
        return self

    def __exit__(self, *_) -> None:
        self.largest = torch.cuda.max_memory_allocated() - self._before

    def now(self) -> int:
        return torch.cuda.memory_allocated() - self._before


def row(name: str, sizes: argparse.Namespace, checkpointing: bool, horizon: int | None) -> tuple[str, float]:
    """One line of the table, and the loss."""
    own = wrappers.OffloadWrapper.forward
    offload.reset()
    made = model(sizes)
    if checkpointing:
        made = checkpointed(made)
    whole = made
    if horizon is not None:
        wrappers.OffloadWrapper.forward = offload.prefetching_forward(own, lambda: horizon)
        whole = wrappers.offload_wrapper(made)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 512, (sizes.batch, sizes.tokens), generator=generator).to(sizes.device)
    counter = Alive(made) if sizes.device == "cpu" else OnGpu()
    try:
        with counter:
            loss = whole(input_ids=ids, labels=ids, use_cache=False).loss
            forward = counter.now()
            loss.backward()
        largest = counter.largest
    finally:
        wrappers.OffloadWrapper.forward = own
    now = offload.statistics()
    return (
        f"| {name} | {mib(forward)} | {mib(largest)} | {mib(now.bytes_offloaded)} | {now.stalls} "
        f"| {now.max_resident_groups} |"
    ), float(loss.detach())


def mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=512, help="sequence length")
    parser.add_argument("--batch", type=int, default=2, help="sequences")
    parser.add_argument("--horizon", type=int, nargs="+", default=[0, 1, 2], help="layers loaded ahead, one row each")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    sizes = parser.parse_args()
    rows = [row("plain", sizes, False, None), row("checkpointing", sizes, True, None)]
    rows += [row(f"checkpointing, offloading, horizon {k}", sizes, True, k) for k in sizes.horizon]
    print(f"Llama, {sizes.layers} layers, {sizes.batch} x {sizes.tokens} tokens, hidden {sizes.hidden}, MiB:\n")
    print("| | after forward | largest | offloaded | stalls | layers resident |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for text, _ in rows:
        print(text)
    if len({loss for _, loss in rows}) > 1:
        sys.exit(f"the losses differ: {[loss for _, loss in rows]}")
    print("\nAll rows have the same loss, bit for bit.")


if __name__ == "__main__":
    main()
