"""Rules of a `distribution=` dict: each has a text, a check and a remedy.

The rules are those of the SDK 2.x (`sagemaker.fw_utils`) and of AWS's pages on the two libraries. Where the SDK does
not check a rule, such a job fails, runs one process, or hangs. Lists of versions are not among the rules.
"""

from __future__ import annotations

import math
import shlex
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from smddp.estimator import machines
from smddp.estimator.given import V1_DEGREES, Given
from smddp.smp import v1_keys as v1
from smddp.smp import v2_keys as v2
from smddp.smp.layout import layout
from smddp.text import did_you_mean

#: What each strategy's dict may have.
STRATEGIES: dict[str, tuple[str, ...]] = {
    "smdistributed": ("dataparallel", "modelparallel"),
    "torch_distributed": ("enabled",),
    "pytorchddp": ("enabled", "custom_mpi_options"),
    "mpi": ("enabled", "processes_per_host", "custom_mpi_options"),
    "pytorchxla": ("enabled",),
    "parameter_server": ("enabled",),
    "multi_worker_mirrored_strategy": ("enabled",),
}
LIBRARIES: dict[str, tuple[str, ...]] = {
    "dataparallel": ("enabled", "custom_mpi_options"),
    "modelparallel": ("enabled", "parameters"),
}
#: Strategies with custom_mpi_options.
MPI_STRATEGIES = ("mpi", "pytorchddp", "smdistributed.dataparallel")
_OF_TORCH = ("torch_distributed", "pytorchddp", "pytorchxla")
_OF_TENSORFLOW = ("parameter_server", "multi_worker_mirrored_strategy")
#: Parameters that the toolkit's mpirun line has already, with their values; None: the value depends on the job.
GIVEN_BY_TOOLKIT: dict[str, str | None] = {
    "btl_vader_single_copy_mechanism": "none",
    "btl_tcp_if_include": None,
    "oob_tcp_if_include": None,
    "plm_rsh_no_tree_spawn": "1",
    "plm_rsh_num_concurrent": None,
    "orte_abort_on_non_zero_status": "1",
    "pml": "ob1",
    "btl": "^openib",
}
_EFA_VARIABLES = ("FI_PROVIDER=efa", "FI_EFA_USE_DEVICE_RDMA=1")


@dataclass(frozen=True)
class Rule:
    name: str
    text: str
    check: Callable[[Given], str | None]


RULES: list[Rule] = []


def _rule(text: str) -> Callable[[Callable[[Given], str | None]], Callable[[Given], str | None]]:
    """Decorator: a function that returns what is wrong and what to do instead, or None."""

    def add(check: Callable[[Given], str | None]) -> Callable[[Given], str | None]:
        RULES.append(Rule(check.__name__.lstrip("_"), text, check))
        return check

    return add


def validate(
    distribution: Any,
    *,
    instance_type: str | None = None,
    instance_count: int | None = 1,
    framework: str = "pytorch",
    framework_version: str | None = None,
    py_version: str | None = None,
    image_uri: str | None = None,
    entry_point: str | None = None,
    instance_groups: Sequence[Any] | None = None,
    ranks: int | None = None,
) -> Given:
    """Checks a `distribution=` dict by every rule. Warns of variables of EFA for an instance type without EFA.

    Args:
        distribution: The dict; None: no strategy.
        instance_type: SageMaker instance type, or "local".
        instance_count: Number of hosts.
        framework: "pytorch", "tensorflow" or "huggingface".
        framework_version: Version of the framework, as in the SDK.
        py_version: Version of Python, as in the SDK.
        image_uri: Container image.
        entry_point: Script.
        instance_groups: The estimator's groups.
        ranks: Number of ranks of the whole job, if known.

    Returns:
        The arguments.

    Raises:
        ValueError: A rule is broken: its text, the value that breaks it and the remedy.
    """
    given = Given(
        {} if distribution is None else distribution,
        instance_type,
        instance_count,
        framework,
        framework_version,
        py_version,
        image_uri,
        entry_point,
        instance_groups,
        ranks,
    )
    for rule in RULES:
        found = rule.check(given)
        if found:
            raise ValueError(f"distribution: {rule.text}; {found}")
    _warn_of_efa(given)
    return given


@_rule("distribution and each strategy in it are dicts")
def _shape(given: Given) -> str | None:
    whole = given.distribution
    if not isinstance(whole, dict):
        return f'it is {whole!r}: give {{"torch_distributed": {{"enabled": True}}}}, say'
    for name, value in whole.items():
        if name == "instance_groups":
            continue
        inner = {name: value, **(value if name == "smdistributed" and isinstance(value, dict) else {})}
        for key, part in inner.items():
            if not isinstance(part, dict):
                return f'{key!r} is {part!r}: give {{"enabled": True}}'
    return None


