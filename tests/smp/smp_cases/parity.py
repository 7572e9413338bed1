"""One combination of features against the plain model: two losses, and every parameter's gradient between them."""

import functools
import itertools

import smddp.sagemaker as tsm
import torch
import torch.distributed as dist
from smddp.sagemaker.delayed_param import DelayedParamIniter
from smddp.sagemaker.tensor_parallel.state_dict import translate_state_dict_to_hf
from smddp.sagemaker.tensor_parallel.transformer import TransformerLayer
from smp_cases.models import batch, loss_of, part_of, tiny
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

TOLERANCE = 1e-5
_IMPLEMENTATIONS = {"reentrant": CheckpointImpl.REENTRANT, "non_reentrant": CheckpointImpl.NO_REENTRANT}


def make(family: str, delayed: bool) -> torch.nn.Module:
    """The model; on the meta device if its initialisation is delayed."""
    if not delayed:
        return tiny(family)
    with torch.device("meta"):
        return tiny(family)


@functools.cache
def plain(family: str, delayed: bool) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(losses of two steps, the parameters before the first, its gradients) of one process on whole batches."""
    model = make(family, delayed)
    if delayed:
        DelayedParamIniter(model, device="cpu").materialize()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    losses = []
    for step in range(2):
        loss = loss_of(model, batch(step))
        losses.append(float(loss.detach()))
        if step == 0:
            loss.backward()
            gradients = {name: p.grad.clone() for name, p in model.named_parameters(remove_duplicate=False)}
            torch.optim.SGD(model.parameters(), lr=1.0).step()
    return losses, before, gradients


def configuration(row: dict) -> dict:
    """Returns the argument of `tsm.init` for a combination."""
    return {
        "hybrid_shard_degree": row["shard"],
        "tensor_parallel_degree": row["tensor"],
        "sm_activation_offloading": row["offload"],
        "random_seed": 7,
    }


def train_as_the_plain_model(**row) -> None:
    tsm.init(configuration(row))
    try:
        train(**row)
    finally:
        tsm.state.reset()


def train(family: str, fsdp: int, tensor: int, shard: int, checkpointing: str, offload: bool, delayed: bool) -> None:
    """In an initialized world of ``tensor`` and ``shard``."""
    wanted, before, gradients = plain(family, delayed)
    model = tsm.transform(make(family, delayed))
    model = wrap1(model, delayed) if fsdp == 1 else wrap2(model, delayed)
    if checkpointing != "none":
        implementation = _IMPLEMENTATIONS[checkpointing]
        apply_activation_checkpointing(
            model,
            checkpoint_wrapper_fn=functools.partial(checkpoint_wrapper, checkpoint_impl=implementation),
            check_fn=lambda module: isinstance(module, TransformerLayer),
        )
    if offload:
        model = offload_wrapper(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    found = []
    for step in range(2):
        loss = loss_of(model, part_of(batch(step), tsm.state.dp_rank, tsm.state.dp_size))
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        found.append(float(mean) / dist.get_world_size())
        if step == 0:
            loss.backward()
            optimizer.step()
            after = full(model)
    assert all(abs(a - b) < TOLERANCE for a, b in zip(found, wanted)), (found, wanted)
    check_gradients(before, after, gradients)


def wrap1(model: torch.nn.Module, delayed: bool) -> torch.nn.Module:
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={TransformerLayer})
    options = {}
    if delayed:
        initer = DelayedParamIniter(model, device="cpu")
        options = {
            "param_init_fn": initer.get_param_init_fn(),
            "post_param_init_fn": initer.get_post_param_init_fn(),
        }
    return FSDP(model, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=True, **options)


def wrap2(model: torch.nn.Module, delayed: bool) -> torch.nn.Module:
    # With nothing configured FSDP2's default mesh is torch's, which on a machine with a GPU is of GPUs.
    mesh = {"mesh": dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))} if tsm.state.native else {}
    for layer in [module for module in model.modules() if isinstance(module, TransformerLayer)]:
        fully_shard(layer, **mesh)
    fully_shard(model, **mesh)
    return DelayedParamIniter(model, device="cpu").materialize() if delayed else model


def full(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The whole state dict in Hugging Face's names and shapes, on every rank."""
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    # Those of FSDP1 are translated already.
    return state if FSDP.fsdp_modules(model) else translate_state_dict_to_hf(model, state)


def check_gradients(before: dict, after: dict, gradients: dict) -> None:
    """The parameters moved by the gradients: the step's rate is one."""
    assert set(gradients) <= set(after), set(gradients) - set(after)
    for name, gradient in gradients.items():
        gap = (before[name] - after[name] - gradient).abs().max()
        assert gap < TOLERANCE, (name, float(gap), float(gradient.abs().max()))


def train_all(rows: list[dict]) -> None:
    """Trains every combination in ``rows`` and names the first failure. Combinations with equal groups share them."""
    for config, alike in itertools.groupby(sorted(rows, key=_order), configuration):
        tsm.init(config)
        try:
            for row in alike:
                _named(row)
        finally:
            tsm.state.reset()


def _order(row: dict) -> list:
    return list(configuration(row).values())


def _named(row: dict) -> None:
    try:
        train(**row)
    except Exception as error:
        raise AssertionError(f"in the combination {row}") from error
