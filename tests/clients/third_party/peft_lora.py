"""PEFT's LoRA on a model with tensor parallelism and FSDP, added before and after `transform`: losses and adapters
equal those of one process."""

import copy
import functools

import sagemaker_environment  # noqa: F401

# isort: split
import torch
import torch.distributed as dist
import torch.sagemaker as tsm
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.sagemaker.tensor_parallel.state_dict import translate_state_dict_to_hf
from torch.sagemaker.tensor_parallel.transformer import TransformerLayer
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

STEPS = 3


def make(family: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if family == "gpt2":
        drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        return GPT2LMHeadModel(GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64, **drops))
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))


def adapted(model: torch.nn.Module, inject: bool = False) -> torch.nn.Module:
    # Initialize B as well: with zeros the first losses detect no error.
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    torch.manual_seed(1)
    return inject_adapter_in_model(lora, model) if inject else get_peft_model(model, lora)


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


def wrapped(model: torch.nn.Module, engine: str) -> torch.nn.Module:
    if engine == "fsdp1":
        policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={TransformerLayer})
        return FSDP(model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu"))
    if engine == "fsdp2":
        for module in list(model.modules()):
            if isinstance(module, TransformerLayer):
                fully_shard(module)
        fully_shard(model)
    return model


ORDERS = {
    "before": lambda model: tsm.transform(adapted(model)),
    "after": lambda model: adapted(tsm.transform(model)),
    "injected after": lambda model: adapted(tsm.transform(model), inject=True),
}
ROWS = [
    ("llama", 2, ("fsdp1", "fsdp2"), ("before", "after", "injected after")),
    ("llama", 4, ("alone", "fsdp1", "fsdp2"), ("after",)),
    ("gpt2", 2, ("fsdp2",), ("before", "after")),
]


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("smddp")
    ids = torch.randint(0, 96, (4, 12), generator=torch.Generator().manual_seed(3))
    for family, degree, engines, orders in ROWS:
        tsm.init({"hybrid_shard_degree": dist.get_world_size() // degree, "tensor_parallel_degree": degree})
        untrained = make(family)
        plain = adapted(copy.deepcopy(untrained))
        wanted = trained(plain, ids)
        for engine in engines:
            for order in orders:
                where = (family, degree, engine, order)
                model = wrapped(ORDERS[order](copy.deepcopy(untrained)), engine)
                for found, loss in zip(trained(model, ids.chunk(tsm.state.dp_size)[tsm.state.dp_rank]), wanted):
                    dist.all_reduce(found)
                    assert abs(found / dist.get_world_size() - loss) < 1e-5, (where, found, loss)
                saved = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
                saved = translate_state_dict_to_hf(model, saved)
                inside = plain.base_model.model if order == "injected after" else plain
                adapters = {name: tensor for name, tensor in inside.state_dict().items() if "lora_" in name}
                assert adapters and adapters.keys() <= saved.keys(), where
                for name, tensor in adapters.items():
                    assert (saved[name] - tensor).abs().max() < 1e-3, (where, name)
        tsm.state.reset()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