@_rule("every key is known")
def _keys(given: Given) -> str | None:
    for name, value in given.distribution.items():
        if name == "instance_groups":
            continue
        if name not in STRATEGIES:
            return f"{name!r} is none{did_you_mean(name, STRATEGIES)} (strategies: {', '.join(STRATEGIES)})"
        tables = [(name, value, STRATEGIES[name])]
        if name == "smdistributed":
            known = [library for library in value if library in LIBRARIES]
            tables += [(f"{name}.{library}", value[library], LIBRARIES[library]) for library in known]
        for where, part, keys in tables:
            for key in part:
                if key not in keys:
                    return f"{key!r} in {where!r} is none{did_you_mean(key, keys)} (known keys: {', '.join(keys)})"
    return None


@_rule("enabled is True or False")
def _enabled(given: Given) -> str | None:
    parts = {name: part for name, part in given.distribution.items() if name != "instance_groups"}
    parts |= {f"smdistributed.{name}": part for name, part in parts.pop("smdistributed", {}).items()}
    for name, part in parts.items():
        if not isinstance(part.get("enabled", False), bool):
            return f"that of {name!r} is {part['enabled']!r}"
    return None


@_rule("one library of smdistributed at a time")
def _one_library(given: Given) -> str | None:
    if len(given.of("smdistributed")) > 1:
        return "dataparallel and modelparallel are both given: modelparallel does data parallelism as well, so keep it"
    return None


@_rule("one strategy starts the ranks")
def _one_launcher(given: Given) -> str | None:
    if "pytorchddp" in given.distribution and "smdistributed" in given.distribution:
        return "pytorchddp and smdistributed are both given: pytorchddp is smdistributed.dataparallel, so leave it out"
    if len(given.starts) > 1:
        return f"{' and '.join(given.starts)} are both enabled, of which a job runs the first alone: leave one out"
    return None


@_rule("modelparallel is started by mpi or torch_distributed")
def _modelparallel_is_started(given: Given) -> str | None:
    if given.on("smdistributed.modelparallel") and not (given.on("mpi") or given.on("torch_distributed")):
        return (
            "neither is enabled, and a job would be one plain process: add "
            '"torch_distributed": {"enabled": True}, or "mpi": {"enabled": True, "processes_per_host": N}'
        )
    return None


@_rule("strategies are those of the estimator's framework")
def _framework(given: Given) -> str | None:
    foreign = _OF_TORCH if given.framework == "tensorflow" else _OF_TENSORFLOW
    for name in foreign:
        if given.on(name):
            return f"{name!r} is enabled for {given.framework}: choose another strategy"
    if given.on("multi_worker_mirrored_strategy") and "smdistributed" in given.distribution:
        return "multi_worker_mirrored_strategy and smdistributed are both given: leave one out"
    if given.on("pytorchxla"):
        return "pytorchxla needs SageMaker's Training Compiler, which is not here: use torch_distributed"
    return None


@_rule("data parallel jobs are of Python 3 and name an instance type")
def _python(given: Given) -> str | None:
    parallel = given.starts or "smdistributed" in given.distribution
    if parallel and given.image_uri is None and (given.py_version or "py3").startswith("py2"):
        return f"py_version is {given.py_version!r}: give py310, say"
    if parallel and not given.instance_type and not given.instance_groups:
        return 'instance_type is missing: give "ml.p4d.24xlarge", or "local" for this machine'
    return None


@_rule("instance types are SageMaker's, or local")
def _instance_type(given: Given) -> str | None:
    groups = [] if given.instance_type is not None else given.instance_groups or []
    types = [given.instance_type, *(getattr(group, "instance_type", None) for group in groups)]
    return next((text for each in types if each is not None and (text := machines.unknown(each))), None)


@_rule("instance_count is one or more")
def _count(given: Given) -> str | None:
    count = given.instance_count
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
        return f"it is {count!r}"
    return None


@_rule("torchrun runs Python files")
def _entry_point(given: Given) -> str | None:
    if given.on("torch_distributed") and given.entry_point is not None and not given.entry_point.endswith(".py"):
        return f"entry_point is {given.entry_point!r}: give a file that ends in .py, or let mpi start the script"
    return None


@_rule("Trainium instances run torch_distributed alone")
def _trainium(given: Given) -> str | None:
    others = [name for name in given.distribution if name not in ("torch_distributed", "instance_groups")]
    if machines.is_trainium(given.instance_type) and others:
        return f"{', '.join(others)} on {given.instance_type}: leave it out"
    return None


@_rule("instance groups in distribution are one of the estimator's")
def _groups(given: Given) -> str | None:
    asked, known = given.distribution.get("instance_groups", []), given.instance_groups
    if known is None:
        return "the estimator has none: give instance_groups= to it as well, or leave them out" if asked else None
    if len(asked) > len(known):
        return f"{len(asked)} are asked for, and the estimator has {len(known)}"
    if len(known) > 1 and len(asked) != 1:
        return f"the estimator has {len(known)} and {len(asked)} are asked for: name the group to train on"
    if any(group not in known for group in asked):
        return "one of them is not the estimator's"
    if asked and not given.starts:
        return "no strategy that starts ranks is enabled: enable one, or leave the groups out"
    return None


