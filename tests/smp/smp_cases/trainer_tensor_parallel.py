"""An unmodified Trainer with tensor parallelism: the losses, gradients, evaluation and files of one process."""

import contextlib
import os
import tempfile

import pytest
import smddp.sagemaker as tsm
import torch
import torch.distributed as dist
import transformers
from smp_cases.accelerate_tensor_parallel import (
    ACCUMULATED,
    BATCH,
    EVALUATE,
    STEPS,
    TOLERANCE,
    TRAIN,
    devices,
    one_process,
    stacked,
)
from smp_cases.models import tiny
from smp_cases.tensor_parallel import initialized
from torch.utils.data import SequentialSampler


class InOrder(transformers.Trainer):
    """Takes the rows in order, so that each step's global batch is known."""

    def _get_train_sampler(self, *_):
        return SequentialSampler(self.train_dataset)


def _trainer(model, directory, sharded, **options):
    groups = tsm.state.dp_size
    if sharded:
        options["fsdp"] = "full_shard"
        options["fsdp_config"] = {
            "version": 2,
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "cpu_ram_efficient_loading": False,
            "sync_module_states": False,
        }
    arguments = transformers.TrainingArguments(
        directory,
        per_device_train_batch_size=BATCH // groups,
        per_device_eval_batch_size=BATCH // groups,
        gradient_accumulation_steps=ACCUMULATED,
        max_steps=STEPS,
        use_cpu=True,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        **{"save_strategy": "no", "optim": "sgd", "learning_rate": 0.5, **options},
    )
    return InOrder(model, arguments, train_dataset=TRAIN, eval_dataset=EVALUATE)


@contextlib.contextmanager
def _directory():
    """One directory for all ranks."""
    with tempfile.TemporaryDirectory() as directory:
        shared = [directory]
        dist.broadcast_object_list(shared)
        yield shared[0]
        dist.barrier()


@contextlib.contextmanager
def _environment(sharded):
    """FSDP's settings of the previous Trainer are in the environment of the process."""
    with devices():
        if sharded:
            os.environ["ACCELERATE_USE_FSDP"] = "true"
        yield


def case_an_unmodified_trainer_has_the_numbers_of_one_process():
    for shard, tensor, every_token in ((2, 2, True), (2, 2, False), (1, 4, True)):
        losses, norms, evaluated, plain = one_process(4 // tensor, every_token)
        with (
            _directory() as directory,
            initialized(hybrid_shard_degree=shard, tensor_parallel_degree=tensor),
            _environment(shard > 1),
        ):
            model = tsm.transform(tiny())
            trainer = _trainer(model, directory, shard > 1, average_tokens_across_devices=every_token)
            trainer.train()
            found = [entry for entry in trainer.state.log_history if "loss" in entry]
            where = (shard, tensor, every_token)
            assert [entry["loss"] for entry in found] == pytest.approx(losses, abs=TOLERANCE), where
            assert [float(entry["grad_norm"]) for entry in found] == pytest.approx(norms, abs=TOLERANCE), where
            if not every_token:
                continue
            assert trainer.evaluate()["eval_loss"] == pytest.approx(evaluated, abs=TOLERANCE), where
            logits = trainer.predict(EVALUATE[:-1]).predictions  # the last batch is not full
            with torch.no_grad():
                wanted = plain(**stacked(EVALUATE[:-1])).logits
            assert torch.allclose(torch.from_numpy(logits), wanted, atol=TOLERANCE), where
            trainer.save_model()
            dist.barrier()
            loaded = transformers.AutoModelForCausalLM.from_pretrained(directory)
            for name, parameter in plain.named_parameters():
                assert torch.allclose(loaded.get_parameter(name), parameter, atol=TOLERANCE), (where, name)


def case_a_trainer_without_fsdp_refuses_checkpoints_of_the_optimizer_before_it_trains():
    with tempfile.TemporaryDirectory() as directory, initialized(tensor_parallel_degree=4), _environment(False):
        for options, resume in (({"save_strategy": "steps"}, None), ({}, directory)):
            trainer = _trainer(tsm.transform(tiny()), directory, False, **options)
            with pytest.raises(ValueError, match=r"save_only_model=True.*or let FSDP shard the model"):
                trainer.train(resume_from_checkpoint=resume)
