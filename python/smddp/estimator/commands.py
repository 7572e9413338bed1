"""Commands that start a job's ranks, with the launchers and options of SageMaker's training toolkit."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from smddp import validation
from smddp.estimator import machines
from smddp.estimator.given import Given
from smddp.estimator.rules import GIVEN_BY_TOOLKIT, MPI_STRATEGIES

#: The toolkit's, for torchrun and for what its own mpirun hands to smddprun.
MASTER_PORT = 7777
SERVER_PORT = 7592
#: torchrun's words before the command of a rank. After "--" it parses no options: it would take an argument of the
#: script, such as --log, for an abbreviated option of torchrun.
COMMAND_FOLLOWS = ("--no-python", "--")


@dataclass(frozen=True)
class Host:
    """One host of a job and its ranks."""

    name: str
    slots: int


@dataclass(frozen=True)
class Command:
    """Command on a host, with the variables that it adds to the host's environment."""

    host: str
    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """Returns the host and a command of a shell, with one variable per line."""
        variables = [f"{shlex.quote(name)}={shlex.quote(value)}" for name, value in self.env.items()]
        return f"{self.host}: " + " \\\n    ".join([*variables, shlex.join(self.argv)])


def with_groups(given: Given, instance_count: int | None) -> tuple[Given, int | None]:
    """Returns `given` and the number of instances, both of the instance group that trains where there are groups."""
    groups = given.distribution.get("instance_groups") or given.instance_groups or []
    if given.instance_type is not None or not groups:
        return given, instance_count
    # The rules allow one.
    return replace(given, instance_type=groups[0].instance_type), groups[0].instance_count


def hosts_of(given: Given, hosts: Sequence[str] | None, instance_count: int | None) -> list[Host]:
    """The hosts of "NAME" or "NAME:RANKS"; this machine where none are named.

    Those that say no number have as many ranks as the distribution and the instance type say, else one.

    Raises ValueError for a job of several instances without hosts, or another number of them.
    """
    count = instance_count or 1
    each = given.processes_per_host or 1
    if hosts is None:
        if count > 1:
            raise ValueError(
                f"instance_count is {count}, and ranks are started here: name the hosts "
                f"(hosts=['a:{each}', 'b:{each}']), or give instance_count=1"
            )
        hosts = ["localhost"]
    if not hosts:
        raise ValueError("hosts: the list is empty: give NAME or NAME:RANKS, or leave it out for this machine")
    found = []
    for text in hosts:
        name, _, number = text.partition(":")
        if not name or (number and (not number.isdecimal() or len(number) > 6 or int(number) < 1)):
            raise ValueError(f"hosts: invalid entry {text!r}: expected NAME or NAME:RANKS")
        found.append(Host(validation.host_name(name), int(number or each)))
    if len({host.name for host in found}) != len(found):
        raise ValueError(f"hosts: one is named twice in {list(hosts)}")
    if count not in (1, len(found)):
        raise ValueError(f"instance_count is {count}, and {len(found)} hosts are named: {', '.join(hosts)}")
    return found


def build(
    given: Given,
    hosts: Sequence[Host],
    script: Callable[[bool], list[str]],
    env: Mapping[str, str],
    *,
    interface: str | None = None,
    rank_program: Sequence[str] = (),
    port: int = MASTER_PORT,
    python: str = sys.executable,
    mpirun: bool = True,
) -> list[Command]:
    """Returns the commands that run a script on `hosts`.

    script: returns the command of a rank; its argument selects `python -m mpi4py`, for ranks of mpirun. env: variables
    of every rank. interface: network interface between hosts, for mpirun and NCCL; None leaves the choice to them.
    rank_program: words before each rank's command. mpirun: False starts the ranks of one host by smddprun instead.
    Raises ValueError where hosts have different numbers of ranks, or a strategy has no command here.
    """
    slots = {host.slots for host in hosts}
    if len(slots) > 1:
        raise ValueError(f"hosts have different numbers of ranks: {', '.join(f'{h.name}:{h.slots}' for h in hosts)}")
    program = [*rank_program, *script(False)]
    if len(hosts) == 1:
        env = {**env, "SM_CURRENT_HOST": hosts[0].name}
    if given.on("torch_distributed"):
        return _torchrun(given, hosts, program, env, interface, port, python)
    parallel = given.on("pytorchddp") or given.on("smdistributed.dataparallel")
    if (given.on("mpi") or parallel) and not mpirun:
        variables, _ = split_exports(given)
        words = ["smddprun", "--nproc", str(hosts[0].slots), *program]
        return [Command(hosts[0].name, words, {**env, **variables})]
    if given.on("mpi"):
        return [_mpi(given, hosts, [*rank_program, *script(True)], env, interface)]
    if parallel:
        return [_data_parallel(given, hosts, [*rank_program, *script(True)], env, interface)]
    for name in ("parameter_server", "multi_worker_mirrored_strategy"):
        if given.on(name):
            raise ValueError(f"{name} is not started here: use smdistributed.dataparallel or mpi")
    return [Command(host.name, program, {**env, "SM_CURRENT_HOST": host.name}) for host in hosts]


