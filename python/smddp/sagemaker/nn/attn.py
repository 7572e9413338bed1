"""Attention over torch's ``scaled_dot_product_attention``, which picks the fused kernel of the device at hand.

Dimensions: b batch, h heads, s positions, d elements of one head. Layout "b h s d" or "b s h d" is that of the
inputs; results are always (b, h, s, d).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

LAYOUTS = ("b h s d", "b s h d")


class FlashSelfAttention(nn.Module):
    """Self-attention with as many key and value heads as query heads.

    Args:
        attention_dropout_prob: in [0, 1); applied in training mode.
        scale: factor of the scores; None: 1 / sqrt(d).
        triton_flash_attention: accepted for scripts that set it, and needed by ``use_alibi``; the kernel is torch's
            choice either way. Without dropout, as in the original.
        use_alibi: bias the scores by the distance of the keys (ALiBi); each forward then needs a mask.

    Raises ValueError for a combination or value that cannot be.
    """

    def __init__(
        self,
        attention_dropout_prob: float = 0.0,
        scale: float | None = None,
        triton_flash_attention: bool = False,
        use_alibi: bool = False,
    ) -> None:
        super().__init__()
        _check_dropout(attention_dropout_prob)
        if use_alibi and not triton_flash_attention:
            raise ValueError("use_alibi=True needs triton_flash_attention=True")
        if triton_flash_attention and attention_dropout_prob > 0:
            raise ValueError(
                f"triton_flash_attention=True has no dropout, and attention_dropout_prob is {attention_dropout_prob}: "
                f"set one of them to its default"
            )
        self.attention_dropout_prob = attention_dropout_prob
        self.scale = scale
        self.triton_flash_attention = triton_flash_attention
        self.use_alibi = use_alibi

    def forward(
        self,
        qkv: torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        attn_mask: torch.Tensor | None = None,
        causal: bool = False,
        cast_dtype: torch.dtype | None = None,
        layout: str = "b h s d",
    ) -> torch.Tensor:
        """Attend.

        Args:
            qkv: queries, keys and values, each in ``layout``; or one tensor that holds them in this order along
                the heads, (b, 3h, s, d) or (b, s, 3h, d).
            attn_mask: (b or 1, h or 1, s or 1, s). Boolean: True where a key takes part. Floating: added to the
                scores. With use_alibi, one of a single head, e.g. (b, 1, 1, s), gets ALiBi's bias added; one of h
                heads is taken to hold it already.
            causal: each position sees itself and those before it.
            cast_dtype: compute in this dtype, e.g. where rotary embeddings left float32.
            layout: "b h s d" or "b s h d".

        Returns (b, h, s, d), of the dtype computed in.

        Raises ValueError for shapes that do not fit together.
        """
        q, k, v = (_to_bhsd(t, layout, cast_dtype) for t in _parts(qkv, 3, "qkv", layout))
        if not q.shape == k.shape == v.shape:
            raise ValueError(f"q, k and v differ in shape: {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}")
        if attn_mask is not None:
            _check_mask(attn_mask, q)
        if self.use_alibi:
            if attn_mask is None:
                raise ValueError("use_alibi=True needs attn_mask of shape (b, 1, 1, s)")
            attn_mask = _with_alibi(attn_mask, q)
        return _attend(q, k, v, attn_mask, causal, self.attention_dropout_prob * self.training, self.scale)


class FlashGroupedQueryAttention(nn.Module):
    """Attention whose query heads share fewer key and value heads.

    Args:
        attention_dropout_prob: in [0, 1); applied in training mode.
        scale: factor of the scores; None: 1 / sqrt(d).
    """

    def __init__(self, attention_dropout_prob: float = 0.0, scale: float | None = None) -> None:
        super().__init__()
        _check_dropout(attention_dropout_prob)
        self.attention_dropout_prob = attention_dropout_prob
        self.scale = scale

    def forward(
        self,
        q: torch.Tensor,
        kv: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        causal: bool = False,
        cast_dtype: torch.dtype | None = None,
        layout: str = "b s h d",
    ) -> torch.Tensor:
        """Attend.

        Args:
            q: queries in ``layout``.
            kv: keys and values, each in ``layout`` with a number of heads that divides the queries'; or one tensor
                that holds them in this order along the heads. They may hold more positions than ``q``, which then
                are its last ones.
            causal: each position sees itself and those before it.
            cast_dtype: compute in this dtype.
            layout: "b s h d" or "b h s d".

        Returns (b, h, s, d) with the queries' h and s, of the dtype computed in.

        Raises ValueError for shapes that do not fit together.
        """
        (q,) = (_to_bhsd(t, layout, cast_dtype) for t in _parts((q,), 1, "q", layout))
        k, v = (_to_bhsd(t, layout, cast_dtype) for t in _parts(kv, 2, "kv", layout))
        if k.shape != v.shape:
            raise ValueError(f"k and v differ in shape: {tuple(k.shape)}, {tuple(v.shape)}")
        if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
            raise ValueError(f"q {tuple(q.shape)} and k {tuple(k.shape)} (b, h, s, d) differ in batch or head size")
        if q.shape[1] % k.shape[1]:
            raise ValueError(f"{q.shape[1]} query heads, expected a multiple of {k.shape[1]} key and value heads")
        return _attend(q, k, v, None, causal, self.attention_dropout_prob * self.training, self.scale)


def _check_dropout(probability: float) -> None:
    if not 0 <= probability < 1:
        raise ValueError(f"attention_dropout_prob is {probability}; it must be >= 0 and < 1")


def _parts(packed: torch.Tensor | tuple[torch.Tensor, ...], count: int, name: str, layout: str) -> list[torch.Tensor]:
    """Returns ``count`` 4-d tensors, from a tuple or from a split along the heads."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}; it is one of {LAYOUTS}")
    if isinstance(packed, torch.Tensor):
        heads = layout.split().index("h")
        if packed.dim() != 4 or packed.shape[heads] % count:
            raise ValueError(
                f"{name} has shape {tuple(packed.shape)}; packed it is {layout!r} with {count} times the heads"
            )
        return list(packed.chunk(count, dim=heads))
    parts = list(packed)
    if len(parts) != count or any(t.dim() != 4 for t in parts):
        shapes = [tuple(t.shape) for t in parts]
        raise ValueError(f"{name} has shapes {shapes}; it is {count} tensors {layout!r}")
    return parts


