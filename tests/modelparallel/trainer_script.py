"""transformers' Trainer, as a user's script: trains, evaluates, saves, resumes. Run by test_front_trainer.py.

  python trainer_script.py DIRECTORY            # one process, without SMP
  with the environment of a launcher            # `partitions` 2, as the launcher's configuration says

Prints one line of JSON: the losses and gradient norms of each step, and the loss of evaluation.
"""

from __future__ import annotations

import json
import os
import sys

import torch

torch.set_num_threads(1)
SMP = "SM_HP_MP_PARAMETERS" in os.environ

import transformers
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

if SMP:

    class TrainingArguments(TrainingArguments):
        """On the CPU: transformers takes it for granted that a pipeline's ranks have GPUs."""

        device = _setup_devices = torch.device("cpu")
        n_gpu = _n_gpu = 0
        distributed_state = None


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        ids = torch.randint(0, 50, (12,), generator=torch.Generator().manual_seed(index))
        labels = ids.clone()
        # It predicts nothing, and Trainer counts it in one process' mean and not in that of a pipeline.
        labels[0] = -100
        return {"input_ids": ids, "labels": labels}


def trainer(directory, **more):
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=50, n_positions=16, n_embd=16, n_layer=3, n_head=2, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    arguments = TrainingArguments(
        directory,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        max_grad_norm=0.5,
        learning_rate=1e-2,
        logging_steps=1,
        save_steps=3,
        report_to=[],
        disable_tqdm=True,
        dataloader_num_workers=0,
        **more,
    )
    return Trainer(GPT2LMHeadModel(config), arguments, train_dataset=Rows(), eval_dataset=Rows())


def logged(history, key):
    return [entry[key] for entry in history if key in entry]


def main():
    directory, resume = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None
    one = trainer(directory, max_steps=6)
    one.train(resume_from_checkpoint=resume)
    evaluated = one.evaluate()["eval_loss"]
    history = one.state.log_history
    found = {"loss": logged(history, "loss"), "grad_norm": logged(history, "grad_norm"), "eval": evaluated}
    if not SMP or torch.distributed.get_rank() == 0:
        print(json.dumps({**found, "transformers": transformers.__version__}), flush=True)
    if SMP:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
