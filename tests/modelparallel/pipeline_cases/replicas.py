"""Two replicas of two stages: gradient averaging during the backward pass, and failures reported to all."""

import time

import pytest
import torch
import torch.distributed as dist
from pipeline_cases.against import Pipeline, gradients
from pipeline_cases.special import SIZE, Two, place, rows, square
from ranks.errors import refused
from smddp.modelparallel.data_parallel.replicas import Replicas
from smddp.modelparallel.model import DistributedModel
from smddp.modelparallel.state import state
from torch import nn
from torch.utils.checkpoint import checkpoint


class Deep(Two):
    """Two stages of several layers, so that a bucket is full before the backward pass is over."""

    def __init__(self):
        super().__init__()
        self.a = nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(3)))
        self.b = nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(3)))


class Buckets(Pipeline):
    """A pipeline with a bucket for each parameter."""

    def __init__(self, make, function=square, overlap=True, **config):
        super().__init__(make, function, rows(), 2, 4, place=place, **config)
        state.model = None
        self.model = DistributedModel(self.module, bucket_cap_mb=0, overlapping_allreduce=overlap)


def of_one_step(make, overlap):
    with Buckets(make, overlap=overlap) as both:
        both.run()
        for q in both.module.parameters():
            q.grad = None
        both.run()
        return gradients(both.model), both.model.replicas.early


def case_buckets_leave_during_the_backward_pass_and_the_means_are_the_same_bits():
    early, left = of_one_step(Deep, True)
    late, none = of_one_step(Deep, False)
    # Three layers of weight and bias. By the second step all of them are known, and all leave early.
    assert (left, none) == (6, 0)
    assert early.keys() == late.keys() and len(early) == 6
    assert all(torch.equal(gradient, late[name]) for name, gradient in early.items())


def case_a_parameter_that_backward_reaches_several_times_is_sent_when_it_is_complete():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)

        def forward(self, x):
            # Each of these runs a separate backward pass inside the segment's.
            x = checkpoint(self.inner, self.outer(x), use_reentrant=True)
            return checkpoint(self.inner, x, use_reentrant=True)

    class Model(Two):
        def __init__(self):
            super().__init__()
            self.b = Twice()

    early, _ = of_one_step(Model, True)
    late, _ = of_one_step(Model, False)
    assert early.keys() == late.keys() and early
    assert all(torch.equal(gradient, late[name]) for name, gradient in early.items())


def case_a_gradient_missing_on_one_replica_counts_as_zero():
    class Sometimes(Two):
        def __init__(self):
            super().__init__()
            self.b = Either()

    with Buckets(Sometimes) as both:
        both.run()
        found = gradients(both.model)
        if state.ranks.pp_rank == 1:
            assert sorted(found) == ["b.left.bias", "b.left.weight", "b.right.bias", "b.right.weight"], found
            whole = [None, None]
            dist.all_gather_object(whole, found, group=state.ranks.rdp_group)
            assert all(torch.equal(whole[0][name], whole[1][name]) for name in found)


class Either(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right, self.never = (nn.Linear(SIZE, SIZE) for _ in range(3))

    def forward(self, x):
        return (self.right if state.ranks.rdp_rank else self.left)(x)


def case_a_step_that_fails_in_one_pipeline_fails_in_all_and_the_next_goes_through():
    class Fails(nn.Linear):
        fail = -1

        def forward(self, x):
            if Fails.fail == state.ranks.rdp_rank:
                Fails.fail = -1
                raise ZeroDivisionError("on purpose")
            return super().forward(x)

    class Model(Deep):
        def __init__(self):
            super().__init__()
            self.b[2] = Fails(SIZE, SIZE)

    with Buckets(Model) as both:
        both.run()
        for replica in (0, 1):
            Fails.fail = replica
            begun = time.monotonic()
            with pytest.raises(RuntimeError, match="stage 1, module b: ZeroDivisionError: on purpose") as caught:
                both.run()
            elsewhere = f"the step failed on replica {replica}: RuntimeError" in str(caught.value)
            assert elsewhere == (state.ranks.rdp_rank != replica), caught.value
            assert time.monotonic() - begun < 2.0
            for q in both.module.parameters():
                q.grad = None
            both.run()
        # The arguments of the script are invalid in one pipeline.
        both.data = tuple(x[: 4 - state.ranks.rdp_rank] for x in both.data)
        with refused("x has 3 elements along axis 0, which 4 microbatches", kind=(ValueError, RuntimeError)):
            both.run()


def case_a_pipeline_that_fails_does_not_wait_for_the_others():
    class Slow(Two):
        def forward(self, x):
            if slow and state.ranks.rdp_rank:
                time.sleep(0.75)
            elif slow:
                raise ZeroDivisionError("at once")
            return super().forward(x)

    slow = False
    with Buckets(Slow) as both:
        both.run()
        slow = True
        begun = time.monotonic()
        with refused("at once", kind=RuntimeError):
            both.run()
        took = time.monotonic() - begun
        # Four microbatches of the slow one take three seconds.
        assert took < 2.6 if state.ranks.rdp_rank == 0 else took > 2.6, took


def case_a_gradient_that_comes_after_its_bucket_is_an_error():
    parameter = nn.Parameter(torch.zeros(4))
    replicas = Replicas([parameter], dist.group.WORLD, 1, True)
    for times in (1, 2):
        replicas.begin(outcome_pending=True)
        parameter.grad = None
        try:
            with replicas.watching([parameter]):
                for _ in range(times):
                    (parameter * 1.0).sum().backward()
        except RuntimeError as error:
            assert times == 2 and "overlapping_allreduce=False" in str(error), error
            replicas.fail(error)
        else:
            assert times == 1
            replicas.end()
