"""Sharded data parallelism with tensor parallelism on eight ranks: all degrees, precisions and forms of batches."""

from __future__ import annotations

import itertools

import smdistributed.modelparallel.torch as smp
from tensor_cases.families import check, llama
from tensor_cases.sharded_groups import LAYOUTS, PRECISIONS, SHARDED, check_cell, check_fused, check_move, gpt2
from tensor_slow_cases.matrix import gpt_neox, gptj, t5

DEGREES = [(4, 2), (2, 2), (2, 4)]


def case_degrees_precisions_and_batches_train_and_resume(directory):
    for (shard, tensor), (precision, scale), prescaled in itertools.product(DEGREES, PRECISIONS, (False, True)):
        degrees = {"sharded_data_parallel_degree": shard, "tensor_parallel_degree": tensor}
        batches = {"prescaled_batch": prescaled, "microbatches": 2 if prescaled else 1}
        check_cell(directory, {**SHARDED, **degrees, **batches}, precision, scale)


def case_families_train_as_one_process(directory):
    for family in (gpt2, llama, gpt_neox, gptj, t5):
        check(family, {**SHARDED, "microbatches": 1, "placement_strategy": "TPD"}, False, within=2e-6)
    published = {**SHARDED, "sharded_data_parallel_degree": 4, "tensor_parallel_degree": 2, "prescaled_batch": True}
    check_cell(directory, published, {"bf16": True}, {}, gptj)


def case_checkpoints_move_between_all_degrees(directory):
    for number in range(1, len(LAYOUTS)):
        layouts = [{**LAYOUTS[each], "microbatches": 1} for each in (0, number)]
        check_move(directory, *layouts)
        check_move(directory, *layouts[::-1])


def case_fused_optimizers_step_whole_tensors(directory):
    for kind in (smp.optimizers.FusedLAMB, smp.optimizers.FusedNovoGrad):
        check_fused(kind, microbatches=1)
