"""Clients of the settings' product: an own loop, transformers' Trainer, Accelerate and Lightning, in one form.

Each client is a context manager of a row, a transformed model and a directory of all ranks. It yields an object with
`train(begin, end)`, `save(directory)`, `load(directory)` and `sharded`, the model to read values from.
"""

import contextlib
import functools
import os

import smddp.sagemaker as tsm
import torch
import torch.distributed as dist
from smddp.sagemaker.context_parallel.utils import get_batch_for_cp_rank
from smddp.sagemaker.tensor_parallel.transformer import TransformerLayer
from smp_cases.expert_models import LENGTH
from smp_cases.models import BATCH, batch, loss_of
from smp_cases.parity import wrap1, wrap2
from smp_cases.settings_loop import Loop, optimizers_of
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

STEPS, SAVED_AFTER = 4, 2
ENGINES = {"none": lambda model, _: model, "fsdp1": wrap1, "fsdp2": wrap2}


def _checkpointed(row: dict, model: torch.nn.Module) -> torch.nn.Module:
    if row["memory"] != "none":
        wrapper = functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
        check = {"check_fn": lambda module: isinstance(module, TransformerLayer)}
        apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrapper, **check)
    return model


@contextlib.contextmanager
def own_loop(row: dict, model: torch.nn.Module, directory: str):
    yield Loop(row, _checkpointed(row, ENGINES[row["engine"]](model, False)), alone=False)


# ---- Accelerate ----


def _layer_class(model: torch.nn.Module) -> str:
    return next(type(module).__name__ for module in model.modules() if isinstance(module, TransformerLayer))


def _mean(loss: torch.Tensor) -> float:
    """The mean over all ranks."""
    total = loss.detach().float().clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


class _AccelerateLoop(Loop):
    def __init__(self, row: dict, model: torch.nn.Module) -> None:
        from accelerate import Accelerator, FullyShardedDataParallelPlugin

        self.row, self.alone, plugin = row, False, None
        if row["engine"] != "none":
            plugin = FullyShardedDataParallelPlugin(
                fsdp_version=int(row["engine"][-1]),
                auto_wrap_policy="transformer_based_wrap",
                transformer_cls_names_to_wrap=[_layer_class(model)],
                use_orig_params=True if row["engine"] == "fsdp1" else None,
                cpu_ram_efficient_loading=False,
            )
        precision = {"f32": "no"}.get(row["precision"], row["precision"])
        self.accelerator = Accelerator(
            mixed_precision=precision, gradient_accumulation_steps=row["accumulation"], fsdp_plugin=plugin
        )
        if row["engine"] == "fsdp1":  # its optimizer is made of the wrapped model's parameters
            model = self.accelerator.prepare(model)
            self.optimizers = [self.accelerator.prepare(each) for each in optimizers_of(model, row["optimizer"])]
        else:
            model, *self.optimizers = self.accelerator.prepare(model, *optimizers_of(model, row["optimizer"]))
        self.model = self.sharded = _checkpointed(row, model)

    def step(self, number: int) -> float:
        losses = []
        for part in self.samples(number).chunk(self.row["accumulation"]):
            closure = functools.partial(self._closure, part, losses)
            with self.accelerator.accumulate(self.model):
                if self.row["optimizer"] == "lbfgs":
                    self.optimizers[0].step(closure)
                    del losses[1:]
                else:
                    closure()
                    for optimizer in self.optimizers:
                        optimizer.step()
                    self.zero()
        return sum(losses) / len(losses)

    def _closure(self, part: torch.Tensor, losses: list[float]) -> torch.Tensor:
        if self.row["optimizer"] == "lbfgs":
            self.zero()
        loss = loss_of(self.model, get_batch_for_cp_rank(part)).float()
        self.accelerator.backward(loss)
        losses.append(_mean(loss))
        return torch.tensor(losses[-1])  # LBFGS compares losses, which must be equal on all ranks

    def save(self, directory: str) -> None:
        self.accelerator.save_state(directory)

    def load(self, directory: str) -> None:
        self.accelerator.load_state(directory)


@contextlib.contextmanager
def accelerate(row: dict, model: torch.nn.Module, directory: str):
    from smp_cases.accelerate_tensor_parallel import devices

    with devices():
        yield _AccelerateLoop(row, model)


# ---- transformers' Trainer ----


def _rows() -> list[dict]:
    """All samples of all steps, in the order of the steps."""
    return [{"input_ids": ids, "labels": ids} for number in range(STEPS) for ids in batch(number, LENGTH)]


