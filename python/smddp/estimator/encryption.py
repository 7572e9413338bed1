"""Encryption of the traffic between a job's hosts: encrypt_inter_container_traffic."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping

from smddp.estimator.job import Folder

_NAME = "encrypt_inter_container_traffic"
_TOKEN = "SMDDP_JOB_TOKEN_FILE"
#: Settings that exclude encryption: the values that a job with encryption accepts.
_ACCEPTED = {
    "SMDDP_ENCRYPT": ("1",),
    "SMDDP_TRANSPORT": ("auto", "tcp", "shm"),
    # Deprecated name, which sets SMDDP_TRANSPORT.
    "SMDDP_REQUIRE": ("", "tcp"),
}


def check(environment: Mapping[str, str]) -> None:
    """Raises ValueError for settings in `environment` that exclude encryption: libfabric, and so EFA, has none."""
    for name, values in _ACCEPTED.items():
        value = environment.get(name, values[0])
        if value not in values:
            raise ValueError(
                f"{_NAME}: environment has {name}={value}, and only tcp is encrypted: expected "
                f"{' or '.join(repr(each) for each in values)}; leave {name} out"
            )


def check_pods(environment: Mapping[str, str]) -> None:
    """Raises ValueError for a job in pods without a token file of a volume: the TrainJob would contain the token."""
    if _TOKEN not in environment:
        raise ValueError(
            f"{_NAME}: kubernetes would store the job token in the TrainJob, readable by others: let the runtime mount "
            f"a secret of 32 bytes or more in each pod, and give environment={{{_TOKEN!r}: PATH}}"
        )


def variables(folder: Folder) -> dict[str, str]:
    """Returns the settings of the ranks. Instances with EFA use tcp as well."""
    return {"SMDDP_ENCRYPT": "1", "SMDDP_TRANSPORT": "tcp", _TOKEN: str(folder.token)}


def write_token(folder: Folder) -> None:
    """Writes a random token, which the job's owner alone can read."""
    descriptor = os.open(folder.token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32) + "\n")
