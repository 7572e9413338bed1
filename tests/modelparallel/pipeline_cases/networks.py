"""Small models of every shape that a pipeline has to cut, a step function for each, and its batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

SIZE = 32


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=256,
        n_positions=64,
        n_embd=64,
        n_layer=8,
        n_head=4,
        use_cache=False,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        bos_token_id=1,
        eos_token_id=2,
    )
    return GPT2LMHeadModel(config)


def bert():
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=256,
            hidden_size=64,
            num_hidden_layers=6,
            num_attention_heads=4,
            intermediate_size=128,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            max_position_embeddings=64,
        )
    )


def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=256,
            d_model=64,
            d_kv=16,
            d_ff=128,
            num_layers=4,
            num_heads=4,
            dropout_rate=0.0,
            use_cache=False,
            decoder_start_token_id=0,
            pad_token_id=0,
        )
    )


def bart():
    from transformers import BartConfig, BartForConditionalGeneration

    return BartForConditionalGeneration(
        BartConfig(
            vocab_size=256,
            d_model=64,
            encoder_layers=3,
            decoder_layers=3,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=128,
            decoder_ffn_dim=128,
            dropout=0.0,
            attention_dropout=0.0,
            activation_dropout=0.0,
            max_position_embeddings=64,
            use_cache=False,
        )
    )


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=2,
            use_cache=False,
            max_position_embeddings=64,
        )
    )


def neox():
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    return GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=6,
            num_attention_heads=4,
            use_cache=False,
            max_position_embeddings=64,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def vit():
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=128,
            image_size=32,
            patch_size=8,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=10,
        )
    )


class Skips(nn.Module):
    """Skips across stages, functions between modules, in-place sums, a value used on two stages."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d, self.e = (nn.Linear(SIZE, SIZE) for _ in range(5))
        self.out = nn.Linear(2 * SIZE, 10)

    def forward(self, x):
        a = F.relu(self.a(x))
        b = F.relu(self.b(a))
        c = self.c(b)
        d = self.d(c + b)
        d += a * 0.5
        e = self.e(d.clone().mul_(2.0)) + c.mean(-1, keepdim=True)
        return self.out(torch.cat([e, a], -1))


class PingPong(nn.Module):
    """Neighbouring layers on different stages, back and forth."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(SIZE, 2 * SIZE), nn.GELU(), nn.Linear(2 * SIZE, SIZE)) for _ in range(8)
        )
        self.head = nn.Linear(SIZE, 10)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(F.layer_norm(x, (SIZE,)))
        return self.head(x)


def ids():
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(1, 256, (16, 16), generator=generator)
    mask = torch.ones_like(x)
    mask[::2, -5:] = 0
    return x, mask


def images():
    return torch.randn(16, 3, 32, 32, generator=torch.Generator().manual_seed(1)), torch.arange(16) % 10


def rows():
    return torch.randn(16, SIZE, generator=torch.Generator().manual_seed(1)), torch.arange(16) % 10


def language(model, x, mask):
    out = model(input_ids=x, attention_mask=mask, labels=x)
    model.backward(out["loss"])
    return out["loss"]


def everything(model, x, mask):
    out = model(input_ids=x, attention_mask=mask, labels=x)
    model.backward(out.loss)
    return {"loss": out.loss, "logits": out.logits}


def pictures(model, x, labels):
    loss = model(pixel_values=x, labels=labels).loss
    model.backward(loss)
    return loss


def classes(model, x, labels):
    out = model(x)
    loss = F.cross_entropy(out, labels)
    right = out.argmax(1).eq(labels).float().mean().item()  # a number of another stage
    model.backward(loss)
    return loss, right


def branches(model, x, labels):
    loss = F.cross_entropy(model(x), labels)
    if loss > 1.0:  # control flow on a number of another stage
        loss = loss * 2
    total = torch.tensor(0.0)
    total += loss
    model.backward(total)
    return total


# Name -> (model, step function, batch).
NETWORKS = {
    "gpt2": (gpt2, language, ids),
    "bert": (bert, language, ids),
    "t5": (t5, language, ids),
    "bart": (bart, language, ids),
    "llama": (llama, everything, ids),
    "neox": (neox, language, ids),
    "vit": (vit, pictures, images),
    "skips": (Skips, classes, rows),
    "branches": (Skips, branches, rows),
    "pingpong": (PingPong, classes, rows),
}
# Whose gradients cannot be equal to the bit: a parameter is used twice.
SHARED = ("gpt2", "bert", "t5", "bart")