def _network(interface: str | None) -> list[str]:
    if interface is None:
        return []
    return ["-mca", "btl_tcp_if_include", interface, "-mca", "oob_tcp_if_include", interface]


def _split(options: str) -> tuple[str, list[str]]:
    """Returns the value of --NCCL_DEBUG, the toolkit's own option, and the options for mpirun.

    Parameters that the job gives with the same value are left out: mpirun refuses a parameter that is given twice.
    """
    debug, rest, words = "INFO", [], shlex.split(options)
    while words:
        word = words.pop(0)
        if word.startswith("--NCCL_DEBUG="):
            debug = word.partition("=")[2]
        elif word == "--NCCL_DEBUG" and words:
            debug = words.pop(0)
        elif word in ("-mca", "--mca") and len(words) > 1 and GIVEN_BY_TOOLKIT.get(words[0]) == words[1]:
            del words[:2]
        else:
            rest.append(word)
    return debug, rest


def _exported(*assignments: str) -> list[str]:
    return [word for assignment in assignments for word in ("-x", assignment)]


def _job(env: Mapping[str, str]) -> list[str]:
    """The job's variables, which mpirun has in its own environment."""
    return _exported(*env)


def _data_parallel(
    given: Given, hosts: Sequence[Host], program: list[str], env: Mapping[str, str], interface: str | None
) -> Command:
    strategy = "pytorchddp" if given.on("pytorchddp") else "smdistributed.dataparallel"
    debug, options = _split(given.of(strategy).get("custom_mpi_options", ""))
    several = len(hosts) > 1
    names = [f"{host.name}:{host.slots}" if several else host.name for host in hosts]
    argv = ["mpirun", "--host", ",".join(names), "-np", str(sum(host.slots for host in hosts))]
    argv += ["--allow-run-as-root", "--tag-output", "--oversubscribe", *_network(interface)]
    argv += ["-mca", "plm_rsh_no_tree_spawn", "1", "-mca", "pml", "ob1", "-mca", "btl", "^openib"]
    argv += ["-mca", "orte_abort_on_non_zero_status", "1", "-mca", "btl_vader_single_copy_mechanism", "none"]
    argv += ["-mca", "plm_rsh_num_concurrent", str(len(hosts))]
    argv += _exported(*([f"NCCL_SOCKET_IFNAME={interface}"] if interface else []), f"NCCL_DEBUG={debug}")
    argv += _exported("LD_LIBRARY_PATH", "PATH", f"SMDATAPARALLEL_USE_{'HOMOGENEOUS' if several else 'SINGLENODE'}=1")
    if given.instance_type in machines.EFA:
        argv += _exported("FI_PROVIDER=efa", "RDMAV_FORK_SAFE=1")
    argv += [*options, *_efa(given)]
    if several:
        argv += _exported(f"SMDATAPARALLEL_SERVER_ADDR={hosts[0].name}", f"SMDATAPARALLEL_SERVER_PORT={SERVER_PORT}")
        argv += _exported(f"SAGEMAKER_INSTANCE_TYPE={given.instance_type}")
    return Command(hosts[0].name, [*argv, *_job(env), "smddprun", *program], dict(env))