@_rule("processes_per_host is a number of ranks that the instance has GPUs for")
def _processes(given: Given) -> str | None:
    asked = given.of("mpi").get("processes_per_host", given.ranks)
    if asked is None:
        return None
    if isinstance(asked, bool) or not isinstance(asked, int) or asked < 1:
        return f"it is {asked!r}: give a whole number, 1 or more"
    there = machines.gpus(given.instance_type)
    if there is not None and asked > there:
        return f"it is {asked}, and {given.instance_type} has {there}: give {there} or fewer"
    return None


@_rule("custom_mpi_options are options of mpirun in one string, none of them with another value than the job's")
def _mpi_options(given: Given) -> str | None:
    for name in MPI_STRATEGIES:
        options = given.of(name).get("custom_mpi_options", "")
        if not isinstance(options, str):
            return f'those of {name!r} are {options!r}: give "-x NAME=VALUE --mca NAME VALUE"'
        try:
            shlex.split(options)
        except ValueError as error:
            return f"those of {name!r} are {options!r}, which a shell cannot split ({error}): close the quotes"
        values: dict[str, str] = {}
        for setting, value in mca_parameters(options):
            job = GIVEN_BY_TOOLKIT.get(setting, value)
            if job != value:
                instead = "leave it out" if job is None else f"expected {job}"
                instead = "give fit(interface=...)" if setting.endswith("_if_include") else instead
                return f"those of {name!r} give {setting} {value}, and the job gives {setting} itself: {instead}"
            if setting in values and setting not in GIVEN_BY_TOOLKIT:
                return f"those of {name!r} give {setting} twice, {values[setting]} and {value}: leave one out"
            values[setting] = value
    return None


def mca_parameters(options: str) -> list[tuple[str, str]]:
    """Returns the names and values of `--mca NAME VALUE` in options of mpirun."""
    words = shlex.split(options)
    return [(words[at + 1], words[at + 2]) for at, word in enumerate(words[:-2]) if word in ("-mca", "--mca")]


def _warn_of_efa(given: Given) -> None:
    words = [word for name in MPI_STRATEGIES for word in shlex.split(given.of(name).get("custom_mpi_options", ""))]
    found = [variable for variable in _EFA_VARIABLES if variable in words]
    if found and machines.lacks_efa(given.instance_type):
        warnings.warn(
            f"custom_mpi_options: {', '.join(found)} without effect: {given.instance_type} has no EFA, and its ranks "
            "use tcp between hosts",
            stacklevel=3,
        )


@_rule("parameters of modelparallel are those of its library")
def _parameters(given: Given) -> str | None:
    try:
        parameters = given.parameters
        if given.is_v1:
            checked = v1.check(parameters, "parameters")
            if "auto_partition" in checked and "default_partition" not in checked and not checked["auto_partition"]:
                return "auto_partition is False: default_partition must say where modules go"
            v1.contradictions(v1.Config(**checked), checked)
        else:
            v2.check(parameters, "parameters")
    except (TypeError, ValueError, NotImplementedError) as error:
        return str(error)
    return None


@_rule("placement_strategy is cluster, spread or the letters D, P and T once each")
def _placement(given: Given) -> str | None:
    asked = given.parameters.get("placement_strategy", "cluster")
    if asked in ("cluster", "spread") or (isinstance(asked, str) and sorted(asked) == ["D", "P", "T"]):
        return None
    return f"it is {asked!r}: give cluster (DPT), spread (TPD), PTD, ..."


@_rule("SMP v1 under mpi says how many stages a model is cut into")
def _partitions(given: Given) -> str | None:
    if not given.on("smdistributed.modelparallel") or not given.is_v1:
        return None
    if any(name in given.parameters for name in V1_DEGREES):
        return None
    return "neither partitions nor pipeline_parallel_degree is there: give 1 where the model stays whole"


@_rule("ranks are a multiple of the degrees' product")
def _degrees(given: Given) -> str | None:
    parameters, each = given.parameters, given.processes_per_host
    if each is None or given.instance_count is None:
        return None
    ranks = each * given.instance_count
    if given.is_v1:
        stages = parameters.get("pipeline_parallel_degree", parameters.get("partitions", 1))
        others = (parameters.get(name, 1) for name in ("tensor_parallel_degree", "sharded_data_parallel_degree"))
        product = stages * math.prod(others)
        if ranks % product:
            return f"{each} x {given.instance_count} ranks, and the degrees are {product} together: change either"
        return None
    names = ("tensor_parallel_degree", "context_parallel_degree", "expert_parallel_degree")
    try:
        layout(ranks, parameters.get("hybrid_shard_degree", 0), *(parameters.get(name, 1) for name in names))
    except ValueError as error:
        return f"{each} x {given.instance_count} ranks: {error}"
    return None
