"""Lightning's Trainer with DDPStrategy(process_group_backend=...)."""

import os
import tempfile

import lightning
from lightning.pytorch.strategies import DDPStrategy
from script import BACKEND, PER_RANK, Rows, check, make_model, plain_sgd
from torch.utils.data import DataLoader, DistributedSampler
from training import loss_of


class Job(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()
        self.losses = []

    def training_step(self, rows, index):
        loss = loss_of(self.model(rows["x"]), rows["labels"])
        self.losses.append(loss.detach().clone())
        # One reduction of Lightning's own.
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return plain_sgd(self.parameters())


def main() -> None:
    job = Job()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=1,
        strategy=DDPStrategy(process_group_backend=BACKEND),
        use_distributed_sampler=False,
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=tempfile.gettempdir(),
    )
    rows = Rows()
    ranks = {"num_replicas": int(os.environ["WORLD_SIZE"]), "rank": int(os.environ["RANK"])}
    sampler = DistributedSampler(rows, shuffle=False, **ranks)
    trainer.fit(job, DataLoader(rows, batch_size=PER_RANK, sampler=sampler))
    check(job.losses)


if __name__ == "__main__":
    main()
