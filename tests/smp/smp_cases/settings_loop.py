"""The training loop of the settings' product: forward, backward, scaler, optimizers and checkpoints."""

import contextlib

import smddp.sagemaker as tsm
import torch
import torch.distributed as dist
from smddp.sagemaker.context_parallel.utils import get_batch_for_cp_rank
from smddp.sagemaker.distributed.checkpoint.state_dict_loader import load
from smddp.sagemaker.distributed.checkpoint.state_dict_saver import save
from smp_cases.expert_models import LENGTH
from smp_cases.models import batch, loss_of, part_of
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import offload_wrapper
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SCALE = 16.0


def optimizers_of(model: torch.nn.Module, kind: str) -> list[torch.optim.Optimizer]:
    """Optimizers with settings that do not magnify the rounding of small gradients."""
    parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    every = [p for _, p in parameters]
    if kind == "adam":
        return [torch.optim.AdamW(every, lr=0.05, eps=0.1)]
    if kind == "adafactor":
        return [torch.optim.Adafactor(every, lr=0.02)]
    if kind == "lbfgs":
        return [torch.optim.LBFGS(every, lr=0.1, max_iter=2, history_size=3)]
    if kind == "muon":
        matrices = [p for name, p in parameters if "self_attn" in name and "norm" not in name]
        rest = [p for name, p in parameters if "self_attn" not in name or "norm" in name]
        rest = [torch.optim.SGD(rest, lr=0.1, momentum=0.9)] if rest else []
        return [torch.optim.Muon(matrices, lr=0.02), *rest]
    return [torch.optim.SGD(every, lr=0.1, momentum=0.9)]


class Loop:
    """A training loop over one model: on all samples, or on those of this rank."""

    def __init__(self, row: dict, model: torch.nn.Module, alone: bool) -> None:
        self.row, self.model, self.alone = row, model, alone
        # torch's functions for an optimizer's state take no wrapper around FSDP1.
        self.sharded = model
        if row["memory"] == "offload" and not alone:
            self.model = offload_wrapper(model)
        self.optimizers = optimizers_of(model, row["optimizer"])
        self.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, enabled=row["precision"] == "fp16")

    def train(self, begin: int, end: int) -> list[float]:
        """Trains steps ``begin`` to ``end``; returns the first loss of each."""
        return [self.step(number) for number in range(begin, end)]

    def backward(self, ids: torch.Tensor) -> float:
        """Runs forward and backward passes; returns the mean loss of all ranks."""
        half = HALVES.get(self.row["precision"])
        total = torch.zeros(())
        for part in ids.chunk(self.row["accumulation"]):
            with torch.autocast("cpu", half) if half else contextlib.nullcontext():
                inputs = part if self.alone else get_batch_for_cp_rank(part)
                loss = loss_of(self.model, inputs).float() / self.row["accumulation"]
            self.scaler.scale(loss).backward()
            total += loss.detach()
        if not self.alone:
            dist.all_reduce(total)
            total /= dist.get_world_size()
        return float(total)

    def step(self, number: int) -> float:
        """Trains one step; returns its first loss."""
        ids = self.samples(number)
        if self.row["optimizer"] == "lbfgs" and not self.scaler.is_enabled():
            return self._step_with_closure(ids)
        loss = self.backward(ids)
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()
        self.zero()
        return loss

    def samples(self, number: int) -> torch.Tensor:
        """The samples of a step: all of them, or those of this rank's data-parallel group."""
        ids = batch(number, LENGTH)
        return ids if self.alone else part_of(ids, tsm.state.dp_rank, tsm.state.dp_size)

    def _step_with_closure(self, ids: torch.Tensor) -> float:
        losses = []

        def closure() -> float:
            self.zero()
            losses.append(self.backward(ids))
            return losses[-1]

        self.optimizers[0].step(closure)
        self.zero()
        return losses[0]

    def zero(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def state(self) -> dict:
        """The model's and the optimizers' state, for a checkpoint."""
        optim = get_optimizer_state_dict(self.sharded, self.optimizers)
        return {"model": get_model_state_dict(self.sharded), "optim": optim, "scaler": self.scaler.state_dict()}

    def save(self, directory: str) -> None:
        save(self.state(), checkpoint_id=directory)

    def load(self, directory: str) -> None:
        found = self.state()
        load(found, checkpoint_id=directory)
        set_model_state_dict(self.sharded, found["model"])
        set_optimizer_state_dict(self.sharded, self.optimizers, found["optim"])
        self.scaler.load_state_dict(found["scaler"])
