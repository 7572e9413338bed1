"""Entries of a plan: names of styles, and the modules and parameters that patterns name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from smddp.sagemaker import hf
from smddp.text import did_you_mean

STYLES = (
    "colwise",
    "colwise_gather_output",
    "rowwise",
    "rowwise_split_input",
    "packed_rowwise",
    "packed_colwise",
    "packed_qkv_colwise",
    "interleaved_qkv_colwise",
    "grouped_qkv_colwise",
    "embedding_rowwise",
    "replicated_with_grad_allreduce",
    "bias_by_head",
    "alibi_by_head",
    "norms_by_head",
    "mla_kv_a_proj",
    "moe_tp_experts",
    "moe_identity_expert",
    "bias_of_sum",
    "local_params",
    "tied",
    "replicate",
)


def style_name(style: Any, where: str) -> str:
    """Returns the current name of the style. Raises ValueError for an unknown name, with the nearest match."""
    if not isinstance(style, str):
        raise TypeError(f"plan entry {where!r}: expected a style's name or a ParallelStyle, got {style!r}")
    name = hf.STYLE_NAMES.get(style, style)
    if name in hf.REFUSED_STYLES:
        raise NotImplementedError(
            f"plan entry {where!r}: style {style!r}: {hf.REFUSED_STYLES[name]}. For tensor parallelism of the rest "
            'give a plan without it, config={"tp_plan": {...}}; else set tensor_parallel_degree=1 for this model'
        )
    if name not in STYLES and name != hf.LISTED_EXPERTS:
        hint = did_you_mean(style, [*STYLES, *hf.STYLE_NAMES])
        raise ValueError(f"plan entry {where!r}: unknown style {style!r}{hint or '.'} Styles: {', '.join(STYLES)}")
    return name


def expand(model: nn.Module, plan: Mapping[str, Any], strict: bool) -> dict[str, Any]:
    """Expands the patterns of ``plan`` into one entry per module or parameter.

    Raises ValueError for a pattern that names nothing if ``strict``: plans of transformers name parts that some
    configurations lack, a user's should not.
    """
    names = [name for name, _ in model.named_modules() if name]
    names += [name for name, _ in model.named_parameters(remove_duplicate=False)]
    found: dict[str, Any] = {}
    for pattern, style in plan.items():
        match = re.compile(r"\.".join("[^.]+" if atom == "*" else re.escape(atom) for atom in pattern.split(".")))
        hits = [name for name in names if match.fullmatch(name)]
        if not hits and strict:
            hint = did_you_mean(pattern, names)
            raise ValueError(f"plan entry {pattern!r} names no module or parameter of {type(model).__name__}{hint}")
        found.update(dict.fromkeys(hits, style))
    return found


def layers_of(model: nn.Module, plan: Mapping[str, Any]) -> list[nn.Module]:
    """The decoder layers: what the family calls so, else the members of lists that the plan's `*` stands for."""
    names = hf.layer_class_names(model)
    # Exclude embeddings, which some families list here, but which are not in a list of modules.
    layers = [
        module
        for name, module in model.named_modules()
        if type(module).__name__ in names and name.rpartition(".")[2].isdigit()
    ]
    if not layers:
        for pattern in plan:
            before, star, _ = pattern.partition(".*")
            if star and "*" not in before:
                parent = _submodule(model, before)
                layers += [child for child in parent.children() if child not in layers] if parent is not None else []
    return layers


def reach(model: nn.Module, entries: Mapping[str, Any], layers: list[nn.Module]) -> bool:
    """Returns True if any of ``entries`` is in one of ``layers``."""
    prefixes = tuple(f"{name}." for name, module in model.named_modules() if any(module is layer for layer in layers))
    return any(name.startswith(prefixes) for name in entries)


def _submodule(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None
