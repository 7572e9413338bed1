"""A step of a pipeline against one process that accumulates over the same microbatches."""

from __future__ import annotations

import copy
import warnings

import smddp.modelparallel.model as of_model
import smddp.modelparallel.partitioning.partition as partition
import torch
import torch.distributed as dist
from smddp.modelparallel import initialize
from smddp.modelparallel.activation import set_activation_checkpointing
from smddp.modelparallel.state import state
from smddp.modelparallel.step import step


class Alone:
    """The model in one process, as a step function sees it."""

    def __init__(self, model, microbatches):
        self.model, self.microbatches = model, microbatches

    def __call__(self, *args, **kwargs):
        return self.model(*args, **kwargs)

    def backward(self, loss, gradient=None):
        loss.backward(torch.ones_like(loss) / self.microbatches if gradient is None else gradient / self.microbatches)


def leaves(result):
    """The tensors of a step function's result, or of a `StepOutput` of them, in one order."""
    found = torch.utils._pytree.tree_leaves(result)
    return [each for each in found if isinstance(each, torch.Tensor) or hasattr(each, "outputs")]


def one_process(model, function, data, microbatches):
    """Each result tensor of each microbatch, and the gradients by name."""
    alone = Alone(model, microbatches)
    results = [function(alone, *(x.chunk(microbatches)[number] for x in data)) for number in range(microbatches)]
    tensors = [[leaf.detach() for leaf in leaves(result)] for result in results]
    return tensors, {name: q.grad for name, q in model.named_parameters()}


def gradients(model):
    return {name: q.grad.clone() for name, q in model.local_named_parameters() if q.grad is not None}


def layers(model):
    """Those of every list of layers; where there is none, the model's parts."""
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return [layer for each in lists for layer in each] or list(model.children())


class Pipeline:
    """A model in a pipeline for the time of a `with`, and what the same is in one process."""

    def __init__(
        self,
        make,
        function,
        data,
        stages,
        microbatches,
        pipeline="interleaved",
        place=None,
        checkpointed=False,
        **config,
    ):
        self.function, self.microbatches = function, microbatches
        size = dist.get_world_size()
        config = {
            "partitions": stages,
            "microbatches": microbatches,
            "pipeline": pipeline,
            "ddp": size > stages,
            **({"auto_partition": False, "default_partition": 0} if place else {}),
            **config,
        }
        initialize.init(config)
        torch.manual_seed(1)
        self.module = make()
        self.alone = copy.deepcopy(self.module)
        ranks = state.ranks
        self.data = tuple(x.chunk(ranks.rdp_size)[ranks.rdp_rank] for x in data)
        if place:
            for module, stage in place(self.module, stages):
                partition.set_partition(module, stage)
        self.model = of_model.DistributedModel(self.module)
        for layer in layers(self.module) if checkpointed else ():
            set_activation_checkpointing(layer)
        self.step = step(function)

    def run(self):
        given = self.data if state.ranks.pp_rank == 0 else tuple(torch.empty(0) for _ in self.data)
        return self.step(self.model, *given)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        state.reset()


def check(
    make,
    function,
    data,
    stages,
    microbatches,
    exact=True,
    **options,
):
    """Losses and gradients of a pipeline are those of one process, and the same bits come out twice."""
    with (
        warnings.catch_warnings(),
        Pipeline(make, function, data, stages, microbatches, **options) as both,
    ):
        warnings.simplefilter("ignore")
        wanted, wanted_gradients = one_process(both.alone, function, both.data, microbatches)
        group, size = state.ranks.rdp_group, state.ranks.rdp_size
        # Another backend's order of a sum over more than two replicas depends on where in a buffer a gradient lies.
        exact = exact and (size <= 2 or dist.get_backend() == "smddp")
        if size > 1:
            for gradient in wanted_gradients.values():
                if gradient is not None:
                    dist.all_reduce(gradient, group=group)
                    gradient /= size
        found = leaves(both.run())
        for index, output in enumerate(found):
            for number, tensor in enumerate(output.outputs):
                assert torch.equal(tensor, wanted[number][index]), (index, number, tensor, wanted[number][index])
        first = gradients(both.model)
        names = [None] * dist.get_world_size()
        dist.all_gather_object(names, sorted(first))
        expected = {name for name, gradient in wanted_gradients.items() if gradient is not None}
        found_names = {name for each in names for name in each}
        assert found_names == expected, expected ^ found_names
        largest = max(gradient.abs().max() for gradient in wanted_gradients.values() if gradient is not None)
        for name, gradient in first.items():
            if exact:
                assert torch.equal(gradient, wanted_gradients[name]), name
            else:
                scale = max(wanted_gradients[name].abs().max(), 1e-4 * largest)
                worst = ((gradient - wanted_gradients[name]).abs().max() / scale).item()
                assert worst < 1e-6, (name, worst)
        for q in both.module.parameters():
            q.grad = None
        both.run()
        second = gradients(both.model)
        assert first.keys() == second.keys()
        assert all(torch.equal(gradient, second[name]) for name, gradient in first.items())
        return both.model
