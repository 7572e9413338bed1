"""The attention classes against explicit softmax, and Llama's layer against transformers' layer."""

from __future__ import annotations

import pytest
import torch
from smddp.sagemaker.nn.attn import FlashGroupedQueryAttention, FlashSelfAttention

B, H, S, D = 2, 4, 7, 8


def plain(q, k, v, bias=None, causal=False, scale=None):
    """(b, h, s, d) each; scores, softmax and sum in float64."""
    q, k, v = (t.double() for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    scores = q @ k.transpose(2, 3) * (scale or q.shape[3] ** -0.5)
    if bias is not None:
        scores = scores + bias
    if causal:
        rows, columns = scores.shape[2:]
        future = torch.ones(rows, columns, dtype=torch.bool).triu(columns - rows + 1)
        scores = scores.masked_fill(future, -torch.inf)
    return (scores.softmax(-1) @ v).float()


def made(heads=H, length=S, seed=0):
    return torch.randn(B, heads, length, D, generator=torch.Generator().manual_seed(seed))


def close(a, b):
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("scale", [None, 0.5])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["b h s d", "b s h d"])
@pytest.mark.parametrize("packed", [False, True])
def test_self_attention(packed, layout, causal, scale):
    q, k, v = made(seed=0), made(seed=1), made(seed=2)
    parts = [t if layout == "b h s d" else t.transpose(1, 2) for t in (q, k, v)]
    qkv = torch.cat(parts, dim=layout.split().index("h")) if packed else tuple(parts)
    found = FlashSelfAttention(scale=scale)(qkv, causal=causal, layout=layout)
    close(found, plain(q, k, v, causal=causal, scale=scale))


@pytest.mark.parametrize("layout", ["b h s d", "b s h d"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("keys", [S, S + 3])
@pytest.mark.parametrize("packed", [False, True])
def test_grouped_queries(packed, keys, causal, layout):
    """Also with more keys than queries: the queries are the last positions."""
    q, k, v = made(), made(2, keys, 1), made(2, keys, 2)
    inputs = [t if layout == "b h s d" else t.transpose(1, 2) for t in (q, k, v)]
    kv = torch.cat(inputs[1:], dim=layout.split().index("h")) if packed else (inputs[1], inputs[2])
    found = FlashGroupedQueryAttention()(inputs[0], kv, causal=causal, layout=layout)
    close(found, plain(q, k, v, causal=causal))


def test_default_layouts_are_the_documented():
    q, k, v = made(), made(seed=1), made(seed=2)
    close(FlashSelfAttention()((q, k, v)), plain(q, k, v))
    close(FlashGroupedQueryAttention()(q.transpose(1, 2), (k.transpose(1, 2), v.transpose(1, 2))), plain(q, k, v))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("floating", [False, True])
def test_mask(floating, causal):
    q, k, v = made(), made(seed=1), made(seed=2)
    takes_part = torch.ones(B, 1, 1, S, dtype=torch.bool)
    takes_part[1, ..., -2:] = False
    bias = torch.zeros(takes_part.shape).masked_fill(~takes_part, -torch.inf)
    found = FlashSelfAttention()((q, k, v), attn_mask=bias if floating else takes_part, causal=causal)
    close(found, plain(q, k, v, bias, causal))


@pytest.mark.parametrize("heads", [4, 6])
@pytest.mark.parametrize("causal", [False, True])
def test_alibi(causal, heads):
    q, k, v = made(heads), made(heads, seed=1), made(heads, seed=2)
    slopes = {4: [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8], 6: [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]}[heads]
    distance = torch.arange(S)[None, :] - torch.arange(S)[:, None]  # key minus query
    bias = torch.tensor(slopes).view(1, heads, 1, 1) * distance
    module = FlashSelfAttention(triton_flash_attention=True, use_alibi=True)
    wanted = plain(q, k, v, bias, causal)
    close(module((q, k, v), attn_mask=torch.ones(B, 1, 1, S, dtype=torch.bool), causal=causal), wanted)
    close(module((q, k, v), attn_mask=torch.zeros(B, 1, 1, S), causal=causal), wanted)
    close(module((q, k, v), attn_mask=bias[:, :, -1:], causal=causal), wanted)  # a mask that holds it already


def test_dropout_in_training_only():
    qkv = (made(), made(seed=1), made(seed=2))
    module = FlashSelfAttention(attention_dropout_prob=0.5)
    torch.manual_seed(0)
    assert not torch.allclose(module(qkv), plain(*qkv))
    close(module.eval()(qkv), plain(*qkv))


def test_cast_dtype():
    q, k, v = made(), made(seed=1), made(seed=2).bfloat16()
    found = FlashSelfAttention()((q, k, v), cast_dtype=torch.bfloat16)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), plain(q, k, v), atol=0.05, rtol=0.05)


