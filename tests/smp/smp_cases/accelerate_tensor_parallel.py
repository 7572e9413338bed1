"""Accelerate with tensor parallelism: a tensor group counts as one process, and other degrees are refused."""

import contextlib
import os

import pytest
import smddp.sagemaker as tsm
import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.state import AcceleratorState, DistributedType, PartialState
from smp_cases.models import SEQUENCE, VOCABULARY, tiny
from smp_cases.tensor_parallel import initialized
from torch.utils.data import DataLoader

STEPS, ACCUMULATED, BATCH = 2, 2, 4
TOLERANCE = 2e-4


@contextlib.contextmanager
def devices():
    """Accelerate's state with one GPU per rank, but with tensors on the CPU."""
    place = {
        "ACCELERATE_USE_CPU": "true",
        "RANK": dist.get_rank(),
        "WORLD_SIZE": dist.get_world_size(),
        "LOCAL_RANK": dist.get_rank(),
    }
    wanted = {**place, "LOCAL_WORLD_SIZE": dist.get_world_size(), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    before = dict(os.environ)
    os.environ.update({name: str(value) for name, value in wanted.items()})
    made = PartialState.__init__

    def with_devices(self, *args, **kwargs):
        made(self, *args, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU
            self.device = torch.device("cpu")  # FSDP1 compares it with the parameters' device, which has no index

    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState.__init__ = with_devices
    try:
        yield
    finally:
        PartialState.__init__ = made
        AcceleratorState._reset_state(reset_partial_state=True)
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def alone():
    """Accelerate's state in one process."""
    before = dict(os.environ)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)
    os.environ["ACCELERATE_USE_CPU"] = "true"
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        os.environ.clear()
        os.environ.update(before)


def rows_of(count):
    """Returns rows with different numbers of labels, so that a mean of means differs from the mean."""
    generator = torch.Generator().manual_seed(5)
    rows = []
    for index in range(count):
        ids = torch.randint(3, VOCABULARY, (SEQUENCE,), generator=generator)
        labels = ids.clone()
        labels[: 1 + index % 9] = -100
        rows.append({"input_ids": ids, "labels": labels})
    return rows


TRAIN, EVALUATE = rows_of(STEPS * ACCUMULATED * BATCH), rows_of(BATCH * 3)


def stacked(rows):
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def one_process(groups, every_token):
    """Returns (losses, gradient norms, evaluation loss) of one process.

    Args:
        groups: data-parallel groups, each of which takes every micro-batch's part.
        every_token: the loss is the mean over all tokens of a step; else the mean of the groups' means.
    """
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    losses, norms = [], []
    size = BATCH * ACCUMULATED
    for step in range(STEPS):
        rows = TRAIN[step * size : (step + 1) * size]
        if every_token:
            parts = [rows]
        else:  # each group's rows of all micro-batches
            micro = [rows[i : i + BATCH] for i in range(0, size, BATCH)]
            each = BATCH // groups
            parts = [[row for batch in micro for row in batch[g * each : (g + 1) * each]] for g in range(groups)]
        loss = sum(model(**stacked(part)).loss for part in parts) / len(parts)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        batches = [EVALUATE[i : i + BATCH] for i in range(0, len(EVALUATE), BATCH)]
        evaluated = [model(**stacked(rows)).loss.item() for rows in batches]
    return losses, norms, sum(evaluated) / len(evaluated), model


def case_an_accelerator_counts_each_tensor_group_once():
    rows = EVALUATE[:11]  # not a multiple of any batch
    losses = one_process(1, True)[0]
    for shard, tensor in ((2, 2), (1, 4)):
        with initialized(hybrid_shard_degree=shard, tensor_parallel_degree=tensor), devices():
            groups = tsm.state.dp_size
            plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2,
                auto_wrap_policy="transformer_based_wrap",
                transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
                cpu_ram_efficient_loading=False,
            )
            accelerator = Accelerator(fsdp_plugin=plugin if shard > 1 else None)
            model = tsm.transform(tiny())
            optimizer = torch.optim.SGD(model.parameters(), 0.5)
            loader = DataLoader(rows, batch_size=2)
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            ids = []
            for batch in loader:
                ids.append(accelerator.gather_for_metrics(batch["input_ids"]))
                assert len(accelerator.gather(batch["labels"])) == groups * len(batch["labels"])
            assert torch.equal(torch.cat(ids), stacked(rows)["input_ids"]), (shard, tensor)
            place = tsm.state.dp_rank
            assert accelerator.gather_for_metrics([{"group": place}]) == [{"group": i} for i in range(groups)]
            counted = accelerator.reduce({"tokens": torch.tensor(3), "loss": torch.tensor(0.5)}, "sum")
            assert (counted["tokens"].item(), counted["loss"].item()) == (3 * groups, 0.5 * groups)
            assert accelerator.reduce(torch.tensor(0.5), "mean").item() == 0.5

            mine = TRAIN[: BATCH * ACCUMULATED][place * 8 // groups :][: 8 // groups]
            tokens = sum(int((row["labels"][1:] != -100).sum()) for row in mine)
            total = accelerator.reduce(torch.tensor(float(tokens)), "sum")
            loss = model(**stacked(mine)).loss * tokens / total * groups
            accelerator.backward(loss)
            assert accelerator.reduce(loss.detach(), "mean").item() == pytest.approx(losses[0], abs=TOLERANCE)
            wanted = one_process(1, True)[1][0]
            assert float(accelerator.clip_grad_norm_(model.parameters(), 1.0)) == pytest.approx(wanted, abs=TOLERANCE)


def case_an_accelerator_of_other_degrees_is_refused():
    with devices():
        early = Accelerator()
        with initialized(hybrid_shard_degree=1, tensor_parallel_degree=4):
            with pytest.raises(ValueError, match=r"no ParallelismConfig.*after tsm.init\(\).*tp_size=4"):
                early.prepare(tsm.transform(tiny()))
    with initialized(hybrid_shard_degree=2, tensor_parallel_degree=2), devices():
        with pytest.raises(ValueError, match=r"has ParallelismConfig\(.*tp_size=4.*dp_shard_size=2, tp_size=2"):
            Accelerator(parallelism_config=ParallelismConfig(tp_size=4))
    with initialized(hybrid_shard_degree=1, tensor_parallel_degree=2), devices():
        with pytest.raises(ValueError, match=r"2 copies that are not sharded: set hybrid_shard_degree"):
            Accelerator()


def case_reset_restores_accelerate():
    before = Accelerator.gather
    with initialized(tensor_parallel_degree=2):
        assert Accelerator.gather is not before
    assert Accelerator.gather is before
