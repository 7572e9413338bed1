"""Tiny models with experts, and their reference losses and gradients in one process."""

import functools

import smddp.sagemaker as tsm
import torch
import transformers
from smddp.sagemaker.moe.moe_config import MoEConfig
from smp_cases.models import batch, config, loss_of

LENGTH = 16  # of sequences, so that the chunks of four ranks divide them
_MOE = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
_SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LATENT = {
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
FAMILIES = {
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {**_MOE, "num_experts": 4, "shared_expert_intermediate_size": 32, "decoder_sparse_step": 1},
    ),
    "qwen3_moe": ("Qwen3MoeConfig", {**_MOE, "num_experts": 8, "head_dim": 8, "norm_topk_prob": True}),
    "gpt_oss": (
        "GptOssConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "layer_types": ["full_attention"] * 2},
    ),
    "deepseek_v3": ("DeepseekV3Config", {**_MOE, **_LATENT}),
}


def moe_config(**options) -> MoEConfig:
    """Returns a `MoEConfig` with transformers' behaviour except for ``options``."""
    return MoEConfig(**{"moe_load_balancing": "none", "moe_z_loss_coeff": 0.0, "moe_aux_loss_coeff": 0.0, **options})


def tiny_moe(family: str, **overrides) -> torch.nn.Module:
    """A causal language model with experts, in float32, whose values depend on the seed alone."""
    torch.manual_seed(0)
    if family == "mixtral":
        made = config("mixtral", **overrides)
    else:
        name, sizes = FAMILIES[family]
        made = getattr(transformers, name)(**{**_SIZES, **sizes, **overrides})
    model = transformers.AutoModelForCausalLM.from_config(made, attn_implementation="eager").float()
    if next(model.parameters()).is_meta:
        return model
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():  # routers that choose, and biases that count, as some begin at zero
        for name, parameter in model.named_parameters():
            if "gate.weight" in name or "router" in name or parameter.abs().max() == 0:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def independent_losses(model: torch.nn.Module, aux: float, z: float) -> list[torch.Tensor]:
    """Returns a list that router hooks of a plain model fill during a forward pass: factor times each layer's loss."""
    added: list[torch.Tensor] = []

    def after(module, arguments, output):
        logits = output[0] if isinstance(output, tuple) else output
        probabilities = torch.exp(logits - torch.logsumexp(logits, 1, keepdim=True))
        chosen = torch.zeros_like(logits).scatter(1, logits.topk(2, 1).indices, 1.0)
        experts = logits.shape[1]
        added.append(aux * experts * torch.dot(chosen.mean(0) / 2, probabilities.mean(0)))
        added.append(z * torch.logsumexp(logits, 1).pow(2).mean())

    for name, module in model.named_modules():
        if name.endswith(".gate"):
            module.register_forward_hook(after)
    return added


@functools.cache
def one_process(family: str, balancing: str, aux: float, z: float, **overrides) -> tuple[list[float], dict, dict]:
    """(losses of two steps, parameters before the first, its gradients) of whole batches.

    Without balancing, and with losses alone, transformers' own model runs; the other choices of experts exist only
    here, so there this process's own layers run on all tokens, with no expert on another rank.
    """
    model = tiny_moe(family, **overrides)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if balancing in ("none", "aux_loss"):
        added = independent_losses(model, aux if balancing == "aux_loss" else 0.0, z) if aux or z else []
    else:
        assert tsm.state.ep_size == 1, "a reference is made where nothing is spread"
        options = {"moe_load_balancing": balancing, "moe_z_loss_coeff": z}
        model, added = tsm.transform(model, config=moe_config(**options)), []
    losses, gradients = [], {}
    for step in range(2):
        added.clear()
        loss = loss_of(model, batch(step, LENGTH))
        losses.append(float(loss.detach()))
        if step == 0:
            (loss + sum(added)).backward()
            raw = {name: p.grad for name, p in model.named_parameters(remove_duplicate=False) if p.grad is not None}
            gradients = _named_as_plain(model, raw)
            torch.optim.SGD(model.parameters(), lr=1.0).step()
    return losses, before, gradients


def _named_as_plain(model: torch.nn.Module, gradients: dict) -> dict:
    from smddp.sagemaker.tensor_parallel.state_dict import translate_state_dict_to_hf

    return {name: gradient.clone() for name, gradient in translate_state_dict_to_hf(model, gradients).items()}
