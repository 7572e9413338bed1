"""`@smp.step`: a function that runs once for each microbatch, on every stage."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from smddp.modelparallel import offloading
from smddp.modelparallel.model import DistributedModel
from smddp.modelparallel.pipeline import microbatching
from smddp.modelparallel.pipeline.measurements import Measured
from smddp.modelparallel.pipeline.microbatching import StepOutput
from smddp.modelparallel.pipeline.runner import Runner
from smddp.modelparallel.pipeline.schedule import Plan
from smddp.modelparallel.pipeline.turns import Turns
from smddp.modelparallel.private_names import function_modes, timeout_of
from smddp.modelparallel.state import state
from smddp.modelparallel.tensor import batch as together

__all__ = ["StepOutput", "is_tracing", "step"]

log = logging.getLogger("smddp.modelparallel")


def is_tracing() -> bool:
    """Return True during the run of the step function that measures costs for the cut."""
    return state.model is not None and state.model.tracing


def step(
    function: Callable[..., Any] | None = None,
    non_split_inputs: Iterable[str] = (),
    input_split_axes: dict[str, Any] | None = None,
    detach_outputs: bool = True,
) -> Any:
    """Decorator: splits the arguments into microbatches, runs the function on each, and returns their results together.

    All stages of a pipeline call it. Tensors of the first stage are used; those of other stages are ignored.

    Args:
        non_split_inputs: names of arguments that every microbatch gets whole.
        input_split_axes: by name of an argument, the axis along which its tensors are split; 0 by default.
        detach_outputs: results never carry a graph; False logs a warning.

    Returns:
        The function's results, with a `StepOutput` in place of each tensor and a list in place of the rest.
    """
    if not detach_outputs:
        log.warning(
            "@smp.step(detach_outputs=False) has no effect: results carry no graph, which spans the stages; "
            "call model.backward(loss) in the step"
        )
    options = frozenset(non_split_inputs), dict(input_split_axes or {})
    return functools.partial(_decorate, options=options) if function is None else _decorate(function, options)


def _decorate(function: Callable[..., Any], options: tuple[frozenset[str], dict[str, Any]]) -> Callable[..., Any]:
    signature = inspect.signature(function)
    unknown = (options[0] | options[1].keys()) - signature.parameters.keys()
    if unknown and not any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values()):
        raise ValueError(f"@smp.step: {function.__name__}() has no argument {', '.join(sorted(unknown))}")

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        cfg, ranks = state.made("step")
        model = state.model
        if model is None:
            raise RuntimeError("@smp.step: no model: wrap yours with smp.DistributedModel(model) first")
        bound = signature.bind(*args, **kwargs)
        if model.partitioned:
            model.begin_step()
        try:
            inputs = _inputs(dict(bound.arguments), signature)
            inputs, seed, share = _of_first_stage(inputs, ranks, lambda: _axes(inputs, options))
            calls = _calls(function, signature, inputs, cfg.microbatches, options)
            if cfg.offload_activations:
                calls = offloading.around(calls, model, cfg.activation_loading_horizon)
            if not model.partitioned:
                model.cut(calls[0])
                model.begin_step()
            results = _run(model, calls, seed)
        except Exception as error:
            model.fail_step(error)
            raise
        return microbatching.joined(share.mine(results))

    return call


def _inputs(arguments: dict[str, Any], signature: inspect.Signature) -> dict[str, Any]:
    """Return the arguments by name, including ``**kwargs``."""
    found: dict[str, Any] = {}
    for name, value in arguments.items():
        if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            found.update(value)
        else:
            found[name] = value
    return found


def _axes(inputs: dict[str, Any], options: tuple[frozenset[str], dict[str, Any]]) -> dict[str, int]:
    """Return the split axis of each tensor, by its name."""
    found: dict[str, int] = {}
    for name, value in inputs.items():
        if name not in options[0] and not isinstance(value, torch.nn.Module):
            found.update(together.axes(value, options[1].get(name, 0), f"[{name!r}]"))
    return found


def _of_first_stage(
    inputs: dict[str, Any], ranks: Any, axes: Callable[[], dict[str, int]]
) -> tuple[dict[str, Any], int, together.Share]:
    """Return the arguments with the first stage's tensors and seed. Collective over the pipeline.

    With tensor parallelism they are those of the whole tensor group of the first stage.
    """
    mine: dict[str, Any] = {}

    def note(leaf: Any, name: str) -> Any:
        mine[name] = leaf if isinstance(leaf, torch.Tensor) else None
        return leaf

    inputs = microbatching.each(inputs, note, "")
    seed = int(torch.randint(1 << 62, ()).item())
    if ranks.mp_size == 1:
        return inputs, seed, together.Share()
    given = {name: leaf.detach() for name, leaf in mine.items() if leaf is not None}
    box: list[Any] = [(given, seed, {})]
    if ranks.tp_size > 1 and ranks.pp_rank == 0:
        cfg, _ = state.made("step")
        try:
            box = [together.united(given, seed, axes(), cfg.microbatches, cfg.prescaled_batch, ranks)]
        except ValueError as error:
            box = [error]
    if ranks.pp_size > 1:
        dist.broadcast_object_list(box, src=ranks.pp_ranks[0], group=ranks.pp_group)
    if isinstance(box[0], ValueError):
        raise box[0]
    given, seed, counts = box[0]
    share = together.share(counts, ranks.tp_rank)
    if ranks.pp_size == 1:
        return microbatching.each(inputs, lambda leaf, name: given.get(name, leaf), ""), seed, share
    odd = sorted(given.keys() - mine.keys())
    # Every stage receives the mismatch and raises; a valid stage would otherwise wait for an invalid one.
    missing: list[Any] = [None] * ranks.pp_size
    dist.all_gather_object(missing, odd, group=ranks.pp_group)
    for stage, lacking in enumerate(missing):
        if lacking:
            raise ValueError(
                f"step: stage {stage} has no argument for {together.plain(lacking[0])}, which stage 0 gives: every "
                "stage gives arguments of the same structure, with any tensors, or None, in it"
            )
    return microbatching.each(inputs, lambda leaf, name: given.get(name, leaf), ""), seed, share


def _calls(
    function: Callable[..., Any],
    signature: inspect.Signature,
    inputs: dict[str, Any],
    microbatches: int,
    options: tuple[frozenset[str], dict[str, Any]],
) -> list[Callable[[], Any]]:
    whole, axes = options
    split: dict[str, list[Any]] = {}
    for name, value in inputs.items():
        if name in whole or isinstance(value, torch.nn.Module):
            split[name] = [value] * microbatches
        else:
            split[name] = microbatching.split(value, microbatches, axes.get(name, 0), name)
    return [
        functools.partial(_call, function, signature, {name: parts[number] for name, parts in split.items()})
        for number in range(microbatches)
    ]


def _call(function: Callable[..., Any], signature: inspect.Signature, inputs: dict[str, Any]) -> Any:
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for name, parameter in signature.parameters.items():
        if name not in inputs:
            continue
        if parameter.kind is parameter.VAR_POSITIONAL:
            args += inputs[name]
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            args.append(inputs[name])
    for name, value in inputs.items():
        known = signature.parameters.get(name)
        if known is None or known.kind is known.KEYWORD_ONLY:
            kwargs[name] = value
    return function(*args, **kwargs)


def _run(model: DistributedModel, calls: list[Callable[[], Any]], seed: int) -> list[Any]:
    cfg, ranks = state.made("step")
    assert cfg.active_microbatches is not None  # as the configuration fills it in
    plan = Plan(cfg.pipeline, cfg.active_microbatches, ranks.pp_rank)
    if model.sharded is not None:
        # One stage has no bubble to fill: each microbatch runs forward and backward before the next.
        plan = Plan("interleaved", 1, 0)
    model.measured = Measured()
    divisor = len(calls) if model.average_grads_across_microbatches else 1
    mail, turns, deadline = model.mail, None, timeout_of(model.mail.group)
    mails = [mail]
    if model.order_mail is not None:
        turns = Turns(model.order_mail)
        mails.append(model.order_mail)
    for each in mails:
        each.open(deadline)
    runner = Runner(ranks.pp_rank, ranks.pp_size, mail, plan, model.sums, model.measured, deadline, divisor, turns)
    before = torch.default_generator.get_state()
    try:
        results = runner.run(calls, _environment(), seed, model.parameters_of_parts)
    finally:
        torch.default_generator.set_state(before)
        for each in mails:
            each.close(lambda: runner.failure_sent)
        if runner.failure is not None:
            model.forget_descriptions()
    if runner.failure is not None:  # it arrived after this stage was done
        raise runner.failure.error(ranks.pp_rank)
    for each in mails:
        if each.broken is not None:
            raise RuntimeError(f"messages between stages: {each.broken}") from each.broken
    model.finish_step(runner.went_back)
    return results


def _environment() -> Callable[[], Any]:
    """Return a context that copies the caller's thread-local state to a microbatch's thread."""
    gradients = torch.is_grad_enabled()
    inference = torch.is_inference_mode_enabled()
    modes = function_modes()
    casts = [
        (device, torch.get_autocast_dtype(device), torch.is_autocast_cache_enabled())
        for device in ("cpu", "cuda")
        if torch.is_autocast_enabled(device)
    ]

    @contextlib.contextmanager
    def environment() -> Any:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(inference))
            stack.enter_context(torch.set_grad_enabled(gradients))
            for mode in modes:
                stack.enter_context(mode)
            for device, dtype, cached in casts:
                stack.enter_context(torch.autocast(device, dtype=dtype, cache_enabled=cached))
            yield

    return environment
