"""Keys of the SMP v2 configuration, their defaults and ranges.

Nine keys are documented for SMP v2; tensor_parallel_checks is an addition. The module needs no torch, so that a launch
host can validate parameters.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from smddp.text import did_you_mean

log = logging.getLogger("smddp.sagemaker")


@dataclass(frozen=True)
class Key:
    """One key: its type, default and least value. No value above the number of ranks fits a degree."""

    name: str
    type: type[int]
    default: int | bool
    least: int = 0
    meaning: str = ""


KEYS = {
    key.name: key
    for key in (
        Key(
            "hybrid_shard_degree",
            int,
            0,
            0,
            "number of ranks that share one copy of the parameters; 0 leaves FSDP as the script calls it (all "
            "data-parallel ranks with tensor_parallel_degree above 1), 1 shards nothing; times tensor_parallel_degree "
            "it divides the number of ranks",
        ),
        Key(
            "sm_activation_offloading",
            bool,
            True,
            meaning="`offload_wrapper` prefetches; an error if no module inside it is checkpointed",
        ),
        Key(
            "activation_loading_horizon",
            int,
            2,
            1,
            meaning="number of layers loaded ahead of the backward pass; at most one more is on the device",
        ),
        Key(
            "fsdp_cache_flush_warnings",
            bool,
            True,
            meaning="RuntimeWarning after a step in which the CUDA allocator flushed its cache",
        ),
        Key("allow_empty_shards", bool, False, meaning="accepted; torch's engines always allow empty shards"),
        Key(
            "tensor_parallel_degree",
            int,
            1,
            1,
            "number of ranks that shard each layer, after `transform`; divides the number of ranks",
        ),
        Key(
            "tensor_parallel_checks",
            int,
            10,
            meaning="number of forward passes, in training and again in evaluation, in which the ranks of a tensor "
            "group compare their inputs; 0: none",
        ),
        Key(
            "context_parallel_degree",
            int,
            1,
            1,
            "number of ranks that hold parts of the same sequences, after `transform`; divides the sharding group",
        ),
        Key(
            "expert_parallel_degree",
            int,
            1,
            1,
            "number of ranks that experts are distributed over, after `transform` with a `MoEConfig`; divides the "
            "data-parallel ranks",
        ),
        Key(
            "random_seed",
            int,
            12345,
            0,
            meaning="seed of delayed initialization and, plus the tensor rank, of sharded regions; older name: "
            "tensor_parallel_seed",
        ),
    )
}

OLDER_NAMES = {"tensor_parallel_seed": "random_seed"}

# SMP v1 configured pipelines and its own data parallelism through the same dictionary, and launchers still send
# some of it (placement_strategy) to v2 jobs.
V1_ONLY = frozenset(
    """partitions pipeline_parallel_degree microbatches pipeline optimize placement_strategy auto_partition
    default_partition contiguous horovod ddp ddp_port ddp_dist_backend memory_weight active_microbatches
    deterministic_server offload_activations fp16 fp16_params bf16 shard_optimizer_state prescaled_batch
    skip_tracing sharded_data_parallel_degree sdp_reduce_bucket_size sdp_param_persistence_threshold
    sdp_max_live_parameters sdp_hierarchical_allgather sdp_gradient_clipping load_partition partition_file
    delayed_parameter_initialization fast_mode static_mode overlapping_allreduce checkpoint_attentions _match_weights
    _fp32_grad_accumulation _prescaled_batch trace_device""".split()
)


def check(values: dict[str, Any], source: str) -> dict[str, Any]:
    """Returns ``values`` under current names, without SMP v1's keys. ``source``: their origin, for error messages.

    Raises:
        TypeError: ``values`` is not a dictionary, or a value has the wrong type.
        ValueError: an unknown key (with the nearest known one), or a value out of range.
    """
    if not isinstance(values, dict):
        raise TypeError(f"{source}: expected a dictionary of SMP keys, got {type(values).__name__}: {values!r}")
    checked: dict[str, Any] = {}
    for given, value in values.items():
        name = OLDER_NAMES.get(given, given)
        if name in V1_ONLY:
            log.warning("%s: %r is a key of SMP v1 and has no effect here (value %r)", source, given, value)
            continue
        if name not in KEYS:
            hint = did_you_mean(name, [*KEYS, *OLDER_NAMES, *V1_ONLY])
            raise ValueError(f"{source}: unknown key {given!r}{hint or '.'} The keys are {', '.join(KEYS)}.")
        if name in checked and checked[name] != value:
            raise ValueError(f"{source}: {given!r} is the older name of {name!r}, and both are given: keep {name!r}")
        checked[name] = check_value(KEYS[name], given, value, source)
    return checked


def check_value(key: Key, given: str, value: Any, source: str) -> int | bool:
    # bool is a subclass of int in Python, and True is not a degree.
    if type(value) is not key.type:
        raise TypeError(
            f"{source}: {given!r} must be {key.type.__name__}, got {type(value).__name__}: {value!r}"
            f" (default {key.default!r})"
        )
    if key.type is int and value < key.least:
        raise ValueError(f"{source}: {given!r} must be at least {key.least}, got {value}")
    return value
