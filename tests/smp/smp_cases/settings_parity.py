"""One combination of training settings against one process: the losses of four steps, and the values after them."""

import contextlib
import functools

import settings_combinations as combinations
import smddp.sagemaker as tsm
import torch
from smp_cases import settings_clients as clients
from smp_cases.adapters import adapt
from smp_cases.checkpoint import shared_directory
from smp_cases.expert_models import moe_config
from smp_cases.models import tiny
from smp_cases.parity import full
from smp_cases.settings_clients import SAVED_AFTER, STEPS
from smp_cases.settings_loop import Loop

# Differences of losses and of values: rounding, which half precision has more of.
TOLERANCES = {"f32": (2e-5, 1e-4), "bf16": (2e-2, 2e-2), "fp16": (5e-3, 5e-3)}


def _make(row: dict) -> torch.nn.Module:
    model = tiny("mixtral" if row["expert"] else "llama")
    return adapt(model, only=("q_proj", "o_proj")) if row["adapter"] else model


@functools.cache
def _one_process(family: bool, precision: str, optimizer: str, accumulation: int, adapter: bool):
    """(losses, the values at the end) of an uninterrupted run in one process."""
    row = {"expert": family, "precision": precision, "optimizer": optimizer, "adapter": adapter}
    loop = Loop({**row, "accumulation": accumulation, "memory": "none"}, _make(row), alone=True)
    losses = loop.train(0, STEPS)
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
    if row["engine"] == "fsdp1" and row["client"] in ("accelerate", "trainer"):  # without tensor parallelism
        return {**row, "shard": 4 if row["shard"] == 2 else 2}
    return {**row, "tensor": 1 if row["tensor"] > 1 else 2, "shard": 2}


@contextlib.contextmanager
def _loop(row: dict, directory: str):
    tsm.init(_degrees(row))
    try:
        model = tsm.transform(_make(row), config=moe_config()) if row["expert"] else tsm.transform(_make(row))
        with clients.CLIENTS[row["client"]](row, model, directory) as loop:
            yield loop
    finally:
        tsm.state.reset()


def _train(row: dict, directory: str) -> tuple[list[float], dict]:
    losses, begin = [], 0
    if row["resume"] != "none":
        with _loop(row, directory) as loop:
            losses += loop.train(0, SAVED_AFTER)
            loop.save(directory)
        begin = SAVED_AFTER
    with _loop(_other(row) if row["resume"] == "other" else row, directory) as loop:
        if begin:
            loop.load(directory)
        losses += loop.train(begin, STEPS)
        return losses, full(loop.sharded)


def train_as_one_process(row: dict) -> None:
    """Trains a combination, or asserts that it is refused for the right reason."""
    refusal = combinations.refusal(row)
    with shared_directory() as directory:
        try:
            losses, values = _train(row, directory)
        except BaseException as error:  # torch's CheckpointException derives from BaseException
            if refusal and isinstance(error, refusal[0]) and refusal[1] in str(error):
                return
            raise AssertionError(f"in the combination {row}") from error
    assert refusal is None, f"not refused: {row}"
    same = (bool(row["expert"]), *(row[key] for key in ("precision", "optimizer", "accumulation", "adapter")))
    wanted_losses, wanted = _one_process(*same)
    # Muon rounds its steps to bf16.
    of_losses, of_values = TOLERANCES["bf16" if row["optimizer"] == "muon" else row["precision"]]
    of_losses = max(of_losses, 1e-4 if row["client"] == "trainer" else 0.0)  # Trainer rounds its losses
    gaps = [abs(a - b) for a, b in zip(losses, wanted_losses)]
    assert max(gaps) < of_losses, (row, losses, wanted_losses)
    assert wanted.keys() <= values.keys(), wanted.keys() - values.keys()
    for name, value in wanted.items():
        gap = float((values[name] - value).abs().max())
        assert gap < of_values, (row, name, gap)


def train_all(rows: list[dict]) -> None:
    for row in rows:
        train_as_one_process(row)