def test_gradients_flow():
    qkv = torch.cat([made(), made(seed=1), made(seed=2)], dim=1).requires_grad_()
    other = qkv.detach().clone().requires_grad_()
    FlashSelfAttention()(qkv, causal=True).square().sum().backward()
    plain(*other.chunk(3, dim=1), causal=True).square().sum().backward()
    torch.testing.assert_close(qkv.grad, other.grad, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: FlashSelfAttention(1.0), "attention_dropout_prob"),
        (lambda: FlashSelfAttention(use_alibi=True), "triton_flash_attention"),
        (lambda: FlashSelfAttention(0.1, triton_flash_attention=True), "dropout"),
        (lambda: FlashSelfAttention(0.0, None, True, True)((made(),) * 3), "attn_mask"),
        (lambda: FlashSelfAttention()((made(),) * 3, layout="s b h d"), "layout"),
        (lambda: FlashSelfAttention()((made(),) * 2), "3 tensors"),
        (lambda: FlashSelfAttention()(made()), "packed"),
        (lambda: FlashSelfAttention()((made(), made(2), made(2))), "differ"),
        (lambda: FlashSelfAttention()((made(),) * 3, attn_mask=torch.ones(B, S)), "attn_mask"),
        (lambda: FlashSelfAttention()((made(),) * 3, attn_mask=torch.ones(B, 1, 1, S).long()), "int64"),
        (
            lambda: FlashGroupedQueryAttention()(made(), (made(3), made(3)), layout="b h s d"),
            "expected a multiple of 3",
        ),
        (lambda: FlashGroupedQueryAttention()(made(), (made(2), made(4)), layout="b h s d"), "differ"),
        (lambda: FlashGroupedQueryAttention()(made(), (made()[:1], made()[:1]), layout="b h s d"), "batch"),
    ],
)
def test_mismatched_shapes_are_rejected(call, says):
    with pytest.raises(ValueError, match=says):
        call()


# -- Llama's layer ---------------------------------------------------------------------------------------------


def models(implementation="eager"):
    """A model with transformers' attention, and the same model with the replaced attention."""
    from smddp.sagemaker.nn.huggingface.llama_flashattn import LlamaFlashAttention
    from smp_cases.models import tiny

    pair = []
    for ours in (False, True):
        model = tiny("llama").eval()
        model.set_attn_implementation("eager" if not ours else implementation)
        if ours:
            for i, layer in enumerate(model.model.layers):
                attention = LlamaFlashAttention(model.config, layer_idx=i)
                attention.load_state_dict(layer.self_attn.state_dict())
                layer.self_attn = attention
            assert model.config._attn_implementation == implementation, "the model's config stays"
        pair.append(model)
    return pair


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("padded", [False, True])
def test_llama_with_the_layer_in_place(padded, implementation):
    from smp_cases.models import batch

    own, ours = models(implementation)
    assert set(own.state_dict()) == set(ours.state_dict())
    ids = batch(0)
    mask = torch.ones_like(ids)
    if padded:
        mask[::2, :3] = 0
    seen = mask.bool()
    a, b = (m(input_ids=ids, attention_mask=mask, use_cache=False).logits for m in (own, ours))
    close(a[seen], b[seen])
    for logits in (a, b):
        logits[seen].square().mean().backward()
    for (name, p), q in zip(own.named_parameters(), ours.parameters()):
        torch.testing.assert_close(p.grad, q.grad, atol=1e-5, rtol=1e-4, msg=name)


