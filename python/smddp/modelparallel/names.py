"""Translation of state dicts and layers between transformers' names and the original's: both are the same here."""

from __future__ import annotations

from typing import Any


def same(state_dict: dict[str, Any], *_more: Any, **_options: Any) -> dict[str, Any]:
    """Return ``state_dict`` unchanged: parameters keep the names and shapes that they have in one process."""
    return state_dict


def keep(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Hook for `tp_register_with_module` that leaves a layer of transformers in place; its plan shares it."""
    return args, kwargs


def _hooks() -> tuple[Any, Any, Any]:
    """Return (init_hook, forward_hook, return_hook) for `tp_register_with_module`."""
    return keep, keep, keep


def translators(family: str) -> dict[str, Any]:
    """Return the functions of ``smp.nn.huggingface.FAMILY`` by every name that releases 1.4 to 1.15 published."""
    hf, smp = "translate_hf_{}state_dict_to_smdistributed{}", "translate_{}state_dict_to_hf_{}"
    older = [hf.format("", ""), hf.format(f"{family}_", ""), hf.format(f"{family}_", f"_{family}")]
    of_model = ["translate_state_dict_to_smdistributed", *older, hf.format("", f"_{family}"), smp.format("", family)]
    of_layers = [hf.format("block_", ""), smp.format("layer_", f"{family}_block")]
    return {**dict.fromkeys([*of_model, *of_layers], same), f"get_hf_{family}_transformer_layer_hooks": _hooks}
