"""Checkpoints: saved under one cut, loaded under the same, under another, and by plain torch."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import pytest
import torch
from front_cases.by_hand import OTHERWISE, WHERE, job
from front_cases.optimizers import assert_same, cut_model, groups, steps
from smddp.modelparallel.checkpointing import checkpoint, objects, part_files
from smddp.modelparallel.state import state


def trained(where, numbers):
    model, optimizer = cut_model(where)
    model.cut()
    steps(model.module, optimizer, numbers)
    model.module.scale.fill_(7.0)
    return model, optimizer


def case_parts_resume_under_their_cut_and_under_another(directory):
    content = {"step": 2, "of": Path("any/class")}
    with job(partitions=4):
        model, optimizer = trained(WHERE, range(2))
        model.module.middle[1].running_mean.fill_(3.0)
        checkpoint.save_checkpoint(directory, "two", model=model, optimizer=optimizer, user_content=content)
        values, whole = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        files = sorted(os.listdir(f"{directory}/two_partial"))
        parts = [f"{what}_{stage}_0.pt" for what in ("model", "optimizer") for stage in range(4)]
        assert files == ["files.json", *parts, "user_content.pt"]
        assert sorted(os.listdir(directory)) == ["newest", "two_partial"]
        own = torch.load(f"{directory}/two_partial/model_1_0.pt")
        assert "middle.1.running_mean" in own and "first.weight" not in own and own["_smp_is_partial"]
        again, after = cut_model(WHERE)
        assert checkpoint.resume_from_checkpoint(directory) == content
        again.cut()
        assert_same(again.state_dict(), values, exact=True)
        assert_same(after.state_dict(), whole, exact=True)
    for partitions, cut in ((2, OTHERWISE), (1, {})):
        with job(partitions=partitions, ddp=True):
            again, after = cut_model(cut)
            checkpoint.resume_from_checkpoint(directory, "two")
            if partitions > 1:
                again.cut()
            assert_same(again.state_dict(), values, exact=True)
            assert_same(after.state_dict(), whole, exact=True)
            steps(again.module, after, range(2, 3))


def case_whole_files_are_plain_torch(directory):
    from front_cases.by_hand import Net

    with job(partitions=2, ddp=True):
        model, optimizer = trained(OTHERWISE, range(2))
        checkpoint.save_checkpoint(directory, "all.bin", partial=False)
        plain = Net()
        plain.load_state_dict(torch.load(f"{directory}/all.bin"))
        assert plain.scale.tolist() == [7.0, 7.0]
        torch.optim.AdamW(groups(plain)).load_state_dict(torch.load(f"{directory}/optimizer_all.bin"))
        values, whole = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        assert_same(dict(plain.state_dict()), dict(values), exact=True)
        for before_the_cut in (True, False):
            again, after = cut_model(OTHERWISE)
            if not before_the_cut:
                again.cut()
            assert checkpoint.resume_from_checkpoint(directory, partial=False) is None
            if before_the_cut:
                again.cut()
            assert_same(again.state_dict(), values, exact=True)
            assert_same(after.state_dict(), whole, exact=True)
        # transformers writes safetensors, which omit the second name of a shared weight.
        if state.ranks.rank == 0:
            from safetensors.torch import save_file

            save_file({k: v for k, v in values.items() if k != "last.weight"}, f"{directory}/model.safetensors")
        objects.barrier()
        again, _ = cut_model(OTHERWISE)
        checkpoint.resume_from_checkpoint(directory, "pytorch_model.bin", partial=False, load_optimizer=False)
        assert_same(dict(again.state_dict()), dict(values), exact=True)


def case_old_partial_checkpoints_are_deleted_and_missing_files_are_named(directory):
    with job(partitions=2, ddp=True):
        model, _ = cut_model(OTHERWISE)
        with pytest.raises(RuntimeError, match="the first step cuts the model"):
            checkpoint.save_checkpoint(directory, "early")
        model.cut()
        os.makedirs(f"{directory}/.old_partial.removed/of_an_interrupted_save", exist_ok=True)
        for tag in ("a", "b", "c"):
            checkpoint.save_checkpoint(directory, tag, user_content=tag, num_kept_partial_checkpoints=2)
        kept = ["b_partial", "c_partial", "newest"]
        assert sorted(os.listdir(directory)) == kept
        assert checkpoint.resume_from_checkpoint(directory) == "c"
        objects.barrier()
        with pytest.raises(FileNotFoundError, match=r"no partial checkpoint .*a_partial; there are b_part"):
            checkpoint.resume_from_checkpoint(directory, "a")
        with pytest.raises(FileNotFoundError, match=r"no checkpoint .*all\.bin"):
            checkpoint.resume_from_checkpoint(directory, "all.bin", partial=False)
        values = model.state_dict()
        del values["middle.0.bias"]
        with pytest.raises(RuntimeError, match=r"missing middle\.0\.bias; unexpected more"):
            model.load_state_dict({**values, "more": torch.zeros(1)})
        assert model.load_state_dict(values, strict=False).missing_keys == ["middle.0.bias"]


def case_any_object_is_saved_for_each_part_of_the_model(directory):
    with job(partitions=2, ddp=True) as ranks:
        if ranks.rdp_rank == 0:
            part_files.save({"of": ranks.mp_rank}, f"{directory}/object.pt")
        objects.barrier()
        assert sorted(os.listdir(directory)) == ["object.pt_0_0", "object.pt_1_0"]
        objects.barrier()
        assert part_files.load(f"{directory}/object.pt") == {"of": ranks.mp_rank}
        part_files.save([ranks.rank], f"{directory}/{ranks.rank}.pt", partial=False)
        assert part_files.load(f"{directory}/{ranks.rank}.pt", partial=False) == [ranks.rank]
