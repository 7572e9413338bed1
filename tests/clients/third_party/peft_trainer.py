"""LoRA in an unmodified Trainer with tensor parallelism: the adapters' files and values of one process."""

import os
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.join(HERE, *up) for up in ([".."], ["..", "..", "smp"], ["..", ".."])]

import peft
import smddp.sagemaker as tsm
import torch
import torch.distributed as dist
from ranks import own_placements
from safetensors.torch import load_file
from smp_cases import trainer_tensor_parallel as cases
from smp_cases.accelerate_tensor_parallel import alone
from smp_cases.models import tiny

ADAPTER = "adapter_model.safetensors"


def adapted(model):
    torch.manual_seed(3)
    targets = ["q_proj", "o_proj"]
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets, init_lora_weights="gaussian"))


def saved(model, directory, sharded, groups):
    """The files of a training, and the adapters' values on rank 0."""
    files, _, _ = cases._saved_files(model, directory, sharded, groups, {"save_only_model": True})
    dist.barrier()
    return files, load_file(os.path.join(directory, ADAPTER)) if dist.get_rank() == 0 else {}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("smddp")
    own_placements.install()
    with tempfile.TemporaryDirectory() as directory, alone():
        wanted, values = saved(adapted(tiny()), directory, False, 1)
    orders = {"before": lambda: tsm.transform(adapted(tiny())), "after": lambda: adapted(tsm.transform(tiny()))}
    for order, make in orders.items():
        for shard, tensor in ((1, 4), (2, 2)):
            with (
                cases._directory() as directory,
                cases.initialized(hybrid_shard_degree=shard, tensor_parallel_degree=tensor),
                cases._environment(shard > 1),
            ):
                files, found = saved(make(), directory, shard > 1, None)
            assert files == wanted, (order, shard, tensor)
            assert found.keys() == values.keys(), (order, shard, tensor)
            for name, value in values.items():
                assert torch.allclose(found[name], value, atol=1e-5), (order, shard, tensor, name)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
