"""Sharded data parallelism over the ranks with the same tensor shard: the numbers and states of one process."""

from __future__ import annotations

from tensor_cases.families import check, gpt2, llama

BOTH = {"sharded_data_parallel_degree": 2, "tensor_parallel_degree": 2, "ddp": True, "microbatches": 2}
SHARDED = {key: value for key, value in BOTH.items() if key != "tensor_parallel_degree"}


def case_both_degrees_train_as_one_process(directory):
    for family, prescaled, more in (
        (gpt2, False, {}),
        (gpt2, True, {"sdp_param_persistence_threshold": 0, "placement_strategy": "spread"}),
        (llama, True, {"microbatches": 1}),
        (llama, False, {"placement_strategy": "TPD", "sdp_reduce_bucket_size": 100}),
    ):
        check(family, {**SHARDED, **more}, prescaled)
