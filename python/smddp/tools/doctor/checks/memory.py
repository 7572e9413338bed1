"""Checks of the memory of the machine and of the container."""

from __future__ import annotations

from smddp.text import format_size as size
from smddp.tools.doctor.checks.limits import staging
from smddp.tools.doctor.finding import Facts, Finding, fail, of_rank, ok, warn

_ONE_GIB = 1 << 30
# Bytes of an interpreter with torch loaded.
_PROCESS = 256 << 20


@of_rank("memory limit")
def memory_limit(facts: Facts) -> Finding:
    limit, local = facts["memory"]["cgroup"], facts["launch"]["local size"]
    if limit is None:
        return ok(f"none for the cgroup; the machine has {size(facts['memory']['machine'] or 0)}")
    need = local * (staging(facts) + _PROCESS)
    found = f"{size(limit)} for the cgroup; {local} rank{'s' * (local > 1)} of smddp alone may use {size(need)}"
    if limit < need:
        return fail(
            found,
            "the kernel kills a rank (`Killed`), and the others get PeerLostError",
            f"give the container {size(need)} or more (--memory, resources.limits.memory){_smaller(limit, local)}",
        )
    return ok(found)


def _smaller(limit: int, local: int) -> str:
    """Returns the alternative remedy: staging memory that fits into the limit."""
    share = (limit // local - _PROCESS) >> 20 << 20
    return f", or set SMDDP_STAGING_BYTES={share} on all ranks" if share > 0 else ""


@of_rank("/dev/shm")
def dev_shm(facts: Facts) -> Finding:
    """smddp shares memory by memfd; torch's DataLoader workers go through /dev/shm."""
    total, free = facts["memory"]["/dev/shm"], facts["memory"]["/dev/shm free"]
    means = "smddp uses none of it, but DataLoader workers die with `Bus error` or `No space left on device`"
    if total is None:
        return warn("it does not exist", means, "mount a tmpfs there")
    if total < _ONE_GIB or free < total // 10:
        return warn(f"{size(total)}, {size(free)} free", means, "--shm-size=8g of docker, or remove files from it")
    return ok(f"{size(total)}, {size(free)} free; smddp uses none of it")


@of_rank("huge pages")
def huge_pages(facts: Facts) -> Finding:
    kernel = facts["kernel"]
    return ok(
        f"transparent: {kernel['transparent huge pages'] or 'not known'}; set aside: {kernel['huge pages'] or 0}; "
        "smddp needs none"
    )