class _TrainerLoop:
    def __init__(self, row: dict, model: torch.nn.Module, directory: str) -> None:
        self.row, self.model, self.directory, self.from_ = row, model, directory, None

    def _trainer(self, end: int):
        import transformers
        from torch.utils.data import SequentialSampler

        row = self.row

        class InOrder(transformers.Trainer):
            def _get_train_sampler(self, *_):
                return SequentialSampler(self.train_dataset)

            def create_optimizer(self, *_):
                self.optimizer = self.optimizer or optimizers_of(self.model, row["optimizer"])[0]
                return self.optimizer

        options = {}
        if row["engine"] != "none":
            options["fsdp"] = "full_shard"
            options["fsdp_config"] = {
                "version": int(row["engine"][-1]),
                "transformer_layer_cls_to_wrap": [_layer_class(self.model)],
                "cpu_ram_efficient_loading": False,
                "sync_module_states": False,
                "use_orig_params": True,
            }
        arguments = transformers.TrainingArguments(
            self.directory,
            per_device_train_batch_size=BATCH // tsm.state.dp_size // row["accumulation"],
            gradient_accumulation_steps=row["accumulation"],
            gradient_checkpointing=row["memory"] == "checkpointing",
            bf16=row["precision"] == "bf16",
            max_steps=end,
            save_strategy="steps" if end < STEPS else "no",
            save_steps=end,
            use_cpu=True,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            logging_steps=1,
            report_to="none",
            disable_tqdm=True,
            seed=7,
            **options,
        )
        return InOrder(self.model, arguments, train_dataset=_rows())

    def train(self, begin: int, end: int) -> list[float]:
        trainer = self._trainer(end)
        trainer.train(resume_from_checkpoint=self.from_)
        self.sharded = trainer.model_wrapped if self.row["engine"] == "fsdp1" else trainer.model
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry][begin:end]

    def save(self, directory: str) -> None:
        """`train` has saved."""

    def load(self, directory: str) -> None:
        self.from_ = os.path.join(directory, f"checkpoint-{SAVED_AFTER}")


@contextlib.contextmanager
def trainer(row: dict, model: torch.nn.Module, directory: str):
    from smp_cases.accelerate_tensor_parallel import devices

    with devices():
        if row["engine"] != "none":
            os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_STATE_DICT_TYPE="SHARDED_STATE_DICT")
        yield _TrainerLoop(row, model, directory)


# ---- Lightning ----


class _LightningLoop(Loop):
    """One Lightning Trainer in each rank, around a model that `fully_shard` or FSDP holds."""

    def train(self, begin: int, end: int) -> list[float]:
        import lightning
        from lightning.pytorch.plugins import MixedPrecision
        from lightning.pytorch.strategies import SingleDeviceStrategy

        loop, losses = self, []

        class Job(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.inner = loop.model

            def training_step(self, ids, _):
                loss = loss_of(self.inner, get_batch_for_cp_rank(ids[0])).float()
                losses.append(_mean(loss))
                return loss

            def configure_optimizers(self):
                return loop.optimizers[0]

        device, passes = torch.device("cpu"), self.row["accumulation"]
        halves = {"bf16": "bf16-mixed", "fp16": "16-mixed"}
        plugins = []
        if self.row["precision"] != "f32":
            scaler = self.scaler if self.row["precision"] == "fp16" else None
            plugins = [MixedPrecision(halves[self.row["precision"]], "cpu", scaler=scaler)]
        fit = lightning.Trainer(
            strategy=SingleDeviceStrategy(device=device),
            plugins=plugins,
            max_steps=end - begin,
            max_epochs=1,
            accumulate_grad_batches=passes,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
        )
        data = [part for number in range(begin, end) for part in self.samples(number).chunk(passes)]
        fit.fit(Job(), torch.utils.data.DataLoader(data, batch_size=1))
        every = len(losses) // (end - begin)  # LBFGS evaluates a step more than once
        if self.row["optimizer"] == "lbfgs":
            return losses[::every]
        return [sum(losses[i : i + passes]) / passes for i in range(0, len(losses), passes)]


@contextlib.contextmanager
def lightning(row: dict, model: torch.nn.Module, directory: str):
    yield _LightningLoop(row, _checkpointed(row, ENGINES[row["engine"]](model, False)), alone=False)


CLIENTS = {"loop": own_loop, "accelerate": accelerate, "trainer": trainer, "lightning": lightning}