def test_llama_generates_the_same_with_a_cache():
    from smp_cases.models import batch

    own, ours = models()
    a, b = (m.generate(batch(0)[:2], max_new_tokens=5, do_sample=False, pad_token_id=0) for m in (own, ours))
    assert torch.equal(a, b)


def layer_and_reference():
    """The layer alone, by its documented arguments, and a function that runs transformers' with a whole mask."""
    own, ours = models()
    reference, layer = own.model.layers[0].self_attn, ours.model.layers[0].self_attn

    def run(x, takes_part):
        positions = torch.arange(x.shape[1])[None]
        bias = torch.zeros(takes_part.shape).masked_fill(~takes_part, torch.finfo(torch.float32).min)
        embeddings = own.model.rotary_emb(x, positions)
        return reference(x, position_embeddings=embeddings, attention_mask=bias, past_key_values=None)[0]

    return layer, run


def causal_mask(length):
    return torch.ones(1, 1, length, length, dtype=torch.bool).tril()


def test_llama_layer_by_its_documented_arguments():
    layer, reference = layer_and_reference()
    x = torch.randn(2, 6, 32)
    wanted = reference(x, causal_mask(6))
    output, weights, cache = layer(x, None, torch.arange(6)[None], None, False, False)
    assert (weights, cache) == (None, None)
    close(output, wanted)
    padding = torch.ones(2, 6, dtype=torch.long)
    padding[0, 4:] = 0
    output, _, _ = layer(hidden_states=x, attention_mask=padding)
    wanted = reference(x, causal_mask(6) & padding.bool()[:, None, None, :])
    close(output[padding.bool()], wanted[padding.bool()])


@pytest.mark.parametrize("pieces", [(6,), (4, 2), (3, 1, 2)])
def test_llama_layer_continues_from_a_pair(pieces):
    layer, reference = layer_and_reference()
    x = torch.randn(2, 6, 32)
    cache, found = None, []
    for piece in x.split(pieces, dim=1):
        output, _, cache = layer(piece, past_key_value=cache, use_cache=True)
        found.append(output)
    close(torch.cat(found, dim=1), reference(x, causal_mask(6)))
    assert cache[0].shape == (2, 2, 6, 8)


def test_llama_layer_continues_from_a_transformers_cache():
    from transformers import DynamicCache

    layer, reference = layer_and_reference()
    x = torch.randn(2, 6, 32)
    cache, found = DynamicCache(), []
    for piece in x.split((4, 2), dim=1):
        output, _, returned = layer(piece, past_key_value=cache, use_cache=True)
        assert returned is cache
        found.append(output)
    close(torch.cat(found, dim=1), reference(x, causal_mask(6)))


def test_llama_layer_refuses():
    from smddp.sagemaker.nn.huggingface.llama_flashattn import LlamaFlashAttention
    from smp_cases.models import config
    from transformers import DynamicCache

    layer = LlamaFlashAttention(config("llama"))
    x = torch.randn(2, 6, 32)
    with pytest.raises(ValueError, match="output_attentions"):
        layer(x, output_attentions=True)
    with pytest.raises(ValueError, match="layer_idx"):
        layer(x, past_key_value=DynamicCache(), use_cache=True)
    with pytest.raises(ValueError, match=r"\(2, 6\)"):
        layer(x, attention_mask=torch.ones(2, 5))
