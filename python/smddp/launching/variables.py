"""The variables that torch's `env://` reads, from those of whichever launcher started this process."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

from smddp._native import core


def complete(environ: MutableMapping[str, str] = os.environ) -> bool:
    """Set what torchrun would have set where another launcher started this process: RANK, WORLD_SIZE, LOCAL_RANK,
    LOCAL_WORLD_SIZE, NODE_RANK, MASTER_ADDR and MASTER_PORT, and SMDATAPARALLEL_LOCAL_RANK. MASTER_ADDR and MASTER_PORT
    stay where all ranks have them.

    Returns False where no launcher did. `environ` must be this process's own, which the core reads.
    Raises smddp.ConfigError where a launcher's variables make no sense, or say nothing of where rank 0 is.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return True
    found = core().launched()
    if found is None:
        return False
    rank, size, local_rank, local_size, meet = found
    host, port, _ = meet or ("127.0.0.1", None, True)
    values = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": local_size,
        "NODE_RANK": node_rank(environ, rank, size, local_rank, local_size),
        "SMDATAPARALLEL_LOCAL_RANK": local_rank,
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
    }
    if environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true":
        # torch's store is there already; the core's own port is another one.
        del values["MASTER_ADDR"], values["MASTER_PORT"]
    for name, value in values.items():
        if value is not None:
            environ[name] = str(value)
    return True


def node_rank(
    environ: MutableMapping[str, str], rank: int, size: int, local_rank: int, local_size: int | None
) -> int | None:
    """Which of the job's hosts this is, where the launcher, the job or ranks that come host by host say so."""
    if "SLURM_NODEID" in environ and "SLURM_PROCID" in environ:
        return int(environ["SLURM_NODEID"])
    hosts, current = environ.get("SM_HOSTS"), environ.get("SM_CURRENT_HOST")
    if hosts and current:
        import json  # seldom needed, by a program whose start counts

        try:
            return list(json.loads(hosts)).index(current)
        except ValueError:
            pass
    if local_size is None:
        return None
    by_host = size % local_size == 0 and rank % local_size == local_rank
    return rank // local_size if by_host else None
