"""Which heads of an attention module a rank computes, and the checks of a plan that cutting heads takes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from smddp.sagemaker import hf
from smddp.sagemaker.tensor_parallel.modules import norms_of
from smddp.sagemaker.tensor_parallel.regions import TensorGroup
from smddp.text import divisors

# Projections with q, k and v, or gate and up, in one weight, by the names that families give them.
_FUSED_QKV = re.compile(r"qkv|query_key_value|c_attn|in_proj", re.IGNORECASE)
_FUSED_MLP = re.compile(r"gate_(and_)?up", re.IGNORECASE)


class Degrees:
    """Numbers that the degree must divide, collected so that one error can name the degrees that fit all."""

    def __init__(self, degree: int) -> None:
        self._degree = degree
        self._numbers: dict[str, int] = {}

    def need(self, number: int, what: str) -> None:
        self._numbers.setdefault(what, number)

    def check(self) -> None:
        """Raises ValueError if the degree does not divide one of the numbers."""
        degree = self._degree
        bad = [f"{what} {n} / {degree} = {n / degree:g}" for what, n in self._numbers.items() if n % degree]
        if bad:
            common = math.gcd(*self._numbers.values())
            raise ValueError(
                f"tensor_parallel_degree={degree} does not divide this model: {'; '.join(bad)}. "
                f"Degrees that work for it: {divisors(common)}"
            )


class Heads:
    """The heads of every attention module that a plan shares.

    Attributes:
        of: module name -> (query heads, key and value heads) that this rank computes.
        warnings: what a user should know, and no check can.
    """

    def __init__(self, model: nn.Module, tp: TensorGroup, degrees: Degrees) -> None:
        self._model, self._tp, self._degrees = model, tp, degrees
        self.of: dict[str, tuple[int, int]] = {}
        self.warnings: list[str] = []

    def share(self, name: str, query: int, key_value: int) -> None:
        """The attention module of the projection ``name`` has so many heads in all."""
        self._degrees.need(query, "attention heads")
        self.of[_parent(name)] = (max(1, query // self._tp.size), max(1, key_value // self._tp.size))

    def key_or_value(self, name: str) -> tuple[list[int], int] | None:
        """(the heads that this rank needs, head_dim) of a key or value projection that cannot be shared evenly."""
        attention = self._model.get_submodule(_parent(name))
        query_dim, query = hf.head_dim(attention), hf.query_of(attention)
        head_dim = hf.value_dim(attention) if hf.is_value(name) else query_dim
        if query_dim is None or head_dim is None or query is None:
            return None
        kv_heads = hf.weight_of(self._model.get_submodule(name)).shape[0] // head_dim
        groups = getattr(attention, "num_key_value_groups", None)
        # A query projection may include gates, so prefer the module's attribute.
        query_heads = groups * kv_heads if isinstance(groups, int) else hf.weight_of(query).shape[0] // query_dim
        self._degrees.need(query_heads, "attention heads")
        if query_heads % self._tp.size:
            return None
        wanted, each = wanted_heads(query_heads, kv_heads, self._tp)
        mine = query_heads // self._tp.size
        if kv_heads % self._tp.size == 0:
            self.of[_parent(name)] = (mine, kv_heads // self._tp.size)
            return None
        self.of[_parent(name)] = (mine, mine // each)
        return wanted, head_dim

    def fused(self, name: str, columns: int, style: str) -> None:
        """``name`` projects to q, k and v of equal sizes. Raises ValueError where they are not."""
        attention = self._model.get_submodule(_parent(name))
        head_dim, (query, key_value) = hf.head_dim(attention), hf.heads_of(attention)
        if head_dim is None:
            raise ValueError(
                f"plan entry {name!r}: style {style!r} shares heads, and {type(attention).__name__} does not say how "
                "large one is: give it the attribute head_dim"
            )
        if columns % (3 * head_dim) or (query is not None and columns != 3 * head_dim * query) or query != key_value:
            raise ValueError(
                f"plan entry {name!r}: style {style!r} is for as many columns of q as of k and of v, in heads of "
                f"{head_dim}: {type(attention).__name__} has {query} query heads, {key_value} key and value heads and "
                f"{columns} columns. Give q, k and v a projection each"
            )
        heads = columns // (3 * head_dim)
        self.share(name, heads, heads)

    def colwise(self, name: str, columns: int) -> None:
        """``name`` has its output columns cut, as they lie. Raises ValueError where that would cut across heads."""
        last, parent = name.rpartition(".")[2], self._model.get_submodule(_parent(name))
        head_dim, (query, key_value) = hf.head_dim(parent), hf.heads_of(parent)
        if _FUSED_MLP.search(last):
            raise ValueError(
                f"plan entry {name!r}: style 'colwise' would give some ranks gates and others what they gate: [gate | "
                "up] in one weight takes packed_colwise, which tp_plan is to say"
            )
        one_weight = head_dim and query and key_value and columns == (query + 2 * key_value) * head_dim
        if _FUSED_QKV.search(last) or (one_weight and columns != query * head_dim):  # type: ignore[operator]
            raise ValueError(
                f"plan entry {name!r}: q, k and v in one weight ({columns} columns), which style 'colwise' would cut "
                "across: [q | k | v] takes packed_qkv_colwise; heads one after another, each with its q, k and v, "
                "interleaved_qkv_colwise; Falcon's groups grouped_qkv_colwise. Say so in tp_plan; another order takes "
                "tensor_parallel_degree 1"
            )
        if query is None or _parent(name) in self.of or columns % query:
            return
        self._degrees.need(query, "attention heads")
        if head_dim is None:
            self.warnings.append(
                f"{_parent(name)}: {type(parent).__name__} has {query} heads and does not say how large one is "
                "(head_dim), so its attributes are unchanged: compare the plan with the whole model by tsm.verify()"
            )
        elif columns == query * head_dim:
            self.share(name, query, key_value or query)

    def by_head(self, name: str, module: nn.Module) -> list[int]:
        """The heads, of queries or of keys by the number of norms in ``module``, that this rank computes."""
        count = len(norms_of(module))
        attention = self._model.get_submodule(_parent(name))
        head_dim, query = hf.head_dim(attention), hf.query_of(attention)
        if not count or head_dim is None or query is None:
            raise ValueError(
                f"plan entry {name!r}: style 'norms_by_head' is for a module with a LayerNorm for each head, in an "
                f"attention module with head_dim and a query projection, not for {type(module).__name__}"
            )
        query_heads = hf.weight_of(query).shape[0] // head_dim
        if query_heads % self._tp.size:
            return []  # what `Degrees` refuses
        if count % self._tp.size == 0:
            mine = count // self._tp.size
            return list(range(self._tp.rank * mine, (self._tp.rank + 1) * mine))
        return wanted_heads(query_heads, count, self._tp)[0]

    def check(self, named: Mapping[str, str]) -> None:
        """Raises NotImplementedError for attention modules with direct parameters that ``named`` lacks."""
        for parent in self.of:
            for own, _ in self._model.get_submodule(parent).named_parameters(recurse=False):
                if f"{parent}.{own}" not in named:
                    raise NotImplementedError(
                        f"{parent}.{own}: a parameter of the attention module itself, which the plan does not name, so "
                        "which of it belongs to which head is not known; set tensor_parallel_degree=1 for this model"
                    )


def wanted_heads(query: int, key_value: int, tp: Any) -> tuple[list[int], int]:
    """The key and value heads that rank ``tp.rank`` of ``tp.size`` needs, and how many of its query heads use each.

    Heads are repeated where a rank's query heads do not use each of them equally often.
    """
    mine, group = query // tp.size, query // key_value
    used = [head // group for head in range(tp.rank * mine, (tp.rank + 1) * mine)]
    # The same choice on every rank, so that all of them repeat or none does.
    if mine % group == 0:
        return sorted(set(used)), group
    if group % mine == 0:
        return used[:1], mine
    return used, 1


def _parent(name: str) -> str:
    return name.rpartition(".")[0]
