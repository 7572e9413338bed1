"""Parameters of a shared model in operations with plain tensors, outside of their modules."""

import contextlib

import smddp.sagemaker as tsm
import torch
import torch.nn.functional as F
from ranks.errors import refused
from smp_cases.hybrid import wrap2
from smp_cases.models import tiny
from smp_cases.parts_alone import IDS
from smp_cases.tensor_parallel import initialized


def _plain_of(parameter):
    return torch.ones(parameter.shape)


#: Operations of one parameter with a plain tensor, and the numbers of its dimensions.
USES = {
    "product": (lambda p: _plain_of(p) * p, (1, 2)),
    "linear": (lambda p: F.linear(torch.ones(1, 6, p.shape[-1]), p), (2,)),
    "matrix": (lambda p: torch.ones(6, p.shape[0]) @ p, (2,)),
    "embedding": (lambda p: F.embedding(IDS, p), (2,)),
    "norm": (lambda p: F.layer_norm(torch.ones(2, p.shape[0]), p.shape, p), (1,)),
    "copy": (lambda p: p.detach().copy_(_plain_of(p)), (1, 2)),
}


def _refused(name, run, parameter):
    with refused("mixed torch.Tensor and DTensor", kind=RuntimeError):
        run(parameter)


def case_an_operation_of_a_parameter_and_a_plain_tensor_is_refused():
    """By torch: a local part in the place of the whole parameter would give wrong values."""
    for shard, wrap in ((2, wrap2), (1, lambda model: model)):
        with initialized(hybrid_shard_degree=shard, tensor_parallel_degree=2):
            model = wrap(tsm.transform(tiny(tie_word_embeddings=True)))
            for name, parameter in model.named_parameters():
                for use, (run, dims) in USES.items():
                    for mode in (torch.no_grad, contextlib.nullcontext) if parameter.dim() in dims else ():
                        with mode():
                            _refused((name, use, shard), run, parameter)
