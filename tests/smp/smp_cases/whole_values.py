"""`load_state_dict` of a plain model's state dict into a sharded model."""

import smddp.sagemaker as tsm
import torch
from ranks.errors import refused
from smp_cases.hybrid import wrap2
from smp_cases.models import batch, loss_of, tiny
from smp_cases.tensor_parallel import TOLERANCE, initialized


def _other(family):
    """A model whose values are not those of `tiny`."""
    model = tiny(family)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.rand(parameter.shape, generator=torch.Generator().manual_seed(7)) / 10)
    return model


def case_plain_values_load_into_shared_families():
    # All forms in which weights are stored otherwise, and one without any.
    for family in ("llama", "gpt2", "falcon", "mixtral"):
        plain, ids = _other(family), batch(0)[:2]
        with initialized(tensor_parallel_degree=4), torch.no_grad():
            model = tsm.transform(tiny(family))
            result = model.load_state_dict(plain.state_dict())
            assert not result.missing_keys and not result.unexpected_keys, (family, result)
            assert abs(loss_of(plain, ids) - loss_of(model, ids)) < TOLERANCE, family


def case_plain_values_load_into_parts_and_under_fsdp2():
    plain, ids = _other("llama"), batch(0)[:2]
    with initialized(hybrid_shard_degree=2, tensor_parallel_degree=2), torch.no_grad():
        model = tsm.transform(tiny())
        model.model.load_state_dict(plain.model.state_dict())
        model.lm_head.load_state_dict(plain.lm_head.state_dict())
        assert abs(loss_of(plain, ids) - loss_of(model, ids)) < TOLERANCE
        model = wrap2(tsm.transform(tiny()))
        model.load_state_dict(plain.state_dict())
        assert abs(loss_of(plain, ids) - loss_of(model, ids)) < TOLERANCE
        with refused("size mismatch for lm_head.weight", kind=RuntimeError):
            model.load_state_dict({**plain.state_dict(), "lm_head.weight": torch.zeros(95, 32)})
