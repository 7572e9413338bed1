"""Checks of process limits: descriptors, memory, processors."""

from __future__ import annotations

import math

from smddp.text import format_size as size
from smddp.tools.doctor.finding import Facts, Finding, fail, of_rank, ok, warn

# Descriptors of a single process: interpreter, torch, store, data loaders.
_OWN_FILES = 64
# Two connections to each other rank.
_FILES_OF_A_PEER = 2
# Bytes mapped by an interpreter.
_OWN_SPACE_WITHOUT_TORCH = 512 << 20
# Values of crates/smddp-process/src: layout.rs and room.rs.
_CONTROL = 256 << 20
_LEAST_RESERVE = 32 << 20


def staging(facts: Facts) -> int:
    """Returns the bytes of staging memory that one rank may use."""
    return int(facts["core"].get("staging_cap") or 64 << 20)


@of_rank("open files")
def open_files(facts: Facts) -> Finding:
    limit, ranks = facts["limits"]["open files"], facts["launch"]["size"]
    need = _OWN_FILES + _FILES_OF_A_PEER * ranks
    found = f"{'no limit' if limit is None else limit}; a rank of {ranks} may need about {need}"
    if limit is not None and limit < need:
        return fail(
            found,
            "`Too many open files`: connections to other ranks and opening data fail",
            f"ulimit -n {max(need, 65536)} before the launcher (LimitNOFILE= of a service, --ulimit nofile= of docker)",
        )
    return ok(found)


def _least(facts: Facts) -> int:
    """Returns the minimum bytes of a rank's shared memory."""
    return _CONTROL + staging(facts) + _LEAST_RESERVE


@of_rank("address space")
def address_space(facts: Facts) -> Finding:
    limit, local = facts["limits"]["address space"], facts["launch"]["local size"]
    if limit is None:
        return ok("no limit")
    # A rank maps the memory of all ranks of its node and leaves half of the address space to the program.
    least = 2 * local * _least(facts)
    found = f"limited to {size(limit)} (ulimit -v)"
    remedy = "ulimit -v unlimited"
    if limit < _OWN_SPACE_WITHOUT_TORCH + least:
        means = "ranks of a node reach each other over the network, which is slower, or no group is made"
        return fail(f"{found}; {local} ranks need {size(least)} more to share memory", means, remedy)
    means = "ranks reserve less shared memory, for smddp.empty and for calls at once; an allocation may fail later"
    return warn(found, means, remedy)


@of_rank("file size")
def file_size(facts: Facts) -> Finding:
    limit = facts["limits"]["file size"]
    if limit is None:
        return ok("no limit")
    found, remedy = f"limited to {size(limit)} (ulimit -f); shared memory counts as a file", "ulimit -f unlimited"
    if limit < _least(facts):
        return fail(found, "ranks of a node reach each other over the network, which is slower", remedy)
    return warn(found, "ranks reserve less shared memory: less room for smddp.empty; checkpoints may not fit", remedy)


@of_rank("locked memory")
def locked_memory(facts: Facts) -> Finding:
    limit = facts["limits"]["locked memory"]
    found = "no limit" if limit is None else f"{size(limit)} (ulimit -l)"
    way = str(facts["core"].get("between_nodes", ""))
    if "fabric: efa" not in way and not any("uverbs" in device for device in facts["devices"]):
        return ok(f"{found}; what is used here locks none")
    if limit is not None and limit < staging(facts):
        return fail(
            f"{found}; a fabric registers up to {size(staging(facts))} of a rank",
            "the fabric's memory registration fails",
            "ulimit -l unlimited (LimitMEMLOCK=infinity of the launcher's service, --ulimit memlock=-1 of docker)",
        )
    return ok(found)


@of_rank("processors")
def processors(facts: Facts) -> Finding:
    found, local = facts["processors"], facts["launch"]["local size"]
    shown = f"{found['usable']} of {found['all']} usable for {local} rank{'s' * (local > 1)} of this host"
    quota = found["quota"]
    if quota is not None:
        shown += f", of which the cgroup's quota grants {quota:g}"
    if quota is not None and quota < local:
        return fail(
            shown,
            "the kernel stops ranks for tens of milliseconds at a time, and every call waits for those it stopped",
            f"give the container {local} processors or more (--cpus, resources.limits.cpu), or start "
            f"{math.floor(quota) or 1} of them",
        )
    if found["usable"] < local:
        return warn(
            shown,
            "ranks take turns on a processor: waits sleep instead of spinning, and small calls take longer",
            f"start {found['usable']} ranks on this host, or let them use {local} processors (cpuset, taskset)",
        )
    return ok(shown)
