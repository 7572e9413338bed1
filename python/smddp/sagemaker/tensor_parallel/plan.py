"""From a plan, which names styles, to `ParallelStyle` objects for each module; everything is checked before anything
moves."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from smddp.sagemaker import hf
from smddp.sagemaker.rng import RegionRandomness
from smddp.sagemaker.tensor_parallel import adapters, styles
from smddp.sagemaker.tensor_parallel.border import Block, is_random
from smddp.sagemaker.tensor_parallel.heads import Degrees, Heads
from smddp.sagemaker.tensor_parallel.plan_entries import style_name
from smddp.sagemaker.tensor_parallel.regions import TensorGroup

_PARTS = {"packed_colwise": 2, "packed_qkv_colwise": 3}
_OF_EXPERTS = ("packed_rowwise", "bias_of_sum")
# Activation functions between the two projections of an MLP, some of which learn (Apertus' xIELU): as the norms above.
_ACTIVATIONS = ("act_fn", "act", "activation_fn")


class Planner:
    """Creates the style of every module named by a plan. Does not modify the model."""

    def __init__(self, model: nn.Module, tp: TensorGroup, seed: int, sequence: bool) -> None:
        self.model, self.tp, self.seed, self.sequence = model, tp, seed, sequence
        self.degrees = Degrees(tp.size)
        self.blocks: dict[str, Block] = {}
        self.heads = Heads(model, tp, self.degrees)
        self._listed: list[str] = []
        self.adapted: list[adapters.Adapted] = []
        self.warnings: list[str] = []

    def styles(self, entries: Mapping[str, Any]) -> dict[str, ParallelStyle]:
        """Module name -> style.

        Raises ValueError (unknown styles, sizes that do not divide), NotImplementedError (known, but not built).
        """
        modules = dict(self.model.named_modules())
        own = {name: style for name, style in entries.items() if isinstance(style, ParallelStyle)}
        named = {name: style_name(style, name) for name, style in entries.items() if name not in own}
        self._listed = [
            name
            for name, style in named.items()
            if style == hf.LISTED_EXPERTS or (style == "moe_tp_experts" and self._calls_list(name))
        ]
        heads = hf.attention_heads(self.model)
        if heads is not None:
            self.degrees.need(heads, "num_attention_heads")
        made: dict[str, ParallelStyle] = dict(own)
        for name, style in named.items():
            if name in modules:
                made.update(self._styles(name, modules[name], style, named))
        made.update(self._head_norms(named, modules))
        made.update(self._activations(named, modules))
        made.update(self._shared_keys(named, modules))
        self.degrees.check()
        self.heads.check(named)
        return {name: style for name, style in made.items() if not isinstance(style, styles.Whole)}

    def with_tied(self, entries: Mapping[str, Any], tied: list[list[str]]) -> dict[str, Any]:
        """``entries`` with styles for embeddings that share their weight with a head that is shared."""
        entries = dict(entries)
        for names in tied:
            owners = [name.rpartition(".")[0].removesuffix(f".{adapters.BASE}") for name in names]
            if not any(owner in entries for owner in owners):
                continue
            for owner in owners:
                if any(entries.get(name) == "tied" for name in names if name.rpartition(".")[0] == owner):
                    continue
                if isinstance(self.model.get_submodule(owner), nn.Embedding):
                    entries.setdefault(owner, "embedding_rowwise")
                elif owner not in entries:
                    raise NotImplementedError(f"{owner} shares a weight with {owners[0]}, and the plan names only one")
        return entries

    def _block(self, name: str) -> Block:
        """Returns the block of the module that holds ``name``."""
        parent = name.rpartition(".")[0]
        if parent not in self.blocks:
            block = self.blocks[parent] = Block(self.tp, self.sequence and self._in_layer(parent), parent)
            block.open = any(parent.startswith(f"{listed}.") for listed in self._listed)
            if is_random(self.model.get_submodule(parent)):
                block.randomness = RegionRandomness(self.seed, self.tp.rank)
        return self.blocks[parent]

    def _alone(self, name: str) -> Block:
        """A block of the module ``name`` itself."""
        return self.blocks.setdefault(name, Block(self.tp, name=name))

    def _in_layer(self, name: str) -> bool:
        return any(part.isdigit() for part in name.split("."))

    def _styles(self, name: str, module: nn.Module, style: str, named: Mapping[str, str]) -> dict[str, ParallelStyle]:
        """The style of ``module``; where it is an adapter, that of its projection."""
        base = adapters.base_of(module)
        made = self._style(name, base or module, style, named)
        if style == "moe_tp_experts" and name in self._listed:
            return {name.rpartition(".")[0]: made}
        # A key that all heads use has its adapter's part in it.
        if base is None or isinstance(made, styles.Whole | styles.SharedKey) or not isinstance(made, styles.Style):
            return {name: made}
        adapted = adapters.Adapted(name, module, made)
        self.adapted.append(adapted)
        self.blocks.update({f"{name}.{part}": border for part, border in adapted.borders.items()})
        return {f"{name}.{adapters.BASE}": made}

    def _style(self, name: str, module: nn.Module, style: str, named: Mapping[str, str]) -> ParallelStyle:
        block = self._block(name)
        if style == "replicate":
            return styles.Whole(block)
        if style == "replicated_with_grad_allreduce":
            return styles.InRegion(block)
        if style in ("bias_by_head", "alibi_by_head", "norms_by_head"):
            return self._by_head(name, module, style)
        if style == "embedding_rowwise":
            return self._embedding(name, module)
        if style == "moe_tp_experts":
            return self._experts(name, module, named)
        if style == "mla_kv_a_proj":
            return self._shared_key(name)
        if style == "moe_identity_expert":
            return styles.IdentityExpert(block)
        if style == "local_params":
            return self._own_of_heads(name, module, named)
        if style == hf.LISTED_EXPERTS:
            return styles.ListedExperts(block)
        if style in _OF_EXPERTS:
            raise ValueError(f"plan entry {name!r}: style {style!r} is for parameters of experts, not {_kind(module)}")
        rows, columns = _sizes(name, module, style)
        what = _general(name)
        if style == "grouped_qkv_colwise":
            return self._grouped(name, module)
        if style.startswith("rowwise"):
            self.degrees.need(rows, f"{what} (in)")
            return styles.Rowwise(block, split=style == "rowwise_split_input")
        if style == "colwise_gather_output":
            if columns % self.tp.size:
                self._stays_whole(name, columns)
                return styles.Whole(block)
            return styles.Colwise(self._alone(name), gather=True)
        parts = _PARTS.get(style, 1)
        if style in ("packed_qkv_colwise", "interleaved_qkv_colwise"):
            self.heads.fused(name, columns, style)
        if style == "colwise":
            self.heads.colwise(name, columns)
        if style == "colwise" and hf.is_key_or_value(name):
            heads = self.heads.key_or_value(name)
            if heads is not None:
                return styles.KeyValue(block, *heads)
        self.degrees.need(columns // parts, f"{what} (out{f', each of {parts} parts' if parts > 1 else ''})")
        return styles.Colwise(block, parts=parts)

    def _by_head(self, name: str, module: nn.Module, style: str) -> ParallelStyle:
        """Styles of what holds, or is given, something for each head."""
        if style == "norms_by_head":
            return styles.NormsByHead(self._block(name), self.heads.by_head(name, module))
        if style == "bias_by_head":
            if not isinstance(module, nn.Embedding):
                raise ValueError(f"plan entry {name!r}: style {style!r} is for nn.Embedding, not {_kind(module)}")
            self.degrees.need(module.embedding_dim, f"{_general(name)} (heads)")
            return styles.BiasByHead(self._block(name))
        heads = hf.heads_of(module)[0]
        if heads is None:
            raise ValueError(
                f"plan entry {name!r}: style {style!r}: {_kind(module)} does not say how many heads it has"
            )
        self.degrees.need(heads, "attention heads")
        return styles.AlibiByHead(Block(self.tp), heads)

    def _grouped(self, name: str, module: nn.Module) -> ParallelStyle:
        """Falcon: (kv heads, [query heads..., key, value], head_dim); 3 * heads if it has no groups."""
        attention = hf.as_attention(self.model.get_submodule(name.rpartition(".")[0]))
        query, kv = attention.num_heads, attention.num_kv_heads
        self.heads.share(name, query, kv)
        if kv % self.tp.size == 0:
            return styles.Colwise(self._block(name))
        if self.tp.size % kv:
            self.degrees.need(kv, "num_kv_heads (or a multiple of it as the degree)")
        return styles.GroupedQKV(self._block(name), kv, query // kv, attention.head_dim)

    def _embedding(self, name: str, module: nn.Module) -> ParallelStyle:
        if not isinstance(module, nn.Embedding):
            raise ValueError(f"plan entry {name!r}: style embedding_rowwise is for nn.Embedding, not {_kind(module)}")
        if module.scale_grad_by_freq:
            raise NotImplementedError(
                f"{name}: an embedding with scale_grad_by_freq needs all its rows on one rank; leave it out of the plan"
            )
        if module.weight.shape[0] % self.tp.size:
            self._stays_whole(name, module.weight.shape[0])
            return styles.Whole(Block(self.tp))
        return styles.VocabularyEmbedding(Block(self.tp))

    def _experts(self, name: str, module: nn.Module, named: Mapping[str, str]) -> ParallelStyle:
        if name in self._listed:
            return styles.RoutedExperts(Block(self.tp))
        dims, biases = {}, []
        for parameter, value in module.named_parameters(recurse=False):
            style = named.get(f"{name}.{parameter}")
            if style is None:
                raise NotImplementedError(
                    f"{name}.{parameter}: the plan gives no style for this parameter of experts; give one with it, "
                    'config={"tp_plan": {...}}, or set tensor_parallel_degree=1 for this model'
                )
            if style == "bias_of_sum":
                biases.append(parameter)
                continue
            dim, parts = hf.experts_layout(module, parameter, style)
            if dim < 1:
                raise ValueError(
                    f"plan entry '{name}.{parameter}': style {style!r} would cut between experts: a bias takes "
                    "'rowwise', or 'bias_of_sum' where it is added to the sum"
                )
            dims[parameter] = (dim, parts)
            self.degrees.need(value.shape[dim] // parts, f"{_general(name)}.{parameter}")
        if not dims:
            return styles.Whole(Block(self.tp))  # experts are modules with separate styles
        return styles.StackedExperts(Block(self.tp), dims, tuple(biases))

    def _calls_list(self, name: str) -> bool:
        """Returns True if ``name`` is a list of experts that its layer calls through a custom method."""
        layer = self.model.get_submodule(name.rpartition(".")[0])
        return isinstance(self.model.get_submodule(name), nn.ModuleList) and hasattr(layer, "moe")

    def _shared_key(self, name: str) -> ParallelStyle:
        attention = self.model.get_submodule(name.rpartition(".")[0])
        columns = getattr(attention, "qk_rope_head_dim", None)
        if not isinstance(columns, int):
            raise ValueError(
                f"plan entry {name!r}: style 'mla_kv_a_proj': {_kind(attention)} does not say how many columns are the "
                "key of all heads: give it the attribute qk_rope_head_dim"
            )
        return styles.SharedKey(self._block(name), columns)

    def _shared_keys(
        self, named: Mapping[str, str], modules: Mapping[str, nn.Module]
    ) -> Iterator[tuple[str, ParallelStyle]]:
        """The keys for all heads of latent attention that is cut by heads, whichever plan forgets them."""
        for name, style in named.items():
            parent, _, last = name.rpartition(".")
            full = f"{parent}.{hf.LATENT}"
            if (last, style) == ("kv_b_proj", "colwise") and full in modules and full not in named:
                yield full, self._shared_key(full)

    def _own_of_heads(self, name: str, module: nn.Module, named: Mapping[str, str]) -> ParallelStyle:
        """The style of an attention module whose own parameters are of single heads, as sinks."""
        found = {own: p for own, p in module.named_parameters(recurse=False) if f"{name}.{own}" in named}
        for own, parameter in found.items():
            if parameter.shape[0] != hf.attention_heads(self.model):
                raise ValueError(
                    f"plan entry {name!r}: style 'local_params' is for parameters with an element for each of the "
                    f"{hf.attention_heads(self.model)} attention heads, and {own} is of shape {tuple(parameter.shape)}"
                )
        return styles.LocalParams(Block(self.tp), tuple(found))

    def _head_norms(
        self, named: Mapping[str, str], modules: Mapping[str, nn.Module]
    ) -> Iterator[tuple[str, ParallelStyle]]:
        for name, style in named.items():
            parent, _, last = name.rpartition(".")
            if (last, style) != ("q_proj", "colwise") and not style.endswith("qkv_colwise"):
                continue
            # Norms of single heads are inside the region, independent of their names and of the plan's entries.
            for child, norm in modules[parent].named_children():
                full = f"{parent}.{child}"
                if full in named or child in hf.LATENT_NORMS or "norm" not in f"{child} {_kind(norm)}".lower():
                    continue
                wide = [p for p in modules[full].parameters() if p.numel() != hf.head_dim(modules[parent])]
                if wide:
                    raise NotImplementedError(
                        f"{full}: a norm over all heads, which tensor parallelism gives to several ranks; set "
                        "tensor_parallel_degree=1 for this model"
                    )
                yield full, styles.InRegion(self._block(full))

    def _activations(
        self, named: Mapping[str, str], modules: Mapping[str, nn.Module]
    ) -> Iterator[tuple[str, ParallelStyle]]:
        for parent in {name.rpartition(".")[0] for name, style in named.items() if style == "rowwise"}:
            for last in _ACTIVATIONS:
                full = f"{parent}.{last}"
                if full not in modules or full in named or not list(modules[full].parameters()):
                    continue
                wide = any(p.numel() != 1 for p in modules[full].parameters())
                if wide or list(modules[full].children()):
                    raise NotImplementedError(
                        f"{full}: an activation function with separate parameters for each column; set "
                        "tensor_parallel_degree=1 for this model"
                    )
                yield full, styles.InRegion(self._block(full))

    def _stays_whole(self, name: str, vocabulary: int) -> None:
        multiple = -(-vocabulary // self.tp.size) * self.tp.size
        self.warnings.append(
            f"{name}: {vocabulary} rows do not divide by tensor_parallel_degree={self.tp.size}, so every rank of a "
            f"tensor group holds all of them; resize the vocabulary to {multiple} to share them"
        )

    def emit_warnings(self) -> None:
        for text in dict.fromkeys([*self.warnings, *self.heads.warnings]):
            warnings.warn(text, stacklevel=4)


def _sizes(name: str, module: nn.Module, style: str) -> tuple[int, int]:
    """(in, out) of a linear module. Raises ValueError for others."""
    if isinstance(module, nn.Linear):
        return module.weight.shape[1], module.weight.shape[0]
    if hf.is_conv1d(module):
        weight = hf.weight_of(module)
        return weight.shape[0], weight.shape[1]
    raise ValueError(
        f"plan entry {name!r}: style {style!r} is for nn.Linear (and transformers' Conv1D), not {_kind(module)}"
    )


def _kind(module: nn.Module) -> str:
    return type(module).__name__


def _general(name: str) -> str:
    """Replaces numbers in ``name`` by `*`, since all layers have equal sizes."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
