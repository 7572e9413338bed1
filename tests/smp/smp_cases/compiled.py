"""`torch.compile` of transformed models: one graph with unchanged training."""

import contextlib

import smddp.sagemaker as tsm
import torch
from smddp.sagemaker.tensor_parallel.transformer import TETransformerLayer
from smp_cases.models import batch, loss_of, part_of, tiny
from smp_cases.tensor_parallel import TOLERANCE, differences, initialized
from torch.distributed.fsdp import fully_shard


@contextlib.contextmanager
def fresh_compiler():
    torch._dynamo.reset()
    try:
        yield
    finally:
        torch._dynamo.reset()


def case_a_shared_model_is_one_graph_in_both_directions():
    """`fullgraph` raises at a break; the gradients are those of one process that compiles nothing."""
    with initialized(tensor_parallel_degree=2), fresh_compiler():
        plain, model = (tiny(num_hidden_layers=1) for _ in range(2))
        model = tsm.transform(model, config={"sequence_parallel": True})
        step = torch.compile(loss_of, backend="aot_eager", fullgraph=True)
        wanted, loss = loss_of(plain, batch(0)), step(model, batch(0))
        assert abs(loss.item() - wanted.item()) < TOLERANCE
        wanted.backward()
        loss.backward()
        assert differences(plain, model) < TOLERANCE


def case_compiled_layers_train_under_fully_shard():
    with initialized(hybrid_shard_degree=2, tensor_parallel_degree=2), fresh_compiler():
        plain, model = tiny(num_hidden_layers=1), tsm.transform(tiny(num_hidden_layers=1))
        for module in model.modules():
            if isinstance(module, TETransformerLayer):
                module.compile(backend="aot_eager", fullgraph=True)
                fully_shard(module)
        fully_shard(model)
        loss_of(plain, batch(0)).backward()
        loss_of(model, part_of(batch(0), tsm.state.dp_rank, tsm.state.dp_size)).backward()
        assert differences(plain, model) < TOLERANCE