def _to_bhsd(tensor: torch.Tensor, layout: str, dtype: torch.dtype | None) -> torch.Tensor:
    tensor = tensor if dtype is None else tensor.to(dtype)
    return tensor if layout == "b h s d" else tensor.transpose(1, 2)


def _check_mask(mask: torch.Tensor, q: torch.Tensor) -> None:
    b, h, s, _ = q.shape
    fits = mask.dim() == 4 and all(n in (1, full) for n, full in zip(mask.shape, (b, h, s, s)))
    if not fits or mask.shape[-1] != s:
        raise ValueError(
            f"attn_mask has shape {tuple(mask.shape)}; it is (b, 1, 1, s) = ({b}, 1, 1, {s}) or expands so"
        )
    if not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise ValueError(f"attn_mask is of {mask.dtype}; it is boolean (True takes part) or floating (added to scores)")


def _additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the mask as an additive bias of the scores."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, -torch.inf)


def _with_alibi(mask: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    heads, s = q.shape[1:3]
    if mask.shape[1] == heads > 1:
        return mask
    slopes = torch.tensor(_slopes(heads), dtype=torch.float32, device=q.device).view(1, heads, 1, 1)
    # Use the distance to the last key: softmax ignores a constant offset of a row's scores, so this equals the
    # distance to the query's position.
    distance = torch.arange(1 - s, 1, dtype=torch.float32, device=q.device).view(1, 1, 1, s)
    return _additive(mask, torch.float32) + slopes * distance


def _slopes(heads: int) -> list[float]:
    """ALiBi's factors: a geometric sequence that ends at 2^-8; for other numbers of heads than powers of two, that of
    the next smaller power, filled up with every second one of the next larger."""
    power = 2 ** int(math.log2(heads))
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    return slopes + [2.0 ** (-8.0 * (2 * i + 1) / (2 * power)) for i in range(heads - power)]


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    dropout: float,
    scale: float | None,
) -> torch.Tensor:
    rows, columns = q.shape[2], k.shape[2]
    # torch's causal mask requires square scores and excludes another mask.
    if causal and (mask is not None or rows != columns):
        past = torch.ones(rows, columns, dtype=torch.bool, device=q.device).tril(columns - rows)
        mask = past if mask is None else mask & past if mask.dtype == torch.bool else mask + _additive(past, mask.dtype)
        causal = False
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(q.dtype)
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=grouped
    )
