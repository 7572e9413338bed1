"""Names of the original's transformer layers on models under `smp.tensor_parallelism()`, at every degree.

The modules remain transformers' own. ``seq_layers``, ``transformer``, ``attention`` and ``output`` name them, too, and
`isinstance` with the classes of `smp.nn` holds.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from smddp.modelparallel import activation
from smddp.modelparallel.tensor.layers import KIND
from smddp.modelparallel.tensor.marks import marked, options_of
from smddp.sagemaker import hf
from smddp.sagemaker.private_names import ATTENTION
from smddp.sagemaker.tensor_parallel import plan_entries

_ATTENTION = ("attention", "attn", "self_attn", "self_attention")
_OUTPUT = ("output", "mlp", "feed_forward")


class Layers(activation.CalledApart):
    """The layers of a transformers model under the name that scripts use. A pickle has them in a plain Sequential."""

    def __reduce_ex__(self, _protocol: Any) -> Any:
        return nn.Sequential, tuple(self)


def name_layers(model: nn.Module) -> None:
    """Add the names to every marked transformers model in ``model``."""
    module: Any
    for module in list(model.modules()):
        if not marked(module) or not hf.is_pretrained(module):
            continue
        if module.base_model is not module:
            _add(module, "transformer", [module.base_model], "DistributedTransformer")
            continue
        layers = plan_entries.layers_of(module, hf.plan_of(module))
        if not layers:
            continue
        module.__dict__[KIND] = "DistributedTransformer"
        if not hasattr(module, "seq_layers"):
            # Outside nn.Module's registry: the layers keep their names in state dicts.
            module.__dict__["seq_layers"] = Layers(*layers)
        for layer in layers:
            layer.__dict__[KIND] = "DistributedTransformerLayer"
            _name_parts(layer, getattr(module.config, ATTENTION.attribute, "eager"))


def _name_parts(layer: nn.Module, implementation: str) -> None:
    children = dict(layer.named_children())
    attention = _add(layer, "attention", (children.get(name) for name in _ATTENTION), "DistributedAttentionLayer")
    _add(layer, "output", (children.get(name) for name in _OUTPUT), "DistributedTransformerOutputLayer")
    if attention is not None and options_of(attention).get("flash_attention", True) and implementation != "eager":
        attention.__dict__[KIND] += " FlashAttentionLayer"


def _add(owner: nn.Module, name: str, candidates: Iterable[nn.Module | None], kind: str) -> nn.Module | None:
    """Give the first of ``candidates`` the further name ``owner.name``, and the class ``kind`` for `isinstance`."""
    found = next((each for each in candidates if each is not None), None)
    if found is not None:
        found.__dict__[KIND] = kind
        if not hasattr(owner, name):
            owner.__dict__[name] = found
    return found
