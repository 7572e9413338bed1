import os
import sys

import pytest
from ranks.pool import client_pool

HERE = os.path.dirname(os.path.abspath(__file__))
# The cases and their models.
sys.path.insert(0, HERE)


@pytest.fixture(scope="package")
def ranks():
    """Four ranks of the backend under test, shared by all cases."""
    with client_pool(4, HERE) as pool:
        yield pool


@pytest.fixture
def world():
    """Factory of worlds in torch's fake group, with this process as rank 0 and SMP initialized."""
    import smddp.sagemaker as tsm
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def make(size=4, **config):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
        tsm.init(config)

    yield make
    tsm.state.reset()
    if dist.is_initialized():
        dist.destroy_process_group()
