"""An unmodified Trainer with tensor parallelism: the losses, gradients, evaluation and files of one process."""

import contextlib
import os
import tempfile
from pathlib import Path

import pytest
import smddp.sagemaker as tsm
import tokenizers
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from smp_cases.accelerate_tensor_parallel import (
    ACCUMULATED,
    BATCH,
    EVALUATE,
    STEPS,
    TOLERANCE,
    TRAIN,
    alone,
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


def _trainer(model, directory, sharded, groups=None, collator=None, tokenizer=None, **options):
    groups = groups or tsm.state.dp_size
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
    more = {"data_collator": collator, "processing_class": tokenizer}
    return InOrder(model, arguments, train_dataset=TRAIN, eval_dataset=EVALUATE, **more)


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
            os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_STATE_DICT_TYPE="FULL_STATE_DICT")
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


def _tokenizer():
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="b")


class _Collator:
    """Stacks rows, and has the tokenizer that Trainer saves without a processing class."""

    def __init__(self):
        self.tokenizer = _tokenizer()

    def __call__(self, rows):
        return stacked(rows)


def _files(directory):
    return sorted(str(path.relative_to(directory)) for path in Path(directory).rglob("*") if path.is_file())


def _saved_files(model, directory, sharded, groups, options):
    """The files of a training that saves the model, its state and checkpoints; the names pushed to the Hub."""
    trainer = _trainer(model, directory, sharded, groups, save_strategy="steps", save_steps=1, **options)
    trainer.train()
    pushed = []
    trainer.args.push_to_hub = True
    trainer.push_to_hub = lambda *args, **kwargs: pushed.append((args, kwargs))
    trainer.save_model()
    trainer.save_model(os.path.join(directory, "inner"), _internal_call=True)
    trainer.save_state()
    return _files(directory) if dist.get_rank() == 0 else [], pushed, trainer


#: Options of Trainer and the (shard, tensor) degrees to compare. The best checkpoint is the first, not the last.
FILES = (
    ({"save_only_model": True, "tokenizer": _tokenizer}, ((1, 4), (2, 2))),
    ({"save_only_model": True, "collator": _Collator}, ((1, 4),)),
    (
        {
            "save_only_model": True,
            "load_best_model_at_end": True,
            "eval_strategy": "steps",
            "eval_steps": 1,
            "metric_for_best_model": "eval_loss",
            "greater_is_better": True,
        },
        ((1, 4),),
    ),
    ({"tokenizer": _tokenizer}, ((2, 2),)),
)


def _of_fsdp(files):
    """The same files with those of FSDP2 for the optimizer and the ranks' random states."""
    for name in files:
        head = name.rpartition("/")[0]
        if name.endswith("optimizer.pt"):
            yield from (f"{head}/optimizer.bin", f"{head}/pytorch_model_fsdp.bin")
        elif name.endswith("rng_state.pth"):
            yield from (f"{head}/rng_state_{rank}.pth" for rank in range(dist.get_world_size()))
        else:
            yield name


def case_a_trainer_writes_the_files_of_one_process():
    for options, degrees in FILES:
        made = {name: value() if callable(value) else value for name, value in options.items()}
        with tempfile.TemporaryDirectory() as directory, alone():
            wanted, pushed, _ = _saved_files(tiny(), directory, False, 1, made)
        for shard, tensor in degrees:
            where = (options, shard, tensor)
            with (
                _directory() as directory,
                initialized(hybrid_shard_degree=shard, tensor_parallel_degree=tensor),
                _environment(shard > 1),
            ):
                model = tsm.transform(tiny())
                found, found_pushed, trainer = _saved_files(model, directory, shard > 1, None, made)
                values = {name: value.full_tensor() for name, value in trainer.model.state_dict().items()}
                if dist.get_rank() == 0:
                    loaded = load_file(os.path.join(directory, "model.safetensors"))
                    for name, value in loaded.items():
                        assert torch.equal(value, values[name]), (where, name)
                    if "load_best_model_at_end" in options:
                        best = load_file(os.path.join(directory, "checkpoint-1", "model.safetensors"))
                        assert all(torch.equal(value, loaded[name]) for name, value in best.items()), where
            assert found_pushed == pushed == [((), {"commit_message": "Model save", "revision": None})], where
            if dist.get_rank() == 0:
                assert found == sorted(_of_fsdp(wanted) if shard > 1 else wanted), where
