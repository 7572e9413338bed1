"""Differences between transformers versions (4.57 and 5) and model families.

Models without transformers are supported through the plan attribute that they define.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any, Protocol, cast

import torch
from torch import nn

from smddp.sagemaker import hf_plans
from smddp.sagemaker.private_names import LAYER_CLASSES

# Names of styles in 4.57 -> those of 5, which plans are translated to.
STYLE_NAMES = {
    "colwise_rep": "colwise_gather_output",
    "rowwise_rep": "rowwise_split_input",
    # In transformers a block reduces its partial sums at its end, by "gather"; here each row-wise module reduces.
    "local_colwise": "colwise",
    "local_rowwise": "rowwise",
    "local_packed_rowwise": "packed_rowwise",
    "local": "moe_tp_experts",
    "gather": "replicate",
}

# Styles that transformers has and that do not run here, with the reason.
REFUSED_STYLES = {
    "all_reduce": "a sum over the ranks is the end of a rowwise module, so leave it out of the plan",
    **dict.fromkeys(
        ("grouped_gemm", "ep_router", "ep_dispatch_experts"),
        "it belongs to expert parallelism: give transform a MoEConfig, and tsm.init expert_parallel_degree",
    ),
    "embedding_colwise": "give the embedding the style embedding_rowwise",
    "sequence_parallel": 'sequence parallelism is chosen for the whole model: config={"sequence_parallel": True}',
}

# Families in which norms, residuals and dropouts between blocks are known to work on a shard of the sequence.
SEQUENCE_PARALLEL = ("llama", "mistral", "qwen2", "qwen3", "gemma", "phi")


def _transformers() -> Any:
    """The package if something has imported it, else None: a model of it cannot exist before."""
    return sys.modules.get("transformers")


def is_before_5() -> bool:
    """Returns True if the installed transformers is of the supported 4.x line."""
    package = _transformers()
    return package is not None and int(package.__version__.split(".")[0]) < 5


def is_pretrained(module: nn.Module) -> bool:
    """Returns True if ``module`` is a transformers model."""
    package = _transformers()
    return package is not None and isinstance(module, package.PreTrainedModel)


def is_conv1d(module: nn.Module) -> bool:
    """Returns True if ``module`` is transformers' Conv1D: a linear projection with an (in, out) weight."""
    package = _transformers()
    return package is not None and isinstance(module, package.pytorch_utils.Conv1D)


def model_type(model: nn.Module) -> str:
    """Returns the model type ("llama", "gpt2", ...); "" for other modules."""
    return getattr(model.config, "model_type", "") if is_pretrained(model) else ""


def attention_heads(model: nn.Module) -> int | None:
    """Returns the number of query heads; None if no configuration specifies it."""
    config = getattr(model, "config", None)
    if config is not None and hasattr(config, "get_text_config"):
        config = config.get_text_config()
    return getattr(config, "num_attention_heads", None)


def plan_of(model: nn.Module) -> dict[str, Any]:
    """The plan that ``model`` carries: pattern of module or parameter names -> style; {} if it carries none.

    Patterns are relative to ``model``; `*` stands for one component of a name.
    """
    plan: dict[str, Any] = {}
    for name, module in model.named_modules():
        plan.update({f"{name}.{key}" if name else key: style for key, style in _own(module).items()})
    return _without_listed_experts(model, plan)


def _own(module: nn.Module) -> dict[str, Any]:
    """Returns the plan of one module, without its children's plans."""
    if not is_pretrained(module):
        # Read the instance's dictionary: wrappers forward attribute access to the wrapped model.
        return dict(vars(module).get("_tp_plan") or getattr(type(module), "_tp_plan", None) or {})
    if model_type(module) in hf_plans.PLANS:
        return dict(hf_plans.PLANS[model_type(module)])
    # The class's, because 4.57 and 5 merge different things into the instance's.
    plan = dict(getattr(type(module), "_tp_plan", None) or {})
    if module.base_model is module:
        plan.update(getattr(module.config, "base_model_tp_plan", None) or {})
    return plan


def layer_class_names(model: nn.Module) -> set[str]:
    """Returns the class names of decoder layers."""
    names: set[str] = set()
    for module in model.modules():
        if is_pretrained(module):
            names.update(LAYER_CLASSES.of_or_warn(module) or ())
    return names


