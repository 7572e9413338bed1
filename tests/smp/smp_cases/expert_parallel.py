"""Distributed experts: traffic, uneven tokens, experts without tokens, norms, checkpoints."""

import contextlib
import shutil
import tempfile

import smddp
import smddp.sagemaker as tsm
import torch
import torch.distributed as dist
import transformers
from ranks.errors import refused
from smddp.sagemaker.context_parallel.utils import get_batch_for_cp_rank
from smddp.sagemaker.delayed_param import DelayedParamIniter
from smddp.sagemaker.distributed.checkpoint.hf import load_pretrained, save_pretrained
from smddp.sagemaker.distributed.checkpoint.state_dict_loader import load
from smddp.sagemaker.distributed.checkpoint.state_dict_saver import save
from smddp.sagemaker.distributed.checkpoint.state_dict_utils import (
    SMStateDictType,
    init_optim_state,
    sm_state_dict_type,
)
from smddp.sagemaker.expert_parallel.dispatch import dispatcher
from smddp.sagemaker.expert_parallel.group import this_process
from smddp.sagemaker.grad_norm import clip_grad_norm_
from smp_cases.expert_models import moe_config, tiny_moe
from smp_cases.models import batch, loss_of, part_of
from smp_cases.parity import full, wrap1, wrap2
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

WRAPS = (wrap1, wrap2)


@contextlib.contextmanager
def initialized(expert: int, tensor: int = 1, shard: int = 0):
    tsm.init({"expert_parallel_degree": expert, "tensor_parallel_degree": tensor, "hybrid_shard_degree": shard})
    try:
        yield
    finally:
        tsm.state.reset()


@contextlib.contextmanager
def a_directory():
    where = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(where)
    try:
        yield where[0]
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(where[0], ignore_errors=True)


def _spread(wrap=None, family="mixtral", **options):
    model = tsm.transform(tiny_moe(family), config=moe_config(**options))
    return model if wrap is None else wrap(model, False)


def _mine(step: int = 0) -> torch.Tensor:
    return part_of(batch(step), tsm.state.dp_rank, tsm.state.dp_size)


# ---- what travels ----


def _exchanged() -> int:
    """Returns the bytes that this rank has sent by all_to_all."""
    return sum(entry["bytes"] for entry in smddp.traffic() if entry["collective"].startswith("all_to_all"))


