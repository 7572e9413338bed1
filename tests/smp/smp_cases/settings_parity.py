"""One combination of training settings against one process: the losses of four steps, and the values after them."""

import contextlib
import functools

import settings_combinations as combinations
import smddp.sagemaker as tsm
import torch
import torch.distributed as dist
from smddp.sagemaker.context_parallel.utils import get_batch_for_cp_rank
from smddp.sagemaker.distributed.checkpoint.state_dict_loader import load
from smddp.sagemaker.distributed.checkpoint.state_dict_saver import save
from smddp.sagemaker.tensor_parallel.transformer import TransformerLayer
from smp_cases.adapters import adapt
from smp_cases.checkpoint import shared_directory
from smp_cases.expert_models import LENGTH, moe_config
from smp_cases.models import batch, loss_of, part_of, tiny
from smp_cases.parity import full, wrap1, wrap2
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

STEPS, SAVED_AFTER = 4, 2
ENGINES = {"none": lambda model, _: model, "fsdp1": wrap1, "fsdp2": wrap2}
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Differences of losses and of values: rounding, which half precision has more of.
TOLERANCES = {"f32": (2e-5, 1e-4), "bf16": (2e-2, 2e-2), "fp16": (5e-3, 5e-3)}
SCALE = 16.0


def _make(row: dict) -> torch.nn.Module:
    model = tiny("mixtral" if row["expert"] else "llama")
    return adapt(model, only=("q_proj", "o_proj")) if row["adapter"] else model


def _optimizers(model: torch.nn.Module, kind: str) -> list[torch.optim.Optimizer]:
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


class _Loop:
    """A training loop over one model: on all samples, or on those of this rank."""

    def __init__(self, row: dict, model: torch.nn.Module, alone: bool) -> None:
        self.row, self.model, self.alone = row, model, alone
        # torch's functions for an optimizer's state take no wrapper around FSDP1.
        self.sharded = model
        if row["memory"] == "offload" and not alone:
            self.model = offload_wrapper(model)
        self.optimizers = _optimizers(model, row["optimizer"])
        self.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, enabled=row["precision"] == "fp16")

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
        ids = batch(number, LENGTH)
        ids = ids if self.alone else part_of(ids, tsm.state.dp_rank, tsm.state.dp_size)
        if self.row["optimizer"] == "lbfgs" and not self.scaler.is_enabled():
            return self._step_with_closure(ids)
        loss = self.backward(ids)
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()
        self.zero()
        return loss

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

    def load(self, directory: str) -> None:
        found = self.state()
        load(found, checkpoint_id=directory)
        set_model_state_dict(self.sharded, found["model"])
        set_optimizer_state_dict(self.sharded, self.optimizers, found["optim"])
        self.scaler.load_state_dict(found["scaler"])


@functools.cache
def _one_process(family: bool, precision: str, optimizer: str, accumulation: int, adapter: bool):
    """(losses, the values at the end) of one process that never stops."""
    row = {"expert": family, "precision": precision, "optimizer": optimizer, "adapter": adapter}
    loop = _Loop({**row, "accumulation": accumulation, "memory": "none"}, _make(row), alone=True)
    losses = [loop.step(number) for number in range(STEPS)]
    return losses, loop.model.state_dict()


def _degrees(row: dict) -> dict:
    return {
        "hybrid_shard_degree": row["shard"],
        "tensor_parallel_degree": row["tensor"],
        "context_parallel_degree": row["context"],
        "expert_parallel_degree": max(row["expert"], 1),
        "sm_activation_offloading": row["memory"] == "offload",
        "random_seed": 7,
    }


def _other(row: dict) -> dict:
    """The same combination at another tensor and shard degree."""
    if row["engine"] == "none":
        return {**row, "engine": "fsdp2", "tensor": 2, "shard": 2}
    return {**row, "tensor": 1 if row["tensor"] > 1 else 2, "shard": 2}


@contextlib.contextmanager
def _loop(row: dict):
    tsm.init(_degrees(row))
    try:
        model = tsm.transform(_make(row), config=moe_config()) if row["expert"] else tsm.transform(_make(row))
        model = ENGINES[row["engine"]](model, False)
        if row["memory"] != "none":
            apply_activation_checkpointing(
                model,
                checkpoint_wrapper_fn=functools.partial(
                    checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT
                ),
                check_fn=lambda module: isinstance(module, TransformerLayer),
            )
        yield _Loop(row, model, alone=False)
    finally:
        tsm.state.reset()


def _train(row: dict, directory: str) -> tuple[list[float], dict]:
    losses, begin = [], 0
    if row["resume"] != "none":
        with _loop(row) as loop:
            losses += [loop.step(number) for number in range(SAVED_AFTER)]
            save(loop.state(), checkpoint_id=directory)
        begin = SAVED_AFTER
    with _loop(_other(row) if row["resume"] == "other" else row) as loop:
        if begin:
            loop.load(directory)
        losses += [loop.step(number) for number in range(begin, STEPS)]
        return losses, full(loop.sharded)


def train_as_one_process(row: dict) -> None:
    """Trains a combination, or asserts that it is refused for the right reason."""
    refusal = combinations.refusal(row)
    with shared_directory() as directory:
        try:
            losses, values = _train(row, directory)
        except Exception as error:
            if refusal and isinstance(error, refusal[0]) and refusal[1] in str(error):
                return
            raise AssertionError(f"in the combination {row}") from error
    assert refusal is None, f"not refused: {row}"
    same = (bool(row["expert"]), *(row[key] for key in ("precision", "optimizer", "accumulation", "adapter")))
    wanted_losses, wanted = _one_process(*same)
    # Muon rounds its steps to bf16.
    of_losses, of_values = TOLERANCES["bf16" if row["optimizer"] == "muon" else row["precision"]]
    gaps = [abs(a - b) for a, b in zip(losses, wanted_losses)]
    assert max(gaps) < of_losses, (row, losses, wanted_losses)
    assert wanted.keys() <= values.keys(), wanted.keys() - values.keys()
    for name, value in wanted.items():
        gap = float((values[name] - value).abs().max())
        assert gap < of_values, (row, name, gap)


def train_all(rows: list[dict]) -> None:
    for row in rows:
        train_as_one_process(row)
