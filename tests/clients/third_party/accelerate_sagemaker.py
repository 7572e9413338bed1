"""Accelerate in its SageMaker data-parallel mode: it picks the backend "smddp" itself."""

import sagemaker_environment  # noqa: F401

# isort: split
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from script import BACKEND, PER_RANK, Rows, check, make_model, plain_sgd
from torch.utils.data import DataLoader
from training import loss_of


def main() -> None:
    accelerator = Accelerator()
    assert accelerator.distributed_type == DistributedType.MULTI_GPU
    assert accelerator.state.backend == "smddp"
    model = make_model()
    model, opt, loader = accelerator.prepare(
        model, plain_sgd(model.parameters()), DataLoader(Rows(), batch_size=PER_RANK, shuffle=False)
    )
    losses = []
    for rows in loader:
        loss = loss_of(model(rows["x"]), rows["labels"])
        opt.zero_grad()
        accelerator.backward(loss)
        opt.step()
        losses.append(loss.detach().clone())

    rank, world = accelerator.process_index, accelerator.num_processes
    if BACKEND != "gloo":
        # Gathers into a flat output of the right number of elements, which gloo refuses.
        gathered = accelerator.gather(torch.full((3, 2), float(rank)))
        assert gathered.shape == (3 * world, 2)
        assert torch.equal(gathered[:, 0], torch.arange(world).repeat_interleave(3).float())
        padded = accelerator.pad_across_processes(torch.ones(rank + 1))
        assert padded.shape == (world,)
    assert accelerator.reduce(torch.ones(2) * rank, "sum")[0].item() == world * (world - 1) / 2
    accelerator.wait_for_everyone()
    check(losses, "smddp")


if __name__ == "__main__":
    main()
