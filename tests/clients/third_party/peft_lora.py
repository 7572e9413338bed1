"""LoRA by PEFT on a model that is shared among tensor ranks and sharded by FSDP: losses and adapters of one process."""

import copy
import functools

import sagemaker_environment  # noqa: F401

# isort: split
import torch
import torch.distributed as dist
import torch.sagemaker as tsm
from peft import LoraConfig, get_peft_model
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.sagemaker.tensor_parallel.transformer import TransformerLayer
from transformers import LlamaConfig, LlamaForCausalLM

STEPS = 3


def make() -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    return get_peft_model(model, lora)


def trained(model: torch.nn.Module, ids: torch.Tensor) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    losses = []
    for _ in range(STEPS):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
    return losses


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("smddp")
    tsm.init({"hybrid_shard_degree": dist.get_world_size() // 2, "tensor_parallel_degree": 2})
    ids = torch.randint(0, 96, (4, 12), generator=torch.Generator().manual_seed(3))
    plain = make()
    untrained = copy.deepcopy(plain)
    wanted = trained(plain, ids)
    for engine in (1, 2):
        model = tsm.transform(copy.deepcopy(untrained))
        if engine == 1:
            policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={TransformerLayer})
            model = FSDP(model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu"))
        else:
            for module in list(model.modules()):
                if isinstance(module, TransformerLayer):
                    fully_shard(module)
            fully_shard(model)
        for found, loss in zip(trained(model, ids.chunk(tsm.state.dp_size)[tsm.state.dp_rank]), wanted):
            dist.all_reduce(found)
            assert abs(found / dist.get_world_size() - loss) < 1e-5, (engine, found, loss)
        saved = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        adapters = {name: tensor for name, tensor in plain.state_dict().items() if "lora_" in name}
        assert adapters and adapters.keys() <= saved.keys()
        for name, tensor in adapters.items():
            assert (saved[name] - tensor).abs().max() < 1e-3, (engine, name)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
