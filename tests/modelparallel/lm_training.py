"""Training steps of a small language model, in one process and in a job."""

from __future__ import annotations

import smdistributed.modelparallel.torch as smp
import torch
from torch.nn.utils import clip_grad_norm_


def gpt2(layers=4, heads=2):
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 16, "n_layer": layers, "n_head": heads}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def batch(number):
    return torch.randint(0, 64, (8, 12), generator=torch.Generator().manual_seed(number))


def mine(number):
    """This rank's part of a batch."""
    shared = smp.state.cfg.prescaled_batch
    size, rank = (smp.rdp_size(), smp.rdp_rank()) if shared else (smp.dp_size(), smp.dp_rank())
    return batch(number).chunk(size)[rank]


def loss_of(model, ids):
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def train_alone(model, optimizer, numbers):
    """Losses and gradient norms of steps in one process."""
    losses, norms = [], []
    for number in numbers:
        loss = loss_of(model, batch(number))
        loss.backward()
        norms.append(clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


@smp.step
def train_step(model, ids):
    loss = loss_of(model, ids)
    model.backward(loss)
    return loss


def train(model, optimizer, numbers, after_backward=lambda number: None):
    """Losses and gradient norms of steps. With `sdp_gradient_clipping` the optimizer's step clips."""
    losses, norms = [], []
    for number in numbers:
        loss = train_step(model, mine(number)).reduce_mean()
        after_backward(number)
        cfg = smp.state.cfg
        clipped = cfg.sharded_data_parallel_degree > 1 and cfg.sdp_gradient_clipping > 0
        norm = None if clipped else clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        norms.append((optimizer._global_grad_norm if clipped else norm).item())
        optimizer.zero_grad()
        losses.append(sum(smp.allgather(loss.item())) / smp.size())
    return losses, norms