def case_token_traffic_matches_the_documented_formula():
    """docs/guides/smp/expert-parallelism.md: one row per layer and direction for each token and rank that needs it."""
    with initialized(4):
        experts, k, tokens, hidden = 2, 2, 24, 32
        generator = torch.Generator().manual_seed(dist.get_rank())
        rows = torch.randn(tokens, hidden, generator=generator, requires_grad=True)
        chosen = torch.stack([torch.randperm(8, generator=generator)[:k] for _ in range(tokens)])
        weights = torch.rand(tokens, k, generator=generator, requires_grad=True)
        pairs = sum(len(set(row)) for row in (chosen // experts).tolist())
        before = _exchanged()
        arrived = dispatcher(this_process(), experts, True, None).send(rows, chosen, weights)
        back = arrived.back(arrived.rows * arrived.weights.sum(1, keepdim=True))
        received = len(arrived.rows)
        # Numbers of rows; experts, rows and weights; results.
        assert _exchanged() - before == 4 * 8 + pairs * (4 * k + 4 * hidden + 4 * k) + received * 4 * hidden, "forward"
        before = _exchanged()
        back.sum().backward()
        # Backward reverses the messages: gradients of results to the experts, of tokens and weights to their ranks.
        assert _exchanged() - before == pairs * 4 * hidden + received * (4 * hidden + 4 * k), "backward"


def case_ranks_with_different_numbers_of_tokens_agree_with_one_process():
    lengths = (3, 12, 1, 8)
    with initialized(1):
        reference = tiny_moe("mixtral")
        losses = [loss_of(reference, batch(0)[rank : rank + 1, : n + 1]) for rank, n in enumerate(lengths)]
        (sum(losses) / 4).backward()
    for options in ({"global_token_shuffle": True}, {"moe_all_to_all_dispatcher": False}):
        with initialized(4):
            model = _spread(wrap2, **options)
            rank = dist.get_rank()
            loss_of(model, batch(0)[rank : rank + 1, : lengths[rank] + 1]).backward()
            _same_gradients(model, reference)


def _same_gradients(model: torch.nn.Module, reference: torch.nn.Module) -> None:
    from smddp.sagemaker.tensor_parallel.state_dict import translate_state_dict_to_hf

    found = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    found = translate_state_dict_to_hf(model, found)
    for name, parameter in reference.named_parameters():
        wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert (found[name] - wanted).abs().max() < 1e-5, (name, float((found[name] - wanted).abs().max()))


def case_experts_that_no_token_chooses_have_a_gradient_of_zero_on_every_rank():
    """A rank without tokens takes part in FSDP's collectives like the others."""

    def partial(model):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("router.bias"):
                    parameter.copy_(torch.tensor([9.0, 9.0, -9.0, -9.0]))
        return model

    reference = partial(tiny_moe("gpt_oss"))
    loss_of(reference, batch(0)).backward()
    with initialized(2):
        model = wrap2(tsm.transform(partial(tiny_moe("gpt_oss")), config=moe_config()), False)
        loss_of(model, _mine()).backward()
        _same_gradients(model, reference)
        assert all(p.grad is not None for p in model.parameters())


def case_without_fsdp_gradients_are_means_over_the_expert_group():
    reference = tiny_moe("mixtral")
    loss_of(reference, batch(0)).backward()
    with initialized(4):
        model = _spread()
        loss_of(model, _mine()).backward()
        for parameter in model.parameters():
            if not hasattr(parameter, "full_tensor"):  # as data parallelism would
                dist.all_reduce(parameter.grad)
                parameter.grad = _replicated(parameter.grad / 4)
        _same_gradients(model, reference)


def _replicated(tensor: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(tensor, tsm.state.mesh["shard"], [Replicate()], run_check=False)


def case_the_gradient_norm_is_that_of_one_process():
    reference = tiny_moe("mixtral")
    loss_of(reference, batch(0)).backward()
    wanted = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    for wrap, degrees in ((wrap1, {"expert": 2}), (wrap2, {"expert": 4}), (wrap2, {"expert": 2, "tensor": 2})):
        with initialized(**degrees):
            model = _spread(wrap)
            loss_of(model, _mine()).backward()
            assert abs(clip_grad_norm_(model, 0.1) - wanted) < 1e-5, (wrap, degrees)


def case_delayed_initialization_gives_the_values_of_every_degree():
    """Under transformers 5: lists of experts, as 4.57 has them, have no initialization as stacks."""
    if transformers.__version__.startswith("4."):
        return
    found = []
    for degree in (1, 4):
        with initialized(degree):
            with torch.device("meta"):
                model = tiny_moe("mixtral")
            model = tsm.transform(model, config=moe_config())
            model = wrap2(model, False)
            found.append(full(DelayedParamIniter(model, device="cpu").materialize()))
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name


def case_balanced_gives_every_expert_as_many_tokens_of_split_sequences():
    tsm.init({"expert_parallel_degree": 2, "context_parallel_degree": 2})
    try:
        model = _spread(moe_load_balancing="balanced")
        chosen: list[torch.Tensor] = []
        experts = next(module for name, module in model.named_modules() if name.endswith(".experts"))
        experts.register_forward_pre_hook(lambda module, arguments: chosen.append(arguments[1]))
        loss_of(model, get_batch_for_cp_rank(_mine()[:1, :4]))
        counts = torch.bincount(chosen[0].flatten(), minlength=4)
        dist.all_reduce(counts)
        assert counts.tolist() == [4] * 4 and len(chosen[0]) == 2, (counts, chosen)
    finally:
        tsm.state.reset()


# ---- checkpoints ----


def _steps(model, optimizer, steps) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, _mine(step))
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / dist.get_world_size())
    return losses


def _adam(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)


def _unbroken(family: str) -> list[float]:
    model = tiny_moe(family)
    optimizer = _adam(model)
    losses = []
    for step in range(4):
        optimizer.zero_grad()
        loss = loss_of(model, batch(step))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def _close(found: list[float], wanted: list[float]) -> None:
    assert all(abs(a - b) < 2e-5 for a, b in zip(found, wanted)), (found, wanted)


def case_training_resumes_at_other_degrees_with_the_losses_of_one_process():
    wanted = _unbroken("mixtral")
    for wrap in WRAPS:
        with a_directory() as directory:
            with initialized(2, shard=4):
                model = _spread(wrap)
                optimizer = _adam(model)
                _close(_steps(model, optimizer, (0, 1)), wanted[:2])
                state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
                save(state, checkpoint_id=directory)
            for degrees in ({"expert": 4},) if wrap is wrap2 else ({"expert": 1, "tensor": 2},):
                with initialized(**degrees):
                    model = _spread(wrap)
                    optimizer = _adam(model)
                    init_optim_state(optimizer)
                    model_state = get_model_state_dict(model)
                    optimizer_state = get_optimizer_state_dict(model, optimizer)
                    load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=directory)
                    set_model_state_dict(model, model_state)
                    set_optimizer_state_dict(model, optimizer, optimizer_state)
                    _close(_steps(model, optimizer, (2, 3)), wanted[2:])


def case_plain_transformers_loads_what_is_saved_and_back():
    for family in ("mixtral", "gpt_oss", "deepseek_v3"):
        plain = tiny_moe(family).eval()
        with a_directory() as directory:
            with initialized(4):
                save_pretrained(_spread(wrap2, family), directory)
            loaded = transformers.AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
            for name, value in plain.state_dict().items():
                assert torch.equal(loaded.state_dict()[name], value), (family, name)
            with initialized(2):
                model = _spread(wrap1, family)
                with torch.no_grad():
                    for parameter in model.parameters():
                        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                        local.zero_()
                load_pretrained(model, directory)
                found = full(model)
                for name, value in plain.state_dict().items():
                    assert torch.equal(found[name], value), (family, name)


def case_a_local_checkpoint_holds_each_ranks_experts_and_fits_its_degree_alone():
    with a_directory() as directory:
        mine = f"{directory}/ep{dist.get_rank()}"
        with initialized(4):
            model = _spread(wrap2)
            saved = full(model)
            with sm_state_dict_type(model, SMStateDictType.SM_LOCAL_STATE_DICT):
                save({"model": model.state_dict()}, checkpoint_id=mine, process_group=_alone())
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.to_local().zero_()
            with sm_state_dict_type(model, SMStateDictType.SM_LOCAL_STATE_DICT):
                state = {"model": model.state_dict()}
                load(state, checkpoint_id=mine, process_group=_alone())
                model.load_state_dict(state["model"])
            found = full(model)
            assert all(torch.equal(found[name], value) for name, value in saved.items())
        with initialized(2):
            model = _spread(wrap2)
            with sm_state_dict_type(model, SMStateDictType.SM_LOCAL_STATE_DICT):
                state = {"model": model.state_dict()}
                with refused("saved with expert degree 4, and this run has expert degree 2"):
                    load(state, checkpoint_id=mine, process_group=_alone())


def _alone():
    group, _ = dist.new_subgroups(1)
    return group
