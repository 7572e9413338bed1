"""Models that do more than call one layer after the other."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from pipeline_cases.against import Pipeline, check, gradients
from smddp.modelparallel.state import state
from torch import nn

SIZE = 16


class Two(nn.Module):
    """A layer on each of two stages."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, x):
        return self.b(F.relu(self.a(x)))


class Own(Two):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(SIZE) * 1.5)

    def forward(self, x):
        return self.b(self.a(x) * self.w) + self.w.shape[0]


class Selects(Two):
    def forward(self, x):
        h = self.a(x)
        return self.b(h[h.sum(1) > 0])


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Sequential(nn.Linear(SIZE, SIZE), nn.BatchNorm1d(SIZE))
        self.b = nn.Linear(SIZE, SIZE)

    def forward(self, x):
        return self.b(self.a(x))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.LSTM(SIZE, SIZE, batch_first=True), nn.Linear(SIZE, SIZE)

    def forward(self, x):
        return self.b(self.a(x.unsqueeze(1))[0][:, -1])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(SIZE, SIZE), nn.MultiheadAttention(SIZE, 2, batch_first=True)

    def forward(self, x):
        h = self.a(x).unsqueeze(1)
        return self.b(h, h, h)[0].squeeze(1)


class InPlace(Two):
    """Writes into values, views of them and, in a module, into its input."""

    def __init__(self):
        super().__init__()
        self.b = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(SIZE, SIZE))

    def forward(self, x):
        h = self.a(x)
        h = h.clone()
        h[:, 0] = 0.5
        h[:, 1:3].mul_(2.0)
        h += 1.0
        kept = h.sum()
        other = self.b(h)
        other[0] += h[1]  # after the module's ReLU
        return other + kept


class Triple(torch.autograd.Function):
    """Its backward is not the derivative of its forward."""

    @staticmethod
    def forward(ctx, x):
        return x * 3

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 7


class Custom(Two):
    def forward(self, x):
        return self.b(Triple.apply(self.a(x)))


class CheckpointedLayer(nn.Linear):
    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)


class Checkpointed(Two):
    def __init__(self):
        super().__init__()
        self.b = CheckpointedLayer(SIZE, SIZE)


def square(model, x):
    loss = model(x).pow(2).mean()
    model.backward(loss)
    return loss


def total(model, x):
    loss = model(x).pow(2).sum()  # 0 of nothing
    model.backward(loss)
    return loss


def quiet_first(model, x):
    with torch.no_grad():
        first = model(x).mean()
    loss = model(x).pow(2).mean() + first
    model.backward(loss)
    return loss


def twice(model, x):
    loss = model(x).pow(2).mean() + model(x * 2).pow(2).mean()
    model.backward(loss)
    return loss


