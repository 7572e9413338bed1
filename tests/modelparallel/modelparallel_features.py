"""The features of `smddp.modelparallel` that need private names, each used once; see `missing_names`."""

from __future__ import annotations

import missing_names
import torch
import torch.distributed as dist
from torch import nn


def begin() -> None:
    import smdistributed.modelparallel.torch as smp
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    smp.init({"pipeline_parallel_degree": 1, "microbatches": 2, "ddp": True})


def _model():
    import smdistributed.modelparallel.torch as smp

    return smp.DistributedModel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))


def step():
    import smdistributed.modelparallel.torch as smp

    model = _model()

    @smp.step
    def train(model, x):
        loss = model(x).sum()
        model.backward(loss)
        return loss

    train(model, torch.ones(4, 4))
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def environment():
    from smddp.modelparallel import private_names
    from smddp.modelparallel import step as steps

    with steps._environment()():
        pass
    assert private_names.timeout_of(dist.group.WORLD) > 1


def direct_call():
    _model()(torch.ones(2, 4)).sum().backward()


def stages():
    from smddp.modelparallel.pipeline import shape_inference
    from smddp.modelparallel.pipeline.placed_tensor import Form, Placed
    from smddp.modelparallel.private_names import pytree

    placed = Placed(Form.of(torch.ones(2)), None)
    flat, spec = pytree.tree_flatten(((placed, placed), {}))
    outcome = shape_inference.foresee(torch.add, "add", flat, spec)
    assert outcome.leaves[0][0].shape == (2,)


def checkpoint():
    model = _model()
    assert model.load_state_dict(model.state_dict()).missing_keys == []


FEATURES = (step, environment, direct_call, stages, checkpoint)


def main(path: str) -> None:
    """Uses each feature without the name."""
    missing_names.use(path, begin, FEATURES)
