"""ZeroRedundancyOptimizer: optimizer state sharded by parameter, beside DDP."""

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from training import assert_same, make_model, one_process, train

# Adam divides by a root of the gradients' squares, which enlarges rounding: double precision keeps
# the comparison at 1e-6 meaningful.
_DOUBLE = torch.float64


def _adam(parameters) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def _make():
    return make_model(_DOUBLE)


def _wanted() -> list[float]:
    return one_process(make=_make, optimizer=_adam, dtype=_DOUBLE)


def case_adam():
    model = DDP(_make())
    opt = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    assert_same(train(model, opt, dtype=_DOUBLE), _wanted())


def case_parameters_as_bucket_view():
    model = DDP(_make())
    opt = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, parameters_as_bucket_view=True, lr=0.01)
    assert_same(train(model, opt, dtype=_DOUBLE), _wanted())


def case_state_is_consolidated():
    import torch.distributed as dist

    model = DDP(_make())
    opt = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    train(model, opt, dtype=_DOUBLE)
    opt.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        assert len(opt.state_dict()["state"]) == len(list(model.parameters()))
