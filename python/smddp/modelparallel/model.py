"""`smp.DistributedModel`: the script's model, cut over the stages at the first step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from smddp.modelparallel import alias, delayed, direct_calls
from smddp.modelparallel.checkpointing import cpu_gather, model_state
from smddp.modelparallel.data_parallel.replicas import Replicas
from smddp.modelparallel.data_parallel.sharded import Sharded
from smddp.modelparallel.hooks import Hooks
from smddp.modelparallel.optim import half_precision
from smddp.modelparallel.partitioning import cutting, partition, partition_file
from smddp.modelparallel.partitioning.partition import Cost, Unit
from smddp.modelparallel.pipeline import current, placed_operations
from smddp.modelparallel.pipeline.backward import Sums
from smddp.modelparallel.pipeline.failures import Failure
from smddp.modelparallel.pipeline.failures import of as failure_of
from smddp.modelparallel.pipeline.mailbox import Mail
from smddp.modelparallel.pipeline.measurements import Measured
from smddp.modelparallel.pipeline.parts import Part
from smddp.modelparallel.state import state
from smddp.modelparallel.tensor import registry
from smddp.modelparallel.tensor.answers import Answers
from smddp.modelparallel.tensor.marks import any_marked
from smddp.modelparallel.tensor.split import follow

_MEGABYTE = 1 << 20


class DistributedModel(Answers, Hooks, nn.Module):
    """A model over the stages of a pipeline. One per script; functions decorated with `step` call it.

    Every process makes the whole model; stage 0 of the first replica gives the values. The first step cuts it.
    Other arguments than the following ones are accepted for compatibility, without effect.

    Args:
        trace_execution_times: cut by measured seconds of modules; by default the cut is deterministic.
        average_grads_across_microbatches: the mean of the microbatches' gradients; else their sum.
        bucket_cap_mb: MiB of a bucket, in which gradients are averaged over replicas.
        overlapping_allreduce: a bucket is sent while the last microbatch's backward pass still makes others.

    Attributes:
        module: the script's model.
        partitioned: whether it is cut.
        gathered: whether `cpu` has gathered the parameters of all ranks.
        where: the stage of each part, by the module's name.
        tracing: whether the step function runs for the costs of the cut.
        sums: gradient sums of a step.
        replicas: gradient buckets over the replicas of this stage, after the cut; None for one replica.
        measured: measurements of the last step on this stage.
        sharded: how ranks share the parameters, under the key ``sharded_data_parallel_degree``; else None.
    """

    # Read by `tensor.marks`, which this module imports.
    _is_distributed_model = True

    def __init__(
        self,
        module: nn.Module,
        trace_device: str = "gpu",
        trace_execution_times: bool = False,
        overlapping_allreduce: bool = True,
        backward_passes_per_step: int = 1,
        average_grads_across_microbatches: bool = True,
        bucket_cap_mb: float = 25,
        trace_memory_usage: bool = False,
        broadcast_buffers: bool = True,
        gradient_as_bucket_view: bool = False,
    ) -> None:
        super().__init__()
        self._cfg, self._ranks = state.made("DistributedModel()")
        if not isinstance(module, nn.Module) or isinstance(module, DistributedModel):
            raise TypeError(f"smp.DistributedModel() takes a torch.nn.Module, got {type(module).__name__}")
        if self._ranks.tp_size > 1:
            module = registry.replace(module)
        if self._cfg.fp16_params:
            half_precision.halve_marked(module)
        shared = self._cfg.sharded_data_parallel_degree > 1
        self.module = module.half() if self._cfg.fp16 and not shared else module
        self.sharded: Sharded | None = None
        self.partitioned, self.gathered = False, False
        self.where: dict[str, int] = {}
        self.parameter_shapes = {name: tuple(q.shape) for name, q in module.named_parameters(remove_duplicate=False)}
        self.units: list[Unit] = []
        self.costs: dict[str, Cost] = {}
        self.measured = Measured()
        self.average_grads_across_microbatches = average_grads_across_microbatches
        self._times = trace_execution_times
        self._bucket_bytes = int(bucket_cap_mb * _MEGABYTE)
        self._overlapping = overlapping_allreduce and self._cfg.overlapping_allreduce
        self.tracing = False
        self._make_hooks()
        self._stage_of: dict[int, int] = {}
        self.parameters_of_parts: dict[int, tuple[str, int]] = {}
        self.replicas: Replicas | None = None
        self._averaging: direct_calls.Averaging | None = None
        self.sums = Sums({})
        self._parts: list[Part] = []
        self.mail = Mail(self._ranks.pp_rank, self._ranks.pp_ranks, self._ranks.mail_group)
        if self._ranks.size > 1:
            with torch.no_grad():
                for tensor in [*module.parameters(), *module.buffers()]:
                    if not tensor.is_meta:
                        dist.broadcast(tensor.data, 0)
        self._seed = delayed.agreed_seed(module, self._cfg.delayed_parameter_initialization)
        if (self._ranks.pp_size == 1 and not shared) or self._ranks.tp_size > 1:
            delayed.everywhere(module, self._seed)
        self.order_mail: Mail | None = None
        if self._ranks.tp_size > 1:
            from smddp.modelparallel.tensor import cut as of_tensors  # with all of torch.sagemaker's translator

            of_tensors.share(self.module, self._ranks)
        if state.optimizer is not None:
            follow(state.optimizer.optimizer)
        if any_marked(self.module):
            from smddp.modelparallel.tensor import naming  # with all of torch.sagemaker's translator

            naming.name_layers(self.module)
        alias.add_aliases(self.module)
        if self._ranks.order_group is not None:
            self.order_mail = Mail(self._ranks.tp_rank, self._ranks.tp_ranks, self._ranks.order_group)
            self.order_mail.changed = self.mail.changed
        self._local: set[int] = {id(q) for q in module.parameters()}
        if self._ranks.pp_size > 1:
            state.at_reset(placed_operations.install())
        state.model = self
        if shared:
            self._shard()

    # ---- calls ----

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model inside a step; with one stage also outside of it, see `direct_calls`."""
        if current.microbatch is not None or self.tracing:
            return self._compute(*args, **kwargs)
        if self._ranks.pp_size > 1:
            raise RuntimeError(
                "the model is called outside of a step: call it in a function decorated with @smp.step, for "
                "evaluation too"
            )
        if not self.partitioned:
            self.install(self._decide(lambda: None))
        found = direct_calls.call(self._compute, args, kwargs, self._cfg.prescaled_batch, self._ranks)
        if not torch.is_grad_enabled():
            return found
        if self._averaging is None:
            self._averaging = direct_calls.Averaging(self.replicas, self._cfg.fp16, self._ranks)
        return self._averaging.watch(found)

    def _compute(self, *args: Any, **kwargs: Any) -> Any:
        if self.sharded is not None:
            return self.sharded(*args, **kwargs)
        if self._cfg.fp16:
            return half_precision.outputs(self.module(*half_precision.inputs(args), **half_precision.inputs(kwargs)))
        return self.module(*args, **kwargs)

    def backward(self, tensors: Any, grad_tensors: Any = None) -> None:
        """Sets ``tensors`` as roots of the backward pass. Inside a step, in place of ``loss.backward()``.

        It runs once the step function has returned, so gradients are there after the step.
        """
        if self.tracing:
            return
        mb = current.microbatch
        if mb is None:
            raise RuntimeError("model.backward() is called outside of a step: call it in a function under @smp.step")
        if self._cfg.pipeline == "_only_forward":
            raise RuntimeError("model.backward() under 'pipeline': '_only_forward'")
        if self.sharded is not None:
            self.sharded.going_back(mb.number)
        many = isinstance(tensors, (list, tuple))
        roots = list(tensors) if many else [tensors]
        gradients = [None] * len(roots) if grad_tensors is None else list(grad_tensors) if many else [grad_tensors]
        for tensor, gradient in zip(roots, gradients):
            if gradient is None and isinstance(tensor, torch.Tensor) and tensor.numel() != 1:
                raise RuntimeError(f"model.backward() of shape {tuple(tensor.shape)} needs grad_tensors")
            scale = 1.0 if state.optimizer is None else state.optimizer.loss_scale
            if scale != 1.0:
                tensor = tensor * scale
            mb.roots.append((tensor, gradient))

    def get_module(self) -> nn.Module:
        """Return the script's model."""
        return self.module

    def cpu(self) -> DistributedModel:
        """Moves the model to the CPU, with the parameters and buffers that other ranks hold. Collective over a copy.

        Where each rank holds a part, the model can be saved afterwards, but not called.
        """
        if not self.gathered and (self.sharded is not None or self._ranks.mp_size > 1) and self.partitioned:
            cpu_gather.gather(self, self._ranks)
            self.gathered = True
        return self if self.gathered else super().cpu()

    def to(self, *args: Any, **kwargs: Any) -> DistributedModel:
        """Move the model as in torch; a move from another device to the CPU calls `cpu`."""
        if cpu_gather.moves_to_cpu(self, *args, **kwargs):
            self.cpu()
        if self.gathered and self.sharded is not None:
            raise RuntimeError(
                "model.to() after model.cpu() of a sharded model: load model.state_dict() into a new model"
            )
        return super().to(*args, **kwargs)

    # ---- what lies here ----

    def local_named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Return this stage's parameters; before the cut, all parameters."""
        return ((n, q) for n, q in self.module.named_parameters(*args, **kwargs) if id(q) in self._local)

    def local_parameters(self, *args: Any, **kwargs: Any) -> Iterator[nn.Parameter]:
        """Return this stage's parameters; before the cut, all parameters."""
        return (q for _, q in self.local_named_parameters(*args, **kwargs))

    def local_named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Return this stage's modules: its parts, their submodules, and modules without a stage."""
        return (
            (n, m) for n, m in self.module.named_modules() if self._stage_of_module(n) in (None, self._ranks.pp_rank)
        )

    def local_modules(self) -> Iterator[nn.Module]:
        """Return the modules of `local_named_modules`."""
        return (module for _, module in self.local_named_modules())

    def local_named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Return this stage's buffers, and buffers without a stage."""
        own = {id(module) for module in self.local_modules()}
        for name, module in self.module.named_modules():
            if id(module) in own:
                for key, buffer in module.named_buffers(recurse=False):
                    yield f"{name}.{key}" if name else key, buffer

    def local_buffers(self) -> Iterator[torch.Tensor]:
        """Return the buffers of `local_named_buffers`."""
        return (buffer for _, buffer in self.local_named_buffers())

    def _stage_of_module(self, name: str) -> int | None:
        while name not in self.where and name:
            name = name.rpartition(".")[0]
        return self.where.get(name)

    def stage_of_parameter(self, name: str) -> int:
        """Return the stage of a parameter by its name in the module; 0 before the cut."""
        return self._stage_of.get(id(self.module.get_parameter(name)), 0)

    def state_dict(
        self, destination: Any = None, prefix: str = "", keep_vars: bool = False, *, gather_to_rank0: bool = False
    ) -> Any:
        """Returns the whole model's state, under the names of one process. Collective over the pipeline after the cut.

        Args:
            gather_to_rank0: True: only the first rank of a tensor group keeps the state, others get nothing.

        Raises:
            ValueError: `destination`, `prefix` or `keep_vars` differs from its default.
        """
        _refuse("state_dict", destination=destination, prefix=prefix, keep_vars=keep_vars)
        found = model_state.whole(self)
        return {} if gather_to_rank0 and self._ranks.tp_rank else found

    def local_state_dict(self, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:
        """Return this stage's part of the state. Raises ValueError as `state_dict` does."""
        _refuse("local_state_dict", destination=destination, prefix=prefix, keep_vars=keep_vars)
        return model_state.local(self)

    def load_state_dict(
        self, state_dict: Any, strict: bool = True, assign: bool = False, same_partition_load: bool = False
    ) -> Any:
        """Loads a whole state, or this stage's part of one. ``same_partition_load`` has no effect.

        Raises:
            ValueError: `assign` is True.
        """
        del same_partition_load
        _refuse("load_state_dict", assign=assign)
        return model_state.load(self, state_dict, strict)

    # ---- the cut ----

    def cut(self, run: Callable[[], Any]) -> None:
        """Decide on stage 0 and cut everywhere. ``run`` calls the step function on the first microbatch."""
        ranks = self._ranks
        box: list[Any] = [None]
        # One process computes the cut for all replicas.
        if ranks.rdp_rank == 0 and ranks.pp_rank == 0:
            try:
                box = [(self._decide(run), self.costs)]
            except Exception as error:
                box = [failure_of(error, 0, "microbatch 0, stage 0, tracing of the model")]
        dist.broadcast_object_list(box, src=0)
        if isinstance(box[0], Failure):
            raise box[0].error(ranks.pp_rank)
        where, self.costs = box[0]
        self.install(where)

    def _decide(self, run: Callable[[], Any]) -> dict[str, int]:
        cfg = self._cfg
        stages = cfg.pipeline_parallel_degree
        if cfg.load_partition:
            return partition_file.read(cfg.partition_file, self.module, stages)
        if not cfg.auto_partition:
            return partition.given(self.module, cfg.default_partition, stages)
        given = partition.given(self.module, None, stages)
        # A microbatch can't run through parameters without values.
        if not cfg.skip_tracing and stages > 1 and not delayed.pending(self.module):
            self.tracing = True
            try:
                self.costs = partition.measure(self.module, run, self._times)
            finally:
                self.tracing = False
        pieces = partition.units(self.module, stages, self.costs, cfg.memory_weight, self._times)
        where = {**partition.cut(pieces, stages), **given}
        if cfg.partition_file is not None:
            partition_file.write(cfg.partition_file, where)
        return where

    def install(self, where: dict[str, int]) -> None:
        """Cut the model with the placement ``where``."""
        ranks, cfg = self._ranks, self._cfg
        self.units = partition.units(self.module, cfg.pipeline_parallel_degree, self.costs, cfg.memory_weight)
        made = cutting.Cut(self.module, where, cfg.default_partition)
        delayed.here(self.module, self._seed, {q for q, stage in made.stage_of.items() if stage == ranks.pp_rank})
        self._parts = cutting.install(made, ranks.pp_rank, lambda piece, number: self.measured.busy(piece, number))
        self.where = {name: stage for name, _, stage in made.parts}
        self._stage_of = made.stage_of
        for name, module, stage in made.parts:
            for key, q in module.named_parameters():
                self.parameters_of_parts[id(q)] = (f"{name}.{key}" if name else key, stage)
        self._local = {number for number, stage in made.stage_of.items() if stage == ranks.pp_rank}
        if ranks.rdp_size > 1:
            self.replicas = Replicas(self.local_parameters(), ranks.rdp_group, self._bucket_bytes, self._overlapping)
        own = {part.number: list(part.module.parameters()) for part in self._parts if part.owner == ranks.pp_rank}
        self.sums = Sums(own, self.replicas)
        lost = cutting.drop(self.module, made, ranks.pp_rank)
        delayed.leave(lost)
        self.partitioned = True
        if state.optimizer is not None:
            state.optimizer.lose(lost)
        self._call(self._after_cut)

    def _shard(self) -> None:
        """Shard the parameters over ranks instead of a cut; there is one stage."""
        cfg = self._cfg
        self.units = partition.units(self.module, 1, {}, cfg.memory_weight)
        self.sharded = Sharded(self.module, cfg, self._ranks, lambda piece, number: self.measured.busy(piece, number))
        self.sharded.fill(self._seed)
        self.where, self.partitioned = {"": 0}, True
        self._local = {id(q) for q in self.module.parameters()}
        self._stage_of = dict.fromkeys(self._local, 0)
        if state.optimizer is not None:
            self.sharded.replace(state.optimizer.optimizer)
            state.optimizer.lose(())

    # ---- a step ----

    def begin_step(self) -> None:
        """Prepare the step, after the cut and before the microbatches run."""
        if self.replicas is not None:
            self.replicas.begin(outcome_pending=self.training and torch.is_grad_enabled())

    def finish_step(self, gradients: bool) -> None:
        """Sum gradients over segments and average them over replicas, after the microbatches."""
        if gradients:
            self.sums.end()
        if self.sharded is not None:
            self.sharded.finish(gradients)
        if self.replicas is not None and gradients:
            self.replicas.end()
        elif self.replicas is not None and self.replicas.outcome_pending:
            self.replicas.agree()
        self._call(self._after_step)

    def forget_descriptions(self) -> None:
        """Clear the descriptions: after a failed step only some stages may have received them."""
        for part in self._parts:
            part.known.clear()

    def fail_step(self, error: BaseException) -> None:
        """Report a failed step of this pipeline."""
        if self.replicas is not None and self.replicas.outcome_pending:
            self.replicas.fail(error)


def _refuse(method: str, **options: Any) -> None:
    """Options of torch's method that are not supported for a model of several stages must have their defaults."""
    for name, value in options.items():
        if value:
            raise ValueError(f"DistributedModel.{method}({name}={value!r}): only the default is supported")
