"""Checkpoints of models whose layers are shared: in parts, under the same and other degrees, and whole."""

from __future__ import annotations

import copy
import os

import pytest
import smdistributed.modelparallel.torch as smp
import torch
from front_cases.by_hand import job
from lm_training import batch, gpt2, loss_of, train
from tensor_cases.families import made, wrapped

ELSEWHERE = [
    {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2, "microbatches": 2},
    {"tensor_parallel_degree": 2, "ddp": True, "microbatches": 2},
    {"pipeline_parallel_degree": 2, "ddp": True, "microbatches": 2},
]


def same(found, expected):
    torch.testing.assert_close(dict(found), dict(expected), rtol=0, atol=0)


def case_parts_resume_under_this_and_other_degrees_and_the_whole_is_plain_torch(directory):
    with job(**ELSEWHERE[0]):
        model, optimizer = wrapped(gpt2)
        train(model, optimizer, range(2))
        smp.save_checkpoint(directory, "parts", user_content={"step": 2})
        smp.save_checkpoint(directory, "whole", partial=False)
        whole = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        assert len(model.state_dict(gather_to_rank0=True)) == (len(whole[0]) if smp.tp_rank() == 0 else 0)
        smp.save(model.local_state_dict(), f"{directory}/by_hand")
        smp.barrier()
        files = [f"{what}_{pp}_{tp}.pt" for what in ("model", "optimizer") for pp in (0, 1) for tp in (0, 1)]
        assert sorted(os.listdir(f"{directory}/parts_partial")) == ["files.json", *files, "user_content.pt"]
        assert os.path.exists(f"{directory}/by_hand_{smp.pp_rank()}_{smp.tp_rank()}")
        # Result of one more step, the expected result after a resume.
        further = train(model, optimizer, range(2, 3))
    alone = made(gpt2, seed=1)
    alone.load_state_dict(torch.load(f"{directory}/whole"))
    assert alone.lm_head.weight is alone.transformer.wte.weight
    assert loss_of(alone, batch(2)).item() == pytest.approx(further[0][0], rel=1e-6)
    torch.optim.AdamW(alone.parameters()).load_state_dict(torch.load(f"{directory}/optimizer_whole"))
    for layout in ELSEWHERE:
        for tag, partial in (("parts", True), ("whole", False)):
            with job(**layout):
                model, optimizer = wrapped(gpt2, seed=1)
                content = smp.resume_from_checkpoint(directory, tag, partial=partial)
                assert content == ({"step": 2} if partial else None)
                if layout is not ELSEWHERE[0] and not partial:
                    continue
                model.register_post_partition_hook(lambda model, _: same(model.state_dict(), whole[0]))
                model.register_post_partition_hook(lambda _, found: same(found.state_dict(), whole[1]))
                found = train(model, optimizer, range(2, 3))
                assert found[0] == pytest.approx(further[0], rel=1e-6)
                assert found[1] == pytest.approx(further[1], rel=1e-5)
