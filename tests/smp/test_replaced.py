"""Records of parameters that a wrapper replaces."""

import weakref

import torch
from smddp.sagemaker import replaced


def test_a_record_frees_the_parameters_that_are_replaced():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    freed, held = weakref.ref(model[0].weight), model[1].weight
    with replaced.recording(model, "wrap(Sequential)"):
        for layer in model:
            layer.weight = torch.nn.Parameter(torch.zeros(2, 2))
            assert layer is not model[0] or freed() is None, "the record keeps the whole model in memory"
    assert hasattr(held, replaced._REPLACED) and not hasattr(model[0].bias, replaced._REPLACED)
