"""Files as published scripts name, search, write and remove them."""

from __future__ import annotations

import logging
import os
import pathlib
import re

import pytest
import smdistributed.modelparallel.torch as smp
import torch
from front_cases.by_hand import job
from front_cases.optimizers import assert_same
from torch import nn

# Keys, v3=True; then (pp_rank, tp_rank, rdp_rank or None) of the files in the world of four ranks.
GENERATIONS = [
    ({}, False, [(0, 0, None)]),
    ({}, True, [(0, 0, replica) for replica in range(4)]),
    ({"partitions": 2}, False, [(0, 0, None), (1, 0, None)]),
    ({"partitions": 2}, True, [(stage, 0, replica) for stage in range(2) for replica in range(2)]),
    ({"partitions": 2, "shard_optimizer_state": True}, True, [(s, 0, r) for s in range(2) for r in range(2)]),
    ({"partitions": 2, "tensor_parallel_degree": 2}, False, [(s, t, None) for s in range(2) for t in range(2)]),
    ({"tensor_parallel_degree": 2}, True, [(0, t, r) for t in range(2) for r in range(2)]),
]


class Config:
    """An object of a class of the script, such as a configuration of transformers."""


def case_partial_files_have_the_names_of_every_published_generation(directory):
    pattern = re.compile(r"model_steps-(?P<steps>\d+)\.pt_(?P<pp_rank>\d+)_(?P<tp_rank>\d+)(_(?P<rdp_rank>\d+))?")
    for number, (keys, v3, places) in enumerate(GENERATIONS):
        folder = f"{directory}/{number}"
        with job(ddp=True, **keys):
            for steps in (2, 4):
                if v3 or smp.rdp_rank() == 0:
                    smp.save({"rank": smp.rank(), "steps": steps}, f"{folder}/model_steps-{steps}.pt", v3=v3)
            smp.barrier()
            found = [pattern.fullmatch(name) for name in os.listdir(folder)]
            wanted = [(pp, tp, rdp, steps) for pp, tp, rdp in places for steps in (2, 4)]
            named = [
                (*(m[k] and int(m[k]) for k in ("pp_rank", "tp_rank", "rdp_rank")), int(m["steps"])) for m in found
            ]
            assert sorted(named, key=str) == sorted(wanted, key=str), (keys, v3)
            # Scripts keep the newest checkpoints by such a pattern, and load by smp.load or torch.load.
            smp.barrier()
            if smp.local_rank() == 0:
                for match in found:
                    if match["steps"] == "2":
                        os.remove(f"{folder}/{match.string}")
            smp.barrier()
            loaded = smp.load(f"{folder}/model_steps-4.pt", partial=True)
            name = f"{folder}/model_steps-4.pt_{smp.pp_rank()}_{smp.tp_rank()}"
            assert loaded == torch.load(f"{name}_{smp.rdp_rank()}" if v3 else name)
            assert loaded["steps"] == 4 and (
                not v3 or "shard_optimizer_state" not in keys or loaded["rank"] == smp.rank()
            )
            with pytest.raises(FileNotFoundError, match=r"no file .*steps-2\.pt_\d_\d.*partial=False"):
                smp.load(f"{folder}/model_steps-2.pt")
    for keys, own in (({"partitions": 2}, "{pp}"), ({"partitions": 2, "shard_optimizer_state": True}, "{pp}_{rdp}")):
        with job(ddp=True, **keys):  # earlier versions of this library
            name = f"{directory}/earlier.pt_" + own.format(pp=smp.pp_rank(), rdp=smp.rdp_rank())
            if smp.rdp_rank() == 0 or "rdp" in own:
                torch.save(name, name)
            smp.barrier()
            assert smp.load(f"{directory}/earlier.pt") == name
            smp.barrier()
            pathlib.Path(name).unlink(missing_ok=True)
            smp.barrier()


def case_saved_files_load_and_unsafe_pickles_are_warned_about(directory):
    records: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record):
            records.append(record.getMessage())

    handler = Handler()
    logging.getLogger("smddp.modelparallel").addHandler(handler)
    try:
        with job(ddp=True):
            file = f"{directory}/{smp.rank()}.pt"
            for value, warns in (({"steps": 2, "w": torch.ones(2)}, False), ({"config": Config()}, True)):
                records.clear()
                smp.save(value, file, partial=True)
                assert smp.load(file, partial=True).keys() == value.keys()
                assert any("can run code" in text and file in text for text in records) == warns
            with pytest.raises(Exception, match="Weights only load failed"):
                smp.load(file, partial=True, weights_only=True)
    finally:
        logging.getLogger("smddp.modelparallel").removeHandler(handler)