def narrow(model, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(x)
    loss = F.mse_loss(out.float(), torch.zeros(out.shape))
    model.backward(loss)
    return loss


def reads(model, x):
    out = model(x)
    loss = out.pow(2).mean()
    text = f"{loss.item():.3f} {float(loss):.3f} {out.detach().numpy().sum():.3f} {loss:.2f} {out.tolist()[0][0]:.3f}"
    model.backward(loss)
    return loss, text


def many_functions(model, x):
    out = model(x)
    model.backward(out.sum())
    return (
        out.sort(0)[0],
        torch.linalg.norm(out),
        torch.einsum("ij,kj->ik", out, out),
        out.topk(2, dim=0),
        out.T,
        torch.where(out > 0, out, 0.0),
        out.split(2)[0],
        *out.unbind(0)[:2],
    )


def place(module, stages):
    return [(module, 0), (module.b, 1)]


def rows():
    return (torch.randn(16, SIZE, generator=torch.Generator().manual_seed(1)),)


CASES = {
    "own parameter of the root": (Own, square, True),
    "shape from numbers": (Selects, total, True),
    "BatchNorm": (Norm, square, True),
    "LSTM": (Recurrent, square, True),
    "attention": (Attention, square, True),
    "in-place": (InPlace, square, True),
    "custom autograd function": (Custom, square, True),
    "checkpoint in a part": (Checkpointed, square, True),
    "no_grad inside": (Two, quiet_first, True),
    "two calls": (Two, twice, False),
    "autocast": (Two, narrow, True),
    "numbers read": (Two, reads, True),
    "many functions": (Two, many_functions, True),
}


def case_code_between_modules_runs_as_in_one_process():
    for name, (make, function, exact) in CASES.items():
        for pipeline in ("interleaved", "simple"):
            try:
                check(make, function, rows(), 2, 4, pipeline=pipeline, exact=exact, place=place)
            except BaseException as error:
                error.add_note(f"case {name}, {pipeline}") if hasattr(error, "add_note") else None
                raise


def case_buffers_of_a_part_change_on_its_stage_as_in_one_process():
    with Pipeline(Norm, square, rows(), 2, 4, place=place) as both:
        both.run()
        for part in both.data[0].chunk(4):
            both.alone(part)
        if state.ranks.pp_rank == 0:
            for (name, found), (_, wanted) in zip(both.module.named_buffers(), both.alone.named_buffers()):
                assert torch.equal(found, wanted), name


class Draws(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Dropout(0.5))
        self.b = nn.Linear(SIZE, SIZE)

    def forward(self, x):
        h = F.dropout(self.a(x), 0.5, self.training)
        noise = torch.rand(SIZE)
        return self.b(h + noise), noise


def drawing(model, x):
    out, noise = model(x)
    model.backward(out.sum())
    return out, noise, torch.randn(2)


def case_code_between_parts_draws_equal_random_numbers_on_all_ranks():
    runs = []
    for pipeline in ("interleaved", "simple"):
        with Pipeline(Draws, drawing, rows(), 2, 4, pipeline, place=place) as both:
            torch.manual_seed(7)
            out, *noises = both.run()
            drawn = [tensor for output in noises for tensor in output.outputs]
            assert len({tuple(tensor.tolist()) for tensor in drawn}) == len(drawn)
            runs.append((drawn, out.concat(), gradients(both.model)))
            everybody = [None] * 2
            dist.all_gather_object(everybody, drawn, group=state.ranks.pp_group)
            assert all(torch.equal(x, y) for x, y in zip(*everybody))
            zeros = (out.concat() == 0).float().mean()
            assert zeros < 0.5
            # The next step draws others.
            again, *_ = both.run()
            assert not torch.equal(again.concat(), runs[-1][1])
    (drawn, out, found), (other_drawn, other_out, other) = runs
    assert all(torch.equal(x, y) for x, y in zip(drawn, other_drawn))
    assert torch.equal(out, other_out)
    assert all(torch.equal(gradient, other[name]) for name, gradient in found.items())


def case_steps_of_a_class_split_containers_and_keep_the_form_of_results():
    class Slices:
        def __init__(self, values):
            self.values = values

        def smp_slice(self, count, number, axis):
            size = len(self.values) // count
            return Slices(self.values[number * size : (number + 1) * size])

    with Pipeline(Two, square, rows(), 2, 4, place=place) as both:
        from smddp.modelparallel.step import step

        class Trainer:
            @step(non_split_inputs=["whole"], input_split_axes={"turned": 1})
            def train(self, model, batch, turned, whole, sliced, flag=False):
                loss = model(batch["x"]).pow(2).mean() * whole.sum()
                model.backward(loss)
                return {"loss": loss, "shape": tuple(turned.shape), "sliced": sliced.values, "flag": flag}, (loss, None)

        x = both.data[0]
        first = state.ranks.pp_rank == 0
        given = [x, x.T, torch.ones(3)] if first else [torch.empty(0), torch.empty(0), torch.empty(0)]
        found, (loss, nothing) = Trainer().train(
            both.model, {"x": given[0]}, given[1], given[2], Slices(list(range(8))), flag=True
        )
        wanted = [3 * both.alone(part).pow(2).mean() for part in x.chunk(4)]
        assert torch.allclose(found["loss"].stack(), torch.stack(wanted))
        assert torch.equal(found["loss"].reduce_mean(), loss.reduce_sum() / 4)
        # Each element of a container becomes a list of the microbatches'.
        assert found["shape"] == ([SIZE] * 4, [len(x) // 4] * 4)
        assert found["sliced"] == [[0, 2, 4, 6], [1, 3, 5, 7]]
        assert found["flag"] == [True] * 4 and nothing is None


def case_evaluation_under_no_grad_keeps_gradients_and_a_copy_of_the_model_is_untouched():
    with Pipeline(Two, square, rows(), 2, 4, place=place) as both:
        before = copy.deepcopy(both.alone)
        both.run()
        kept = gradients(both.model)
        from smddp.modelparallel.step import step

        @step
        def evaluate(model, x):
            return model(x)

        with torch.no_grad():
            out = evaluate(both.model, both.data[0])
        wanted = torch.cat([before(part) for part in both.data[0].chunk(4)])
        assert torch.equal(out.concat(), wanted) and not out.concat().requires_grad
        now = gradients(both.model)
        assert all(torch.equal(gradient, now[name]) for name, gradient in kept.items())
