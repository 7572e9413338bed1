"""Selection of modules to share: marked modules that the model's plans name and whose sizes divide."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from torch import nn

from smddp.modelparallel.tensor.layers import DistributedEmbedding, DistributedLinear
from smddp.modelparallel.tensor.marks import marked
from smddp.sagemaker import hf
from smddp.sagemaker.tensor_parallel import plan_entries, share, styles
from smddp.sagemaker.tensor_parallel.plan import Planner
from smddp.sagemaker.tensor_parallel.regions import TensorGroup

log = logging.getLogger("smddp.modelparallel")

# Their forward passes use the weights of submodules without calling them.
_USE_WEIGHTS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


class Chosen:
    """Styles of the shared modules.

    Attributes:
        planner: with blocks and heads of these alone.
        styles: module name -> style.
        one: the names of parameters that are one, in groups.
    """

    def __init__(self, model: nn.Module, tp: TensorGroup, seed: int) -> None:
        self.one = share.tied(model)
        self._model, self._tp, self._seed = model, tp, seed
        self._names = dict(model.named_modules(remove_duplicate=False))
        for module in self._names.values():
            if marked(module) and hf.is_pretrained(module):
                hf.refuse_variant(module)
        entries = {**self._alone(), **self._planned()}
        kept: dict[str, Any] = {}
        for names in self._pieces(entries):
            kept.update(self._divides({name: entries[name] for name in names}))
        self.planner = Planner(model, tp, seed, False)
        self.styles = self.planner.styles(self.planner.with_tied(kept, self.one)) if kept else {}

    def _planned(self) -> dict[str, Any]:
        """Return the plan entries of marked modules."""
        found = plan_entries.expand(self._model, hf.plan_of(self._model), strict=False)
        return {name: style for name, style in found.items() if marked(self._owner(name))}

    def _owner(self, name: str) -> nn.Module:
        """Return the module ``name``, or the module of the parameter ``name``."""
        return self._names[name] if name in self._names else self._names[name.rpartition(".")[0]]

    def _alone(self) -> dict[str, Any]:
        """Return marked Linear and Embedding modules outside of models with plans."""
        inside: set[int] = set()
        for name, module in self._names.items():
            if hf.is_pretrained(module) or vars(module).get("_tp_plan") or getattr(type(module), "_tp_plan", None):
                inside.update(id(each) for each in module.modules())
            elif isinstance(module, _USE_WEIGHTS):
                inside.update(id(each) for each in module.modules())
                if marked(module):
                    self._whole(name, f"{type(module).__name__} uses the weights of its submodules directly")
        shared = {name for names in self.one for name in names}
        found: dict[str, Any] = {}
        for name, module in self._names.items():
            if not marked(module) or id(module) in inside:
                continue
            inside.add(id(module))  # a module with several names counts once
            if type(module) in (nn.Linear, nn.Embedding, DistributedLinear, DistributedEmbedding):
                if not name:
                    self._whole(type(module).__name__, "a model that is one layer; put it in a module")
                elif f"{name}.weight" in shared:
                    self._whole(name, "another module has the same weight")
                else:
                    found[name] = module
        return {name: style for name, module in found.items() if (style := self._style(name, module))}

    def _style(self, name: str, module: nn.Module) -> str:
        size = self._tp.size
        if isinstance(module, nn.Embedding):
            if module.num_embeddings % size == 0:
                return "embedding_rowwise"
            self._whole(name, f"{module.num_embeddings} rows do not divide by {size}")
            return ""
        assert isinstance(module, nn.Linear)
        if module.out_features % size == 0:
            return "colwise_gather_output"
        if module.in_features % size == 0:
            return "rowwise_split_input"
        self._whole(name, f"neither {module.in_features} nor {module.out_features} features divide by {size}")
        return ""

    def _pieces(self, entries: dict[str, Any]) -> Iterable[list[str]]:
        """Group names that are shared together or not at all: one layer, or one block of a partly marked layer.
        A name outside of layers forms its own group."""
        layers = {id(layer) for layer in plan_entries.layers_of(self._model, hf.plan_of(self._model))}
        blocks = {"colwise_gather_output", "embedding_rowwise"}
        pieces: dict[str, list[str]] = {}
        for name, style in entries.items():
            around = name
            while around and id(self._names.get(around)) not in layers:
                around = around.rpartition(".")[0]
            if around and not all(map(marked, self._names[around].modules())):
                around = name.rpartition(".")[0]
                unmarked = [key for key, child in self._names[around].named_modules() if not marked(child)]
                if unmarked:
                    self._whole(name, f"{around}.{unmarked[0]} is not marked")
                    continue
            if not around:
                around = name if style in blocks else name.rpartition(".")[0]
            pieces.setdefault(around, []).append(name)
        return pieces.values()

    def _divides(self, entries: dict[str, Any]) -> dict[str, Any]:
        """Return ``entries`` if they can be shared; else log the reason and return nothing."""
        planner = Planner(self._model, self._tp, self._seed, False)
        try:
            made = planner.styles(planner.with_tied(entries, self.one))
        except (ValueError, NotImplementedError) as error:
            self._whole(next(iter(entries)), str(error))
            return {}
        for name, style in made.items():
            if isinstance(style, styles.GroupedQKV):
                self._whole(name, "a fused projection with fewer key and value heads than ranks")
                return {}
        for text in planner.warnings:
            log.warning("smp.DistributedModel(): %s", text)
        return entries

    def _whole(self, name: str, why: str) -> None:
        log.warning("smp.DistributedModel(): %s stays whole on every rank of a tensor group: %s", name or "it", why)
