"""Configuration of `smp.init()`: keys, sources and checks.

The launcher's values (the environment variable SM_HP_MP_PARAMETERS, a JSON object) win over those of the dict that the
script gives to `init`. A key without its feature raises, unless its value is the default. Keys that only published
scripts and notebooks use are accepted; a value without effect is logged once with the reason.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from dataclasses import dataclass
from typing import Any

from smddp.smp.launcher import LAUNCHER, read_json
from smddp.text import did_you_mean

log = logging.getLogger("smddp.modelparallel")

ALIASES = {"partitions": "pipeline_parallel_degree", "_prescaled_batch": "prescaled_batch"}

_SCHEDULE = "every step exchanges the same messages"

# SMP v2's own keys: they say which library a configuration was written for.
_V2 = frozenset(
    """hybrid_shard_degree context_parallel_degree expert_parallel_degree sm_activation_offloading random_seed
    fsdp_cache_flush_warnings allow_empty_shards tensor_parallel_seed tensor_parallel_checks""".split()
)


def _key(
    default: Any,
    meaning: str,
    *,
    kind: type | None = None,
    least: float | None = None,
    most: float | None = None,
    one_of: tuple[str, ...] = (),
    instead: str = "",
    no_effect: str = "",
) -> Any:
    """A field of `Config`.

    ``instead``: the feature is not there, and this is what to use; only the default is accepted.
    ``no_effect``: reason why a value other than the default has no effect, for a warning.
    """
    metadata = {
        "kind": kind or type(default),
        "meaning": meaning,
        "least": least,
        "most": most,
        "one_of": one_of,
        "instead": instead,
        "no_effect": no_effect,
    }
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Config:
    """Every key of SMP v1 with its value."""

    pipeline_parallel_degree: int = _key(
        1, "number of stages that the model is cut into; also called partitions", least=1
    )
    microbatches: int = _key(1, "number of equal parts that a step's batch is split into", least=1)
    pipeline: str = _key(
        "interleaved",
        "backward passes as early as possible (interleaved), after all forward passes (simple), or none",
        one_of=("interleaved", "simple", "_only_forward"),
    )
    active_microbatches: int = _key(
        None, "number of microbatches in progress; by default pipeline_parallel_degree + 2", kind=int, least=1
    )
    optimize: str = _key("memory", "sets memory_weight: 0.8 for memory, 0.2 for speed", one_of=("memory", "speed"))
    memory_weight: float = _key(
        None,
        "weight of memory against computation in the costs of the cut; by default as optimize sets it",
        kind=float,
        least=0,
        most=1,
    )
    auto_partition: bool = _key(
        True,
        "cut by costs at the first step; smp.partition() places modules first; False needs default_partition",
    )
    default_partition: int = _key(0, "stage of modules outside smp.partition() without auto_partition", least=0)
    placement_strategy: str = _key(
        "cluster", "order of ranks: cluster (DPT), spread (TPD), or the letters D, P, T; the last letter varies fastest"
    )
    ddp: bool = _key(False, "average gradients over the replicas of the model; required if there are several")
    ddp_port: int = _key(None, "port of DDP's own group", kind=int, least=0, no_effect="one default group serves all")
    ddp_dist_backend: str = _key(
        "auto",
        "backend of the default group, if init creates it; auto is smddp; needs ddp",
        one_of=("auto", "nccl", "smddp", "gloo"),
    )
    deterministic_server: bool = _key(False, "same order of work in every run; here it always is")
    contiguous: bool = _key(True, "TensorFlow's: stages of neighbours", instead="auto_partition cuts contiguous stages")
    horovod: bool = _key(False, "TensorFlow's: replicas by Horovod", instead="'ddp': True")
    load_partition: bool = _key(False, "read the cut from partition_file, as written or as you changed it")
    partition_file: str = _key(
        None,
        "rank 0 writes the cut of auto_partition to this JSON file: the stage of each module by its name",
        kind=str,
    )
    skip_tracing: bool = _key(
        False, "cut by parameters alone, without the run of one microbatch on stage 0 that measures costs"
    )
    tensor_parallel_degree: int = _key(1, "number of ranks that shard each layer", least=1)
    prescaled_batch: bool = _key(False, "the ranks of a tensor group read the same batch")
    fp16: bool = _key(
        False, "float16 model and inputs, float32 outputs and losses; the optimizer steps float32 master weights"
    )
    fp16_params: bool = _key(
        False,
        "modules under smp.tensor_parallelism() get float16 parameters at every tensor degree; the script casts "
        "inputs, scales the loss and steps",
    )
    bf16: bool = _key(
        False, "bfloat16 computation, float32 master weights; only with sharded_data_parallel_degree above 1"
    )
    shard_optimizer_state: bool = _key(
        False,
        "each replica of a stage steps a share of whole parameters, balanced by size, and holds only their state; not "
        "with sharded_data_parallel_degree",
    )
    offload_activations: bool = _key(
        False, "inputs of modules under smp.set_activation_checkpointing() wait in host memory; needs such a module"
    )
    activation_loading_horizon: int = _key(
        4, "number of checkpointed modules whose offloaded inputs are loaded ahead of a backward pass", least=1
    )
    sharded_data_parallel_degree: int = _key(
        1, "number of ranks that shard the parameters, a divisor of rdp_size; needs one stage and ddp", least=1
    )
    sdp_reduce_bucket_size: int = _key(
        500_000_000, "elements; a larger module is gathered and reduced by its submodules", least=1
    )
    sdp_param_persistence_threshold: int = _key(
        1_000_000, "elements; layers with only smaller parameters keep them gathered to the end of the step", least=0
    )
    sdp_max_live_parameters: int = _key(
        1_000_000_000,
        "elements; the backward pass gathers the next layer ahead only if both layers have no more",
        least=1,
    )
    sdp_hierarchical_allgather: bool = _key(
        True, "gather inside nodes first", no_effect="the backend chooses how it gathers, by the nodes"
    )
    sdp_gradient_clipping: float = _key(1.0, "norm that a step's gradients are clipped to; 0: none", least=0)
    delayed_parameter_initialization: bool = _key(
        False, "accepted; smp.delay_param_initialization() delays values, with a warning if no module used it"
    )
    overlapping_allreduce: bool = _key(
        True, "average over replicas during the last backward pass, else after it; also of DistributedModel"
    )
    trace_device: str = _key(
        "gpu", "also of DistributedModel", one_of=("gpu", "cpu"), no_effect="the model is traced on its own device"
    )
    fast_mode: bool = _key(False, "undocumented; in published scripts", no_effect=_SCHEDULE)
    static_mode: bool = _key(False, "undocumented; in published scripts", no_effect=_SCHEDULE)
    checkpoint_attentions: bool = _key(
        False,
        "undocumented; in published scripts",
        no_effect="smp.set_activation_checkpointing() names the modules to checkpoint",
    )
    _match_weights: bool = _key(
        False,
        "undocumented; in published scripts",
        no_effect="shared layers always have the values of the script's modules",
    )
    _fp32_grad_accumulation: bool = _key(
        False,
        "undocumented; in published scripts",
        no_effect="gradients of microbatches add up in the type of their parameters",
    )

    def __post_init__(self) -> None:
        if self.active_microbatches is None:
            object.__setattr__(self, "active_microbatches", self.pipeline_parallel_degree + 2)
        if self.memory_weight is None:
            object.__setattr__(self, "memory_weight", 0.2 if self.optimize == "speed" else 0.8)

    @property
    def partitions(self) -> int:
        """The older name of pipeline_parallel_degree."""
        return self.pipeline_parallel_degree


KEYS = {field.name: field for field in dataclasses.fields(Config)}


def check(values: Any, source: str) -> dict[str, Any]:
    """``values`` under the names of `Config`'s fields. ``source`` is where they come from, for the errors.

    Raises:
        TypeError: ``values`` is not a dictionary, or a value has the wrong type.
        ValueError: an unknown key (with the nearest known one), a value out of range, two names of one key that differ.
        NotImplementedError: a key that asks for what is not there.
    """
    if not isinstance(values, dict):
        raise TypeError(f"{source}: expected a dictionary of SMP keys, got {type(values).__name__}: {values!r}")
    checked: dict[str, Any] = {}
    for given, value in values.items():
        name = ALIASES.get(given, given)
        if name in _V2:
            raise ValueError(f"{source}: {given!r} is a key of SMP v2, whose import is torch.sagemaker, not of SMP v1")
        if name not in KEYS:
            hint = did_you_mean(name, [*KEYS, *ALIASES])
            raise ValueError(
                f"{source}: unknown key {given!r}{hint or '.'} The keys are {', '.join([*ALIASES, *KEYS])}."
            )
        value = _checked(name, given, value, source)
        if name in checked and checked[name] != value:
            names = " and ".join(repr(key) for key in values if ALIASES.get(key, key) == name)
            raise ValueError(f"{source}: {names} are one key, and their values differ: {checked[name]!r} and {value!r}")
        checked[name] = value
    return checked


def _checked(name: str, given: str, value: Any, source: str) -> Any:
    field, about = KEYS[name], KEYS[name].metadata
    kind = about["kind"]
    if kind is float and type(value) is int:
        value = float(value)
    elif kind is int and type(value) is float and value.is_integer():
        value = int(value)  # JSON's 5e8
    elif kind is bool and type(value) is int and value in (0, 1):
        value = bool(value)
    if value is None and field.default is None:
        return None
    # bool is an int in Python, but True is not a degree.
    if type(value) is not kind:
        raise TypeError(f"{source}: {given!r} must be {kind.__name__}, got {type(value).__name__}: {value!r}")
    least, most = about["least"], about["most"]
    if least is not None and not least <= value <= (float("inf") if most is None else most):
        allowed = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{source}: {given!r} must be {allowed}, got {value}")
    if about["one_of"] and value not in about["one_of"]:
        raise ValueError(f"{source}: {given!r} must be one of {', '.join(about['one_of'])}, got {value!r}")
    if name == "placement_strategy" and value not in ("cluster", "spread") and sorted(value) != ["D", "P", "T"]:
        raise ValueError(f"{source}: {given!r} must be cluster, spread or the letters D, P, T once each, got {value!r}")
    if value != field.default:
        if about["instead"]:
            raise NotImplementedError(
                f"{source}: {given!r}={value!r} is not there in this library's SMP v1 ({about['meaning']}). Instead: "
                f"{about['instead']}"
            )
        if about["no_effect"]:
            log.warning("%s: %r has no effect here (value %r): %s", source, given, value, about["no_effect"])
    return value


def read(argument: dict[str, Any] | None) -> Config:
    """The configuration from ``argument``, the dict given to `init` or None, and the launcher, which wins.

    Raises:
        TypeError, ValueError, NotImplementedError: as `check` does, or keys that contradict each other.
    """
    script = {} if argument is None else check(argument, "smp.init()")
    launcher = {}
    if os.environ.get(LAUNCHER, "").strip():
        launcher = check(read_json(os.environ[LAUNCHER], f"the environment variable {LAUNCHER}"), LAUNCHER)
    for name, value in launcher.items():
        if name in script and script[name] != value:
            log.warning("%s=%r from the launcher replaces the script's %r", name, value, script[name])
    given = {**script, **launcher}
    config = Config(**given)
    contradictions(config, given)
    return config


def contradictions(config: Config, given: dict[str, Any]) -> None:
    if not config.auto_partition and "default_partition" not in given:
        raise ValueError("smp.init(): 'auto_partition' is False, so 'default_partition' must say where modules go")
    if config.load_partition and config.partition_file is None:
        raise ValueError("smp.init(): 'load_partition' is True, so 'partition_file' must name the file")
    if config.default_partition >= config.pipeline_parallel_degree:
        raise ValueError(
            f"smp.init(): 'default_partition'={config.default_partition} is not among the stages 0 to "
            f"{config.pipeline_parallel_degree - 1} of 'pipeline_parallel_degree'={config.pipeline_parallel_degree}"
        )
    if not config.offload_activations and config.activation_loading_horizon != 4:
        log.warning("smp.init(): 'activation_loading_horizon' has no effect: 'offload_activations' is False")
    _contradictions_of_sharding(config, given)
    for name in ("ddp_port", "ddp_dist_backend"):
        if given.get(name) not in (None, KEYS[name].default) and not config.ddp:
            raise ValueError(f"smp.init(): {name!r}={given[name]!r} needs 'ddp': True")


def _contradictions_of_sharding(config: Config, given: dict[str, Any]) -> None:
    degree = config.sharded_data_parallel_degree
    if config.bf16 and degree == 1:
        raise ValueError(
            "smp.init(): 'bf16': True belongs to 'sharded_data_parallel_degree', which is 1: run the step under "
            "torch.autocast(device, torch.bfloat16)"
        )
    if config.bf16 and config.fp16:
        raise ValueError("smp.init(): 'fp16' and 'bf16' exclude each other")
    if degree == 1:
        for name in given:
            if name.startswith("sdp_") and given[name] != KEYS[name].default:
                log.warning("smp.init(): %r has no effect: 'sharded_data_parallel_degree' is 1", name)
        return
    if config.shard_optimizer_state:
        raise ValueError(
            "smp.init(): 'shard_optimizer_state' with 'sharded_data_parallel_degree', which shards the state already: "
            "leave out one"
        )
    if config.pipeline_parallel_degree > 1:
        raise ValueError(
            f"smp.init(): 'sharded_data_parallel_degree'={degree} needs 'pipeline_parallel_degree' 1, got "
            f"{config.pipeline_parallel_degree}: its ranks share each layer and not the layers"
        )
