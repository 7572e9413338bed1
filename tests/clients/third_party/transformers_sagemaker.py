"""transformers' Trainer in its SageMaker data-parallel mode."""

import sagemaker_environment  # noqa: F401

# isort: split
import tempfile

import torch
from script import BACKEND, LEARNING_RATE, PER_RANK, STEPS, Rows, check, make_model
from torch.utils.data import SequentialSampler
from training import loss_of
from transformers import Trainer, TrainingArguments
from transformers.training_args import ParallelMode


class Job(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()

    def forward(self, x, labels):
        out = self.model(x)
        return {"loss": loss_of(out, labels), "logits": out}


class Recording(Trainer):
    """Keeps every step's loss; rows in order, so that a step's global batch is known."""

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        self.losses = []

    def _get_train_sampler(self, dataset=None):
        return SequentialSampler(self.train_dataset)

    def compute_loss(self, model, inputs, return_outputs=False, **options):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **options)
        if model.training:
            self.losses.append(loss.detach().clone())
        return (loss, outputs) if return_outputs else loss


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            output_dir=directory,
            per_device_train_batch_size=PER_RANK,
            per_device_eval_batch_size=PER_RANK,
            max_steps=STEPS,
            optim="sgd",
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=0.0,
            # Logging gathers the loss; under the gloo stand-in that gather is refused.
            logging_strategy="no" if BACKEND == "gloo" else "steps",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        assert arguments.parallel_mode == ParallelMode.SAGEMAKER_DATA_PARALLEL
        trainer = Recording(Job(), arguments, train_dataset=Rows())
        trainer.train()
        if BACKEND != "gloo":
            assert trainer.evaluate(Rows())["eval_loss"] > 0
        check(trainer.losses, "smddp")


if __name__ == "__main__":
    main()
