"""Error reporting: on all ranks within seconds, with microbatch, stage and module, and without a later hang."""

import threading
import time

import torch
import torch.nn.functional as F
from pipeline_cases.against import Pipeline
from pipeline_cases.special import SIZE, Two, place, rows, square
from ranks.errors import refused
from smddp.modelparallel.state import state
from torch import nn

SECONDS = 5.0


def provoke(make, function, *words, kind=RuntimeError, microbatches=4, place=place, seconds=SECONDS, **config):
    """A step of the function raises ``kind`` with all of ``words`` on every rank."""
    with Pipeline(make, function, rows(), 2, microbatches, place=place, **config) as both:
        begun = time.monotonic()
        with refused(*words, kind=kind) as caught:
            both.run()
        assert type(caught.value) is kind and time.monotonic() - begun < seconds, caught.value
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("smp ")]


def case_a_failing_module_ends_all_stages_within_a_second_with_one_cause():
    def failing():
        class Fails(nn.Linear):
            calls = 0

            def forward(self, x):
                Fails.calls += 1
                if Fails.calls == 3:
                    raise ZeroDivisionError("on purpose")
                return super().forward(x)

        class Model(Two):
            def __init__(self):
                super().__init__()
                self.b = Fails(SIZE, SIZE)

        return Model

    # The order of microbatches on the stage varies, so the third one is not fixed.
    expected = ("microbatch ", ", stage 1, module b: ZeroDivisionError: on purpose")
    # The first step of a process also loads modules, so it is not measured.
    provoke(failing(), square, *expected)
    provoke(failing(), square, *expected, seconds=1.0)
    # A ValueError keeps its type, also where it is raised between modules on all stages.

    def wrong(model, x):
        raise ValueError("nothing fits")

    provoke(Two, wrong, "microbatch ", "nothing fits", kind=ValueError, seconds=1.0)


def case_a_failing_backward_pass_ends_all_stages_with_one_cause():
    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ArithmeticError("no derivative")

    class Model(Two):
        def forward(self, x):
            return self.b(Bad.apply(self.a(x)))

    provoke(Model, square, "microbatch ", "no derivative")


def case_after_a_failed_step_the_next_one_goes_through():
    class Sometimes(nn.Linear):
        fail = True

        def forward(self, x):
            if Sometimes.fail:
                Sometimes.fail = False
                raise ValueError("once")
            return super().forward(x)

    class Model(Two):
        def __init__(self):
            super().__init__()
            self.b = Sometimes(SIZE, SIZE)

    with Pipeline(Model, square, rows(), 2, 4, place=place) as both:
        with refused("once"):
            both.run()
        both.run()


def case_a_rank_dependent_step_is_reported_with_both_lines():
    def parted(model, x):
        loss = model(x).pow(2).mean()
        if state.ranks.pp_rank == 0:
            loss = loss * 2
        model.backward(loss)
        return loss

    provoke(Two, parted, "microbatch ", "different programs", "mul at ", "the end of the step", "errors.py:")

    def other(model, x):
        out = model(x)
        out = out.sin() if state.ranks.pp_rank == 0 else out.cos()
        out = out + out.mean()
        loss = out.pow(2).mean().item()
        return torch.tensor(loss)

    provoke(Two, other, "different programs from line 3", "sin at ", "cos at ", "errors.py:")

    def reading(model, x):
        loss = model(x).pow(2).mean()
        if state.ranks.pp_rank == 0:
            loss.item()
        return loss

    provoke(Two, reading, "different programs", "item at ", "errors.py:")


def case_backward_and_calls_outside_a_step_are_errors():
    def plain(model, x):
        loss = model(x).pow(2).mean()
        loss.backward()

    provoke(Two, plain, "call model.backward(loss) inside the step", "microbatch ")
    with Pipeline(Two, square, rows(), 2, 4, place=place) as both:
        with refused("outside of a step", "@smp.step", kind=RuntimeError):
            both.model(both.data[0])
        both.run()
        with refused("module a is on stage 0", "@smp.step", kind=RuntimeError):
            both.module(both.data[0])
        try:
            both.model.backward(torch.zeros(()))
        except RuntimeError as error:
            assert "outside of a step" in str(error), error


