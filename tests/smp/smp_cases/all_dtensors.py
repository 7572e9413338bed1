"""All parameters of a transformed model are DTensors, so generic code over parameters works unchanged."""

import copy
import functools

import smddp.sagemaker as tsm
import torch
import torch.distributed as dist
from ranks.errors import refused
from smp_cases.grad_norm import MAX_NORM, gathered, plain
from smp_cases.hybrid import wrap1, wrap2
from smp_cases.models import FAMILIES, batch, loss_of, part_of, tiny
from smp_cases.tensor_parallel import MY_PLAN, differences, initialized, mine, values, wrapped
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

TOLERANCE = 1e-5


def _mine(step: int) -> torch.Tensor:
    """Returns this rank's training batch."""
    return part_of(batch(step), tsm.state.dp_rank, tsm.state.dp_size)


def case_every_parameter_is_a_dtensor_on_the_tensor_mesh():
    for family in FAMILIES:
        with initialized(tensor_parallel_degree=2):
            for model in (tsm.transform(tiny(family)), copy.deepcopy(tsm.transform(tiny(family)))):
                for name, parameter in model.named_parameters():
                    assert isinstance(parameter, DTensor) and parameter.device_mesh == tsm.state.mesh["tensor"], name


def _held_against_one_process(build, clip, what: str) -> None:
    for norm_type in (2.0, float("inf")):
        norm, wanted = plain(norm_type)
        model = build()
        loss_of(model, _mine(0)).backward()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        found = clip(model, norm_type)
        found = found.full_tensor() if isinstance(found, DTensor) else found
        assert abs(float(found) - norm) < 1e-5 * norm, (what, norm_type, float(found), norm)
        optimizer.step()
        new = gathered(model, model)
        for name, value in wanted.items():
            torch.testing.assert_close(new[name], value, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{what} {n}: {m}")


def case_torchs_clip_grad_norm_is_that_of_one_process():
    def clip(model, norm_type):
        return torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM, norm_type)

    for tensor, shard in ((4, 1), (2, 2), (2, 1)):
        with initialized(tensor_parallel_degree=tensor, hybrid_shard_degree=shard):
            _held_against_one_process(lambda: wrap2(tsm.transform(tiny())), clip, f"FSDP2 {shard} x {tensor}")
    with initialized(tensor_parallel_degree=4):
        _held_against_one_process(lambda: tsm.transform(tiny()), clip, "alone")


def case_fsdp1s_own_clip_grad_norm_is_that_of_one_process():
    for tensor, shard in ((2, 2), (2, 1), (4, 1), (1, 4)):
        for original in (True, False):
            with initialized(tensor_parallel_degree=tensor, hybrid_shard_degree=shard):
                _held_against_one_process(
                    lambda original=original: wrap1(tsm.transform(tiny()), use_orig_params=original),
                    lambda model, norm_type: model.clip_grad_norm_(MAX_NORM, norm_type),
                    f"FSDP1 {shard} x {tensor} {original}",
                )