# Attribute names, by family, of the head size, the projections, and the numbers of query, key and value heads.
# Latent attention uses qk_head_dim; some of its modules set head_dim to the rotary part.
_HEAD_SIZES = ("qk_head_dim", "head_dim", "attention_head_size", "head_size", "key_value_proj_dim")
_QUERIES = ("q_proj", "query", "q")
_KEYS = ("k_proj", "key", "k")
_VALUES = ("v_proj", "value", "v")
# Latent attention: norms before its heads, and the projection that gives a key for all heads besides the latent.
LATENT_NORMS = ("q_a_layernorm", "kv_a_layernorm")
LATENT = "kv_a_proj_with_mqa"
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_KEY_VALUE_HEADS = ("num_kv_heads", "num_key_value_heads")
# All heads' columns, which older attention modules give their output.
_WIDTHS = ("hidden_size", "all_head_size", "inner_dim", "split_size", "embed_dim")


class Attention(Protocol):
    """Sizes of an attention module; each family has the attributes that its forward reads."""

    head_dim: int
    num_heads: int
    num_key_value_groups: int
    num_kv_heads: int


def _int(module: nn.Module, names: tuple[str, ...]) -> int | None:
    found = (getattr(module, name, None) for name in names)
    return next((number for number in found if isinstance(number, int)), None)


def head_dim(module: nn.Module) -> int | None:
    """Returns the head size of an attention module; None if unknown."""
    return _int(module, _HEAD_SIZES)


def value_dim(module: nn.Module) -> int | None:
    """The size of one head of values, which few attention modules have larger or smaller than `head_dim`."""
    size = getattr(module, "v_head_dim", None)
    return size if isinstance(size, int) else head_dim(module)


def heads_of(module: nn.Module) -> tuple[int | None, int | None]:
    """(query heads, key and value heads) by an attention module's attributes; None for what it does not say."""
    query = _int(module, _HEADS)
    key_value = _int(module, _KEY_VALUE_HEADS)
    return query, query if key_value is None else key_value


def query_of(module: nn.Module) -> nn.Module | None:
    """Returns the separate query projection of an attention module, if any."""
    found = (getattr(module, name, None) for name in _QUERIES)
    return next((child for child in found if isinstance(child, nn.Module)), None)


def is_key_or_value(name: str) -> bool:
    """Returns True if a module of this name projects to keys or values."""
    return name.rpartition(".")[2] in _KEYS or is_value(name)


def is_value(name: str) -> bool:
    """Returns True if a module of this name projects to values."""
    return name.rpartition(".")[2] in _VALUES


def as_attention(module: nn.Module) -> Attention:
    """Casts ``module`` to the type of attention modules."""
    return cast(Attention, module)  # families have no class in common


def weight_of(module: nn.Module) -> torch.Tensor:
    """The weight of a projection or an embedding; of an adapter's, that which is adapted."""
    weight = getattr(module, "base_layer", module).weight
    assert isinstance(weight, torch.Tensor)
    return weight


def localise_heads(attention: Attention, query: int, key_value: int) -> None:
    """Set the number of this rank's heads in an attention module.

    Most modules take the number from their activations' shape; these attributes are all that the others read.
    """
    size = head_dim(cast(nn.Module, attention))
    whole = heads_of(cast(nn.Module, attention))[0]
    if size is not None and whole is not None:
        for name in _WIDTHS:
            if getattr(attention, name, None) == whole * size:
                setattr(attention, name, query * size)
    for names, number in ((_HEADS, query), (_KEY_VALUE_HEADS, key_value)):
        for name in names:
            if isinstance(getattr(attention, name, None), int):
                setattr(attention, name, number)
    if hasattr(attention, "num_key_value_groups"):
        attention.num_key_value_groups = query // key_value


def cached_keys(cache: Any) -> torch.Tensor | None:
    """The first layer's keys in ``cache``, (batch, key and value heads, sequence, head_dim); None if there are none.

    ``cache`` is what a model takes as past_key_values: one of transformers' caches, or a tuple with a pair for each
    layer.
    """
    cache = getattr(cache, "self_attention_cache", cache)
    layers = getattr(cache, "layers", cache)
    if not isinstance(layers, list | tuple) or not layers:
        return None
    keys = layers[0][0] if isinstance(layers[0], list | tuple) else getattr(layers[0], "keys", None)
    return keys if isinstance(keys, torch.Tensor) and keys.dim() == 4 and keys.numel() else None


