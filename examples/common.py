"""Shared parts of the examples: a small GPT over bytes, its training text, the training loop and its figures.

The text is the source code of Python's own standard library, so that nothing is downloaded.

How the share of communication is measured. Every few steps each rank also runs the same forward and
backward on a *twin* of its model: the same work on the same data, without a single collective, on all
ranks at the same time, so that the cores are as busy as in the real step. The share is what the real
step takes beyond its twin, divided by the real step. This counts what training truly loses: time
hidden behind compute is not charged, time spent waiting for a slower rank is. A profiler would sum
the collectives instead, hidden or not, and slow the step down. The twin costs memory for one whole
model per rank and is left out of the tokens per second.
"""

import argparse
import statistics
import sys
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

VOCABULARY = 256  # a token is a byte
HELD_BACK = 0.05  # the share of the text that is never trained on


class Attention(nn.Module):
    """Causal attention; the number of heads follows from the projections' width, so a shard works alone."""

    def __init__(self, dim, heads, head_dim):
        super().__init__()
        self.head_dim = head_dim
        self.q = nn.Linear(dim, heads * head_dim, bias=False)
        self.k = nn.Linear(dim, heads * head_dim, bias=False)
        self.v = nn.Linear(dim, heads * head_dim, bias=False)
        self.out = nn.Linear(heads * head_dim, dim, bias=False)

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, dim, heads, head_dim, hidden):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim, heads, head_dim)
        self.feed_forward = FeedForward(dim, hidden)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class GPT(nn.Module):
    """`share` > 1 makes the part of the model that one of `share` tensor-parallel ranks computes."""

    def __init__(self, layers=4, dim=256, heads=4, context=128, share=1):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, dim)
        self.position = nn.Embedding(context, dim)
        sizes = (dim, heads // share, dim // heads, 4 * dim // share)
        self.blocks = nn.ModuleList(Block(*sizes) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, ids):
        x = self.token(ids) + self.position(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Text:
    """The bytes of the standard library's modules, in the order of their names; the same on every rank."""

    def __init__(self, limit=8 << 20):
        parts, size = [], 0
        for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
            if {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"} & set(path.parts):
                continue
            parts.append(path.read_bytes())
            size += len(parts[-1])
            if size > limit:
                break
        self.bytes = torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)
        if len(self.bytes) < 100_000:
            raise SystemExit(f"no standard library source under {sysconfig.get_path('stdlib')}")
        self.end = int(len(self.bytes) * (1 - HELD_BACK))

    def batch(self, seed, size, context, held_back=False):
        """`size` x (`context` + 1) bytes from random places; a seed always gives the same ones."""
        low, high = (self.end, len(self.bytes)) if held_back else (0, self.end)
        g = torch.Generator().manual_seed(seed)
        starts = torch.randint(low, high - context - 1, (size,), generator=g).tolist()
        return torch.stack([self.bytes[i : i + context + 1] for i in starts]).long()


class Progress:
    """A bar on a terminal; elsewhere (a log, CI) a line now and then."""

    def __init__(self, total, every=5.0):
        self.total, self.every = total, every
        self.terminal = sys.stdout.isatty()
        self.shown = 0.0

    def show(self, step, text):
        now = time.monotonic()
        last = step == self.total
        if not last and step > 1 and now - self.shown < (0.1 if self.terminal else self.every):
            return
        self.shown = now
        filled = 24 * step // self.total
        if self.terminal:
            bar = "#" * filled + "-" * (24 - filled)
            print(f"\r[{bar}] {step}/{self.total}  {text}\x1b[K", end="\n" if last else "", flush=True)
        else:
            print(f"step {step:4d}/{self.total}  {text}", flush=True)


def arguments(doc, extend=None):
    """The options of every example; `extend(parser)` adds an example's own."""
    p = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--backend", default="smddp", help="smddp, or gloo to compare (default: smddp)")
    p.add_argument("--steps", type=int, default=150)
    p.add_argument("--batch", type=int, default=4, help="sequences per rank and step")
    p.add_argument("--context", type=int, default=128, help="bytes per sequence")
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--dim", type=int, default=256)
    p.add_argument("--heads", type=int, default=4)
    p.add_argument("--rate", type=float, default=2e-3, help="greatest learning rate")
    p.add_argument("--seed", type=int, default=1, help="of the weights that training begins with (default: 1)")
    p.add_argument("--probe-every", type=int, default=10, help="steps between two looks at the share of communication")
    if extend:
        extend(p)
    return p.parse_args()


def start(o):
    """The process group. `smddp` needs no import: torch finds it by the wheel's entry points."""
    torch.set_num_threads(1)  # one rank a core
    torch.manual_seed(o.seed)  # the same weights everywhere
    dist.init_process_group(o.backend)


def make(o, share=1):
    return GPT(o.layers, o.dim, o.heads, o.context, share)


def loss_of(model, ids):
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def timed_pass(model, ids):
    """Forward and backward. Returns (loss, seconds)."""
    begun = time.perf_counter()
    loss = loss_of(model, ids)
    loss.backward()
    return loss.detach(), time.perf_counter() - begun


def mean(value):
    """The mean over all ranks of one number."""
    t = torch.tensor(float(value), dtype=torch.float64)
    dist.all_reduce(t)
    return t.item() / dist.get_world_size()


def schedule(step, o):
    """Share of the greatest learning rate: a short warm-up, then down in a straight line."""
    return min(1.0, (step + 1) / 10) * max(0.05, 1 - step / o.steps)


def train(o, name, model, twin, same_data=False):
    """Trains `model`; `twin` is the plain copy that the share of communication is measured by.

    same_data: all ranks work on one batch (tensor parallelism), not each on its own.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    text = Text()
    streams = 1 if same_data else world
    optimizer = torch.optim.AdamW(model.parameters(), o.rate, betas=(0.9, 0.95), weight_decay=0.01)
    progress = Progress(o.steps)
    if rank == 0:
        count = sum(p.numel() for p in make(o).parameters())
        print(
            f"{name}, backend {o.backend}: {world} processes, {count / 1e6:.1f} M parameters, "
            f"{len(text.bytes) / 1e6:.1f} MB of text, {streams * o.batch * o.context} tokens a step",
            flush=True,
        )
    real, alone, losses = [], [], []
    share, spent = 0.0, 0.0
    for step in range(o.steps):
        ids = text.batch(step * streams + (0 if same_data else rank), o.batch, o.context)
        for group in optimizer.param_groups:
            group["lr"] = o.rate * schedule(step, o)
        probe = step % o.probe_every == 2
        if probe:
            dist.barrier()  # both of the passes that are compared begin together
        begun = time.perf_counter()
        loss, seconds = timed_pass(model, ids)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        whole = time.perf_counter() - begun
        if step:  # the first step allocates
            spent += whole
        if probe:
            dist.barrier()
            _, without = timed_pass(twin, ids)
            twin.zero_grad(set_to_none=True)
            real.append(mean(whole))
            alone.append(mean(whole - seconds + without))
            share = max(0.0, 1 - statistics.median(alone) / statistics.median(real))
        losses.append(mean(loss))
        speed = streams * o.batch * o.context * step / spent if step else 0.0
        if rank == 0:
            progress.show(
                step + 1,
                f"loss {losses[-1]:.3f}  {speed:,.0f} tokens/s" + (f"  communication {share:.0%}" if real else ""),
            )
    held_back = text.batch(0, 4 * o.batch, o.context, held_back=True)
    with torch.no_grad():
        unseen = mean(loss_of(model, held_back))
    if rank == 0:
        k = min(5, max(1, o.steps // 4))
        first, last = statistics.mean(losses[:k]), statistics.mean(losses[-k:])
        print(
            f"loss {first:.3f} -> {last:.3f} (text never trained on: {unseen:.3f}), {speed:,.0f} tokens/s, "
            f"{share:.0%} of the step spent communicating"
        )
        print("paths: " + paths(o.backend), flush=True)
    fell = losses[-1] < losses[0]
    dist.destroy_process_group()
    if not fell:
        raise SystemExit(f"the loss did not fall: {losses[0]:.3f} -> {losses[-1]:.3f}")


def paths(backend):
    """Which way each collective took, in one line; the default group must be alive."""
    if backend != "smddp":
        return f"{backend} does not say"
    import smddp

    if hasattr(smddp, "paths"):
        return "; ".join(f"{collective}: {way}" for collective, way in smddp.paths().items())
    groups = smddp.info()["groups"]
    if not groups:
        return "this smddp does not say"
    used = ("all_gather", "reduce_scatter", "all_reduce")
    return "; ".join(f"{name}: {ways}" for name, ways in groups[0]["paths"].items() if name in used)
