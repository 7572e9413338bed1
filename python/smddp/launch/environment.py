"""Variables of torch's `env://` rendezvous, derived from any supported launcher's variables."""

from __future__ import annotations

import os
from typing import cast

from smddp._native import core

#: Rank, size, local rank, local size (None if the launcher does not set it) and rank 0's address: host, port, and
#: whether all ranks run on that host. None without a launcher.
Launched = tuple[int, int, int | None, int | None, tuple[str, int, bool] | None] | None


def launched(port: int | None = None) -> Launched:
    """Returns the launcher's settings of this process (`smddp._core.launched`). For MPI ranks on several hosts without
    MASTER_ADDR, queries the process manager and sets MASTER_ADDR and, if missing, the job's name.

    Raises smddp.ConfigError, a ValueError, for invalid variables or an unknown address of rank 0.
    """
    native = core()
    try:
        found = native.launched(port)
    except native.ConfigError as error:
        from smddp.launch import process_manager  # imported lazily to keep startup short

        try:
            if not process_manager.complete():
                raise
        except OSError as reason:
            text = f"{error}; the process manager did not supply it: {reason}; pass it by mpirun -x MASTER_ADDR=HOST"
            raise native.ConfigError(text) from reason
        found = native.launched(port)
    return cast(Launched, found)


def complete() -> bool:
    """Set torchrun's variables if another launcher started this process: RANK, WORLD_SIZE, LOCAL_RANK,
    LOCAL_WORLD_SIZE, NODE_RANK, MASTER_ADDR and MASTER_PORT, and SMDATAPARALLEL_LOCAL_RANK. MASTER_ADDR and MASTER_PORT
    keep their values if all ranks have them. mpirun's process manager supplies them for ranks on several hosts.

    Returns False without a launcher.
    Raises smddp.ConfigError for invalid variables, for a launcher that gives no local rank or no address of rank 0, and
    for a Slurm batch script without srun.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        numbers = os.environ["RANK"], os.environ["WORLD_SIZE"]
        if not all(number.isdecimal() for number in numbers) or int(numbers[0]) >= int(numbers[1]):
            launched()  # raises with the reason
        return True
    found = launched()
    if found is None:
        return False
    rank, size, local_rank, local_size, meet = found
    if local_rank is None:
        raise core().ConfigError(
            f"LOCAL_RANK is not set, and the launcher gives rank {rank} of {size} no number on its host: have the "
            "launcher set LOCAL_RANK for each rank, or start the script with srun, mpirun or torchrun"
        )
    host, port, _ = meet or (
        os.environ.get("MASTER_ADDR", "127.0.0.1"),
        os.environ.get("MASTER_PORT") or free_port(),
        True,
    )
    node_rank = _node_rank(rank, size, local_rank, local_size)
    values: dict[str, str | int | None] = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": local_size,
        "NODE_RANK": node_rank,
        "SMDATAPARALLEL_LOCAL_RANK": local_rank,
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
    }
    hosts = _sm_hosts()
    if node_rank is not None and node_rank < len(hosts):
        # mpirun passes all ranks the variables of the host it runs on, or none.
        values["SM_CURRENT_HOST"] = hosts[node_rank]
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true":
        # torch's store already listens there; the core needs a different port.
        del values["MASTER_ADDR"], values["MASTER_PORT"]
    for name, value in values.items():
        if value is not None:
            os.environ[name] = str(value)
    return True


def free_port() -> int:
    """Returns a currently unused TCP port of this host."""
    import socket  # as above

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        number: int = found.getsockname()[1]
        return number


def _sm_hosts() -> list[str]:
    """Returns the hosts of a SageMaker job; an empty list outside SageMaker or for an invalid list."""
    import json  # as above

    try:
        return list(json.loads(os.environ.get("SM_HOSTS", "[]")))
    except (ValueError, TypeError, RecursionError):
        return []


def _place_in_job() -> int | None:
    """Returns this host's index in the SageMaker job's list of hosts."""
    hosts = _sm_hosts()
    # Prefer the host's file: the toolkit's `mpi` strategy passes the first host's SM_CURRENT_HOST to all ranks.
    for name in (_configured_host(), os.environ.get("SM_CURRENT_HOST")) if hosts else ():
        if name in hosts:
            return hosts.index(name)
    return None


def _configured_host() -> str | None:
    """Returns this host's name in the service's resource configuration."""
    import json  # as above

    from smddp.files import read_text

    base = os.environ.get("SAGEMAKER_BASE_DIR", "/opt/ml")
    try:
        name: str = json.loads(read_text(os.path.join(base, "input/config/resourceconfig.json")))["current_host"]
        return name
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _node_rank(rank: int, size: int, local_rank: int, local_size: int | None) -> int | None:
    """Returns this host's index from the launcher, the job or a host-by-host rank order; None if unknown."""
    if "SLURM_NODEID" in os.environ and "SLURM_PROCID" in os.environ:
        return int(os.environ["SLURM_NODEID"])
    place = _place_in_job()
    if place is not None:
        return place
    if local_size is None:
        return None
    by_host = size % local_size == 0 and rank % local_size == local_rank
    return rank // local_size if by_host else None