def _mpi(
    given: Given, hosts: Sequence[Host], program: list[str], env: Mapping[str, str], interface: str | None
) -> Command:
    debug, options = _split(given.of("mpi").get("custom_mpi_options", ""))
    names = [f"{host.name}:{host.slots}" if host.slots > 1 else host.name for host in hosts]
    argv = ["mpirun", "--host", ",".join(names), "-np", str(sum(host.slots for host in hosts))]
    argv += ["--allow-run-as-root", "--display-map", "--tag-output", *_network(interface)]
    argv += ["-mca", "plm_rsh_no_tree_spawn", "1", "-bind-to", "none", "-map-by", "slot"]
    argv += ["-mca", "pml", "ob1", "-mca", "btl", "^openib", "-mca", "orte_abort_on_non_zero_status", "1"]
    argv += ["-mca", "btl_vader_single_copy_mechanism", "none"]
    argv += _exported("NCCL_MIN_NRINGS=4", *([f"NCCL_SOCKET_IFNAME={interface}"] if interface else []))
    argv += _exported(f"NCCL_DEBUG={debug}", "LD_LIBRARY_PATH", "PATH")
    argv += options
    if given.instance_type in machines.EFA:
        argv += _exported("FI_PROVIDER=efa")
    argv += [*_efa(given), *_job(env)]
    backend = given.parameters.get("ddp_dist_backend", "auto")
    if given.on("smdistributed.modelparallel") and backend == "auto":
        return Command(
            hosts[0].name,
            [*argv, "smddpmprun", "-i", str(given.instance_type), "--allow-bypass", *program],
            dict(env),
        )
    return Command(hosts[0].name, [*argv, "smddprun", *program], dict(env))


def _efa(given: Given) -> list[str]:
    found = ["NCCL_PROTO=simple"] if given.instance_type in machines.EFA else []
    found += ["FI_EFA_USE_DEVICE_RDMA=1"] if given.instance_type in machines.EFA_RDMA else []
    return _exported(*found)


def efa_variables(given: Given) -> dict[str, str]:
    """Returns the toolkit's variables for torchrun on instances with EFA."""
    found: dict[str, str] = {}
    if given.instance_type in machines.EFA:
        found |= {"FI_PROVIDER": "efa", "NCCL_PROTO": "simple"}
    if given.instance_type in machines.EFA_RDMA:
        found |= {"FI_EFA_USE_DEVICE_RDMA": "1", "RDMAV_FORK_SAFE": "1"}
    return found


def exported_variables(given: Given) -> dict[str, str]:
    """Returns the variables that custom_mpi_options export by -x, for a launcher other than mpirun.

    Raises ValueError for other options.
    """
    found, others = split_exports(given)
    if others:
        raise ValueError(
            f"custom_mpi_options: {others[0]!r} is for mpirun, which does not start these ranks: "
            "give -x NAME=VALUE alone"
        )
    return found


def split_exports(given: Given) -> tuple[dict[str, str], list[str]]:
    """Returns the variables of `-x NAME=VALUE` in custom_mpi_options, and the remaining words, which need mpirun."""
    found: dict[str, str] = {}
    others: list[str] = []
    for name in MPI_STRATEGIES:
        options = given.of(name).get("custom_mpi_options", "") if given.on(name) else ""
        debug, words = _split(options)
        if "--NCCL_DEBUG" in options:
            found["NCCL_DEBUG"] = debug
        while words:
            word = words.pop(0)
            if word == "-x" and words and "=" in words[0]:
                variable, _, value = words.pop(0).partition("=")
                found[variable] = value
            else:
                others.append(word)
    return found, others


def _torchrun(
    given: Given,
    hosts: Sequence[Host],
    program: list[str],
    env: Mapping[str, str],
    interface: str | None,
    port: int,
    python: str,
) -> list[Command]:
    more = {**env, **efa_variables(given)}
    if interface is not None:
        more["NCCL_SOCKET_IFNAME"] = interface
    # The script's own interpreter is named, which is what torchrun would take.
    start = [python, "-m", "torch.distributed.run", "--nnodes", str(len(hosts))]
    start += ["--nproc_per_node", str(hosts[0].slots)]
    made = []
    for number, host in enumerate(hosts):
        where = ["--master_addr", hosts[0].name, "--master_port", str(port)]
        place = [*where, "--node_rank", str(number)] if len(hosts) > 1 else ["--standalone"]
        own = {**more, "SM_CURRENT_HOST": host.name}
        words = [validation.escape_dollars(word) for word in program]
        made.append(Command(host.name, [*start, *place, *COMMAND_FOLLOWS, *words], own))
    return made