def trained(value, steps=1):
    model = smp.DistributedModel(nn.Linear(2, 2))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
    for _ in range(steps):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    with torch.no_grad():
        for q in model.parameters():
            q.fill_(value)
    return model, optimizer


def case_whole_checkpoints_load_the_optimizer_of_their_own_save_alone(directory):
    plain = nn.Linear(2, 2)

    def write(tag):
        """Scripts write whole models by torch.save."""
        smp.barrier()
        if smp.rank() == 0:
            torch.save(plain.state_dict(), f"{directory}/{tag}")
        smp.barrier()

    with job(ddp=True):
        _, optimizer = trained(0.0)
        before = optimizer.state_dict()
        write("alone.pt")
        assert smp.resume_from_checkpoint(directory, tag="alone.pt", partial=False) is None
        _, optimizer = trained(1.0, 3)
        smp.save_checkpoint(directory, "both.pt", partial=False, user_content=Config)
        saved = optimizer.state_dict()
        model, optimizer = trained(0.0)
        assert smp.resume_from_checkpoint(directory, tag="both.pt", partial=False) is Config
        assert_same(optimizer.state_dict(), saved)
        # The file of the model is that of another run now.
        write("both.pt")
        model, optimizer = trained(0.0)
        assert smp.resume_from_checkpoint(directory, tag="both.pt", partial=False) is None
        assert_same(optimizer.state_dict(), before)
        assert_same(dict(model.state_dict()), dict(plain.state_dict()), exact=True)
        # A file of an optimizer with other groups, and no list of files.
        other = torch.optim.AdamW(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).parameters())
        smp.barrier()
        if smp.rank() == 0:
            torch.save(other.state_dict(), f"{directory}/optimizer_alone.pt")
        smp.barrier()
        smp.resume_from_checkpoint(directory, tag="alone.pt", partial=False)
        assert_same(optimizer.state_dict(), before)


def case_user_content_has_the_documented_location(directory):
    with job(ddp=True):
        trained(0.0)
        for number in range(2):
            smp.save_checkpoint(directory, "t", user_content={"of": f"parts {number}"})
            smp.save_checkpoint(directory, "t", partial=False, user_content={"of": "whole"})
        parts = ["files.json", "model_0_0.pt", "optimizer_0_0.pt", "user_content.pt"]
        assert sorted(os.listdir(f"{directory}/t_partial")) == parts
        assert smp.resume_from_checkpoint(directory, "t") == {"of": "parts 1"}
        assert smp.resume_from_checkpoint(directory, "t", partial=False) == {"of": "whole"}
        smp.barrier()
        smp.save_checkpoint(directory, "t")
        assert sorted(os.listdir(f"{directory}/t_partial")) == parts[:-1]
        assert smp.resume_from_checkpoint(directory, "t") is None
        # Earlier versions of this library had one file for both forms.
        smp.barrier()
        if smp.rank() == 0:
            os.remove(f"{directory}/t_partial/files.json")
        smp.barrier()
        assert smp.resume_from_checkpoint(directory, "t") == {"of": "whole"}


def case_parts_of_another_library_are_refused(directory):
    with job(ddp=True):
        trained(0.0)
        smp.save_checkpoint(directory, "t")
        folder = pathlib.Path(directory, "t_partial")
        if smp.rank() == 0:
            (folder / "files.json").unlink()
            torch.save({"state": {}, "param_groups": []}, folder / "optimizer_0_0.pt")
        smp.barrier()
        smp.resume_from_checkpoint(directory, "t", load_optimizer=False)
        with pytest.raises(ValueError, match=r"optimizer_0_0\.pt: expected .*'_smp_params', found state, param"):
            smp.resume_from_checkpoint(directory, "t")
        smp.barrier()
        if smp.rank() == 0:
            torch.save({"loss_scaler": 1.0}, folder / "fp16_states_0_0.pt")
        smp.barrier()
        with pytest.raises(ValueError, match=r"another library: it has fp16_states_0_0\.pt.*partial=False"):
            smp.resume_from_checkpoint(directory, "t")
