"""Experts that no token of a rank chooses, under FSDP2."""

from collections.abc import Callable
from typing import Any, NamedTuple

import smddp.sagemaker as tsm
import torch
import torch.distributed as dist
from smp_cases.models import batch, loss_of, part_of, tiny
from smp_cases.parity import check_gradients, full, wrap2
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers.modeling_outputs import BaseModelOutput

SIZE = 8


class Named(NamedTuple):
    number: int
    hidden: torch.Tensor


# Outputs of a block, from the number of experts and the hidden states, and the way back to the latter.
OUTPUTS = {
    "tensor": (lambda number, hidden: hidden, lambda output: output),
    "tuple": (lambda number, hidden: (hidden, number), lambda output: output[0]),
    "list": (lambda number, hidden: [number, hidden], lambda output: output[1]),
    "dict": (lambda number, hidden: {"number": number, "hidden": hidden}, lambda output: output["hidden"]),
    "NamedTuple": (Named, lambda output: output.hidden),
    "ModelOutput": (lambda number, hidden: BaseModelOutput(hidden), lambda output: output.last_hidden_state),
    "logits first": (lambda number, hidden: (hidden.detach().clone(), hidden), lambda output: output[1]),
}


class Routed(nn.Module):
    """Experts in a list; the first column of a token's input selects the expert."""

    def __init__(self, output: Callable[[int, torch.Tensor], Any]) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(4))
        self.output = output

    def forward(self, x: torch.Tensor) -> Any:
        """(tokens, SIZE) -> an output that holds the same."""
        chosen, y = x[:, 0].long(), torch.zeros_like(x)
        for i in chosen.unique().tolist():
            y[chosen == i] = self.experts[i](x[chosen == i])
        return self.output(len(self.experts), y)


def _inputs() -> torch.Tensor:
    """Rank r's two tokens, of eight, go to expert r; none goes to the last."""
    x = torch.randn(8, SIZE, generator=torch.Generator().manual_seed(3))
    x[:, 0] = torch.tensor([0.0, 0, 1, 1, 2, 2, 0, 0])
    return x


def case_experts_that_a_rank_misses_have_the_gradients_of_one_process():
    """With every kind of output."""
    for kind, (output, hidden) in OUTPUTS.items():
        torch.manual_seed(0)
        plain = Routed(output)
        hidden(plain(_inputs())).square().mean().backward()
        torch.manual_seed(0)
        tsm.init({"hybrid_shard_degree": 2})
        try:
            block = Routed(output)
            fully_shard(block)
            found = block(part_of(_inputs(), dist.get_rank(), 4))
            assert type(found) is type(plain(_inputs())), kind
            hidden(found).square().mean().backward()
            for (name, parameter), alone in zip(block.named_parameters(), plain.parameters()):
                wanted = torch.zeros_like(alone) if alone.grad is None else alone.grad
                assert torch.allclose(parameter.grad.full_tensor(), wanted, atol=1e-6), (kind, name)
        finally:
            tsm.state.reset()


def case_mixtral_trains_where_a_rank_misses_an_expert():
    ids = batch(0)
    ids[:4] = 5  # one token over and over, so that its rows choose two experts of four in the first layer
    plain = tiny("mixtral")
    loss_of(plain, ids).backward()
    gradients = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    for config in ({"hybrid_shard_degree": 2}, {"hybrid_shard_degree": 2, "tensor_parallel_degree": 2}):
        tsm.init(config)
        try:
            model = wrap2(tsm.transform(tiny("mixtral")), False)
            before = {name: tensor.clone() for name, tensor in full(model).items()}
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            loss_of(model, part_of(ids, tsm.state.dp_rank, tsm.state.dp_size)).backward()
            optimizer.step()
            check_gradients(before, full(model), gradients)
        finally:
            tsm.state.reset()