def case_a_batch_that_does_not_divide_is_a_value_error_everywhere():
    provoke(Two, square, "x has 8 elements along axis 0, which 3 microbatches", kind=ValueError, microbatches=3)


def case_a_module_whose_output_changes_form_is_named_with_both_forms():
    class Grows(nn.Linear):
        calls = 0

        def forward(self, x):
            Grows.calls += 1
            out = super().forward(x)
            return torch.cat([out, out]) if Grows.calls == 2 else out

    class Model(Two):
        def __init__(self):
            super().__init__()
            self.a = Grows(SIZE, SIZE)

    provoke(Model, square, "microbatch 1, stage 0, module a", "shape (4, 16)", "shape (2, 16)", kind=ValueError)


def case_an_object_that_modules_of_two_stages_change_is_named():
    class Cache:
        def __init__(self):
            self.kept = []

    class Keeps(nn.Linear):
        def forward(self, x, cache):
            cache.kept.append(x)
            return super().forward(x)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Keeps(SIZE, SIZE), Keeps(SIZE, SIZE)

        def forward(self, x):
            cache = Cache()
            return self.b(self.a(x, cache), cache)

    provoke(
        Model,
        square,
        "microbatch ",
        "module b of stage 1 gets a Cache that module a of stage 0",
        kind=ValueError,
    )


def case_a_parameter_used_outside_of_its_module_is_named():
    class Reaches(Two):
        def forward(self, x):
            return F.linear(self.a(x), self.a.weight.t(), self.b.bias)

    provoke(Reaches, square, "microbatch ", "parameter ", " is used outside of its module")


def case_checkpointing_over_two_stages_suggests_the_fix():
    class Model(Two):
        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(lambda y: self.b(F.relu(self.a(y))), x, use_reentrant=False)

    provoke(Model, square, "microbatch ", "smp.set_activation_checkpointing")


def case_writing_a_placed_tensor_into_a_plain_one_suggests_the_fix():
    def writes(model, x):
        out = torch.zeros(4, SIZE)
        out[:2] = model(x)
        loss = out.sum()
        model.backward(loss)
        return loss

    provoke(Two, writes, "__setitem__ writes a tensor of another stage into a plain tensor", "new_zeros")

    def again(model, x):
        total = torch.zeros(())
        total.add_(model(x).sum())
        loss = model(x).sum() + total
        return loss

    provoke(Two, again, "a plain tensor is used again", "add_ at ")

    def returns(model, x):
        total = torch.zeros(())
        total.add_(model(x).sum())
        return total

    provoke(Two, returns, "the step's result: a plain tensor is used again")


def case_a_module_that_writes_into_a_plain_tensor_is_named():
    class Writes(nn.Linear):
        def forward(self, x, mask):
            mask.zero_()
            return super().forward(x)

    class Model(Two):
        def __init__(self):
            super().__init__()
            self.b = Writes(SIZE, SIZE)

        def forward(self, x):
            return self.b(self.a(x), torch.ones(3))

    provoke(Model, square, "microbatch ", "module b", "writes into the plain tensor of shape (3,)")


def case_a_tracing_that_fails_ends_all_ranks():
    class Fails(Two):
        def forward(self, x):
            raise KeyError("no such thing")

    provoke(Fails, square, "tracing of the model", "KeyError: 'no such thing'", place=None)


def case_backward_without_a_graph_is_an_error():
    def nothing(model, x):
        with torch.no_grad():
            loss = model(x).sum()
        model.backward(loss)

    provoke(Two, nothing, "requires no gradient")

    def plain(model, x):
        model.backward(torch.zeros((), requires_grad=True))

    provoke(Two, plain, "no module of the model took part in")


def case_only_forward_has_no_backward_pass():
    provoke(Two, square, "'_only_forward'", pipeline="_only_forward")

    def forward(model, x):
        return model(x).sum()

    with Pipeline(Two, forward, rows(), 2, 4, "_only_forward", place=place) as both:
        assert len(both.run().outputs) == 4


def case_arguments_of_another_structure_are_named():
    with Pipeline(Two, square, rows(), 2, 4, place=place) as both:
        from smddp.modelparallel.step import step

        @step
        def train(model, batch):
            return model(batch["x"]).sum()

        with refused("stage 1 has no argument for", "same structure"):
            train(both.model, {"x": both.data[0]} if state.ranks.pp_rank == 0 else {})