def key_value_heads(model: nn.Module) -> int | None:
    """Returns the number of key and value heads; None if no configuration specifies it."""
    config = getattr(model, "config", None)
    if config is not None and hasattr(config, "get_text_config"):
        config = config.get_text_config()
    return getattr(config, "num_key_value_heads", None) or attention_heads(model)


def refuse_variant(model: nn.Module) -> None:
    """Raise NotImplementedError for a variant of a family that its plan does not fit."""
    config: Any = getattr(model, "config", None)
    kind = model_type(model)
    if kind == "bloom" and config.slow_but_exact and config.pretraining_tp > 1:
        raise NotImplementedError(
            "BLOOM with slow_but_exact=True and pretraining_tp > 1 splits its weights into parts, which tensor "
            "parallelism does already: set slow_but_exact=False"
        )
    if kind == "gemma4":
        raise NotImplementedError(
            "Gemma-4 with images under tensor parallelism: its model reads rows of the shared embedding itself; take "
            "the text model, Gemma4ForCausalLM, or set tensor_parallel_degree=1"
        )


def tiny_inputs(model: nn.Module, seed: int) -> dict[str, Any]:
    """Returns arguments of a small forward pass: two samples of twelve tokens, or two images.

    Raises ValueError for other modules, and for models with another input.
    """
    takes = getattr(model, "main_input_name", None) if is_pretrained(model) else None
    config: Any = getattr(model, "config", None)
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    if takes == "input_ids":
        text = config.get_text_config()
        tokens = torch.randint(3, min(text.vocab_size, 1000), (2, 12), generator=generator).to(device)
        if config.is_encoder_decoder:
            found = {"input_ids": tokens, "decoder_input_ids": tokens.flip(-1)}
        else:
            found = {"input_ids": tokens}
        known = inspect.signature(model.forward).parameters
        return {**found, "use_cache": False} if "use_cache" in known else found
    if takes == "pixel_values" and isinstance(getattr(config, "image_size", None), int):
        shape = (2, getattr(config, "num_channels", 3), config.image_size, config.image_size)
        return {"pixel_values": torch.randn(shape, generator=generator).to(device)}
    raise ValueError(
        f"verify() makes inputs for transformers models of tokens or of images, not for {type(model).__name__}: give "
        "some, verify(model, inputs={...})"
    )


def experts_layout(module: nn.Module, name: str, style: str) -> tuple[int, int]:
    """(dimension, parts side by side in it) of the stacked experts' parameter ``name``.

    "rowwise" is the last dimension and "colwise" the last but one, whichever of them is the input: a family that stores
    (experts, in, out) has its plan so.
    """
    dims = module.get_parameter(name).dim()
    if style.endswith("rowwise"):
        return dims - 1, (2 if style == "packed_rowwise" else 1)
    # Some plans of transformers use "colwise" for both in one weight.
    both = "gate_up" in name and getattr(module, "is_concatenated", True)
    return dims - 2, (2 if style == "packed_colwise" or both else 1)


# ---- Mixtral in 4.57: experts are a list of modules, called one by one ----

LISTED_EXPERTS = "listed_experts"


def _without_listed_experts(model: nn.Module, plan: dict[str, Any]) -> dict[str, Any]:
    """``plan`` with the style `LISTED_EXPERTS` for Mixtral's block in 4.57.

    The plan of 4.57 would all-reduce each expert's output separately, one more collective for every expert and layer.
    As one region the whole block needs one collective in each direction.
    """
    block = "block_sparse_moe"
    # A family of today may call its block the same, with stacked experts.
    if not any(f".{block}.experts." in key and key.endswith(".w1") for key in plan):
        return plan
    kept = {key: style for key, style in plan.items() if f".{block}." not in key}
    for key in plan:
        if f".{block}.experts." in key:
            before, after = key.split(f".{block}.experts.")
            kept[f"{before}.{block}"] = LISTED_EXPERTS
            kept[key] = {"w1": "colwise", "w3": "colwise", "w2": "rowwise"}[after.split(".")[-1]]
    return kept


class Routed(Protocol):
    """Routing attributes of Mixtral's block of 4.57."""

    gate: nn.Module
    top_k: int


def route(block: Routed, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mixtral's routing in 4.57: (tokens, hidden) -> router logits, chosen experts (tokens, k), their weights."""
    logits = block.gate(tokens)
    weights, chosen = torch.topk(logits.softmax(-1, dtype=torch.float), block.top_k, dim=-1)
    weights = weights / weights.sum(-1, keepdim=True)
    return logits, chosen, weights.to(tokens.dtype)