def case_every_form_of_an_optimizer_steps_as_in_one_process():
    for options in ({"fused": True}, {"foreach": True}, {"foreach": False}):
        make = functools.partial(torch.optim.AdamW, lr=1e-2, **options)
        one = tiny()
        wanted = _losses(one, make(one.parameters()), lambda step: batch(step))
        for tensor, engine in ((4, lambda model: model), (2, wrap2)):
            with initialized(tensor_parallel_degree=tensor, hybrid_shard_degree=4 // tensor):
                model = engine(tsm.transform(tiny()))
                found = torch.tensor(_losses(model, make(model.parameters()), _mine))
                dist.all_reduce(found)
                assert torch.allclose(found / 4, torch.tensor(wanted), atol=TOLERANCE), (options, tensor, found, wanted)


def _losses(model, optimizer, data) -> list[float]:
    losses = []
    for step in range(3):
        loss = loss_of(model, data(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def case_distributed_data_parallel_says_what_does_its_work_for_a_transformed_model():
    with initialized(tensor_parallel_degree=2, hybrid_shard_degree=1):
        with refused("With hybrid_shard_degree=1, FSDP(model, use_orig_params=True) and fully_shard(model)"):
            DistributedDataParallel(tsm.transform(tiny()))
        DistributedDataParallel(torch.nn.Linear(2, 2))


def case_an_overflow_on_one_tensor_rank_is_skipped_by_all():
    for tensor, shard, engine in ((4, 1, lambda model: model), (2, 2, wrap2), (2, 1, wrap2)):
        with initialized(tensor_parallel_degree=tensor, hybrid_shard_degree=shard):
            model = engine(tsm.transform(tiny()))
            optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1.0), torch.amp.GradScaler("cpu")
            before = values(model)
            for overflow in (True, False):
                scaler.scale(loss_of(model, _mine(0))).backward()
                if overflow and tsm.state.tp_rank == 1:
                    model.model.layers[1].mlp.down_proj.weight.grad.to_local().fill_(float("inf"))
                scale = scaler.get_scale()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                stayed = all(torch.equal(value, before[name]) for name, value in values(model).items())
                assert stayed == overflow, (tensor, shard, overflow)
                assert (scaler.get_scale() < scale) == overflow
            scale = torch.tensor([scaler.get_scale()])
            scales = [torch.empty_like(scale) for _ in range(4)]
            dist.all_gather(scales, scale)
            assert all(torch.equal(scale, other) for other in scales)


def case_inference_mode_gives_the_plain_models_output():
    for family in ("llama", "mixtral"):
        one = tiny(family).eval()
        for tensor, engine in ((4, "alone"), (2, "fsdp1"), (2, "fsdp2")):
            with initialized(tensor_parallel_degree=tensor, hybrid_shard_degree=4 // tensor):
                model = tsm.transform(tiny(family)).eval()
                model = model if engine == "alone" else wrapped(model, engine)
                # First, as torch's own buffers of FSDP cannot leave inference mode once they are made in it.
                if engine != "alone":
                    loss_of(model, batch(0)).backward()
                with torch.inference_mode():
                    assert abs(loss_of(model, batch(0)) - loss_of(one, batch(0))) < TOLERANCE, (family, engine)
                if engine == "alone":
                    with torch.no_grad():
                        assert abs(loss_of(model, batch(0)) - loss_of(one, batch(0))) < TOLERANCE, family
                    loss_of(model.train(), batch(0)).backward()


def case_gradients_of_gradients_are_those_of_one_process():
    ids = batch(0) % 32
    plan = {**MY_PLAN, "head": "colwise_gather_output"}

    def penalty(model):
        x = model.embed(ids).detach().requires_grad_()
        y = x
        for block in model.blocks:
            y = block(y)
        loss = torch.tanh(model.head(y)).square().sum()
        parameters = [model.blocks[0].up.weight, model.blocks[1].norm.weight]
        over_x, *over = torch.autograd.grad(loss, [x, *parameters], create_graph=True)
        over = [g.full_tensor() if isinstance(g, DTensor) else g for g in over]
        return over_x.square().sum() + sum(g.square().sum() for g in over)

    for degree in (2, 4):
        with initialized(tensor_parallel_degree=degree):
            one, model = mine(), tsm.transform(mine(), config={"tp_plan": plan})
            for part in (one, model):
                part.embed.weight.requires_grad_(False)
            wanted, found = penalty(one), penalty(model)
            assert abs(wanted - found) < 1e-4 * wanted, (wanted, found)
            wanted.backward()
            found.backward()
            for each in (one, model):
                each.embed.weight.grad = torch.zeros_like(each.embed.weight)
            largest = max(p.grad.abs().max() for p in one.parameters())
            assert differences(one, model) < TOLERANCE * largest, (degree, differences(one, model), largest)
