"""Distributed checkpoint (DCP): save, load, load into another number of ranks."""

import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from training import STEPS, assert_same, make_model, one_process, sgd, train

from cases.fsdp2 import shard


class _Directory:
    """A directory that rank 0 makes and removes, known to all ranks."""

    def __enter__(self) -> str:
        name = [tempfile.mkdtemp(prefix="checkpoint-") if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(name, 0)
        self.name = name[0]
        return self.name

    def __exit__(self, *exc) -> None:
        if exc[0] is None:
            dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(self.name, ignore_errors=True)


def _job(mesh: DeviceMesh):
    model = shard(make_model(), mesh)
    return model, sgd(model.parameters())


def _save(model, opt, path: str) -> None:
    weights, state = get_state_dict(model, opt)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)


def _load(model, opt, path: str, **options) -> None:
    weights, state = get_state_dict(model, opt)
    held = {"model": weights, "optimizer": state}
    dcp.load(held, checkpoint_id=path, **options)
    set_state_dict(model, opt, model_state_dict=held["model"], optim_state_dict=held["optimizer"])


def case_training_continues_after_loading():
    mesh = init_device_mesh("cpu", (4,))
    with _Directory() as path:
        model, opt = _job(mesh)
        losses = train(model, opt, range(0, 2))
        _save(model, opt, path)
        model, opt = _job(mesh)
        train(model, opt, range(7, 8))  # other weights and momenta, to be replaced
        _load(model, opt, path)
        losses += train(model, opt, range(2, STEPS))
    assert_same(losses, one_process())


def case_four_ranks_hand_over_to_two():
    """Saved by 4 ranks, continued by 2 of them: each shard is read from two files."""
    with _Directory() as path:
        model, opt = _job(init_device_mesh("cpu", (4,)))
        losses = train(model, opt, range(0, 2))
        _save(model, opt, path)
        pair = dist.new_group([0, 1])
        if dist.get_rank() < 2:
            mesh = DeviceMesh.from_group(pair, "cpu")
            model, opt = _job(mesh)
            _load(model, opt, path, process_group=pair)
            part = (dist.get_rank(), 2)
            # train() averages over the world; here only the pair trains.
            losses += _train_in(pair, model, opt, part)
            assert_same(losses, one_process())


def _train_in(group, model, opt, part: tuple[int, int]) -> list[float]:
    from training import batch, loss_of, mean_over_ranks, slice_of

    losses = []
    for step in range(2, STEPS):
        x, y = batch(step)
        loss = loss_of(model(slice_of(x, *part)), slice_of(y, *part))
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(mean_over_ranks(loss, group))
    return losses


def case_a_different_layout_loads_the_checkpoint():
    """Saved by FSDP2 over 4, loaded by HSDP 2 x 2."""
    with _Directory() as path:
        model, opt = _job(init_device_mesh("cpu", (4,)))
        losses = train(model, opt, range(0, 2))
        _save(model, opt, path)
        model, opt = _job(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
        _load(model, opt, path)
        losses += train(model, opt, range(2, STEPS))
    assert_same(losses, one_process())


def case_async_save():
    """The save runs on a thread, with collectives, while training goes on with others."""
    mesh = init_device_mesh("cpu", (4,))
    with _Directory() as path:
        model, opt = _job(mesh)
        losses = train(model, opt, range(0, 2))
        weights, state = get_state_dict(model, opt)
        saving = dcp.async_save(
            {"model": weights, "optimizer": state},
            checkpoint_id=path,
            process_group=dist.new_group(),
        )
        train(model, opt, range(2, 4))
        saving.result()
        model, opt = _job(mesh)
        _load(model, opt, path)
        losses += train(model, opt, range(2, STEPS))
    assert_same(losses, one_process())


def case_one_process_reads_what_four_saved():
    with _Directory() as path:
        model, opt = _job(init_device_mesh("cpu", (4,)))
        train(model, opt)
        weights, _ = get_state_dict(model, opt)
        dcp.save({"model": weights}, checkpoint_id=path)
        plain = {"model": make_model().state_dict()}
        dcp.load(plain, checkpoint_id=path, no_dist=True)
        for name, value in plain["model"].items():
            assert torch.equal(value, weights[name].full_tensor()), name
