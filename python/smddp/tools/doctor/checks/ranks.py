"""Checks for missing ranks and for differences between the present ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from smddp.text import named_ranks
from smddp.tools.doctor.finding import Facts, Finding, fail, of_job, ok, warn


def _parted(present: dict[int, Facts], of: Callable[[Facts], Any]) -> str:
    """ "0.1.0 (ranks 0-2), 0.2.0 (rank 3)" where the ranks differ, "" where they do not."""
    values: dict[str, list[int]] = {}
    for rank, facts in present.items():
        values.setdefault(str(of(facts)), []).append(rank)
    parts = [f"{value or 'empty'} ({named_ranks(ranks)})" for value, ranks in values.items()]
    return ", ".join(parts) if len(parts) > 1 else ""


@of_job("ranks")
def ranks(job: Facts) -> Finding:
    missing, size = job["missing"], job["size"]
    hosts = sorted({facts["identity"]["host"] for facts in job["present"].values()})
    shown = f"{', '.join(hosts[:8])}{', ...' if len(hosts) > 8 else ''}"
    if not missing:
        return ok(f"all {size} present, on {shown}" if size > 1 else f"one, on {shown}")
    why = f": {job['why missing']}" if job.get("why missing") else ""
    return fail(
        f"{named_ranks(missing)} of {size} did not start within {job['waited']:g} s{why}; the others are on {shown}",
        "init_process_group waits for them until its timeout; the other checks cover the present ranks",
        "check its log: did it start (the same --nnodes and --nproc-per-node on every host), does its Python find "
        "smddp, and does its host reach MASTER_ADDR:MASTER_PORT and the port above",
    )


@of_job("versions")
def versions(job: Facts) -> Finding:
    present = job["present"]
    if apart := _parted(present, lambda facts: facts["version"]):
        return fail(f"smddp {apart}", "ranks of different versions reject each other", "install one version everywhere")
    for what in ("torch", "python"):
        if apart := _parted(present, lambda facts: facts[what]):  # noqa: B023
            return warn(f"{what} {apart}", "their results may differ", "install one version everywhere")
    facts = next(iter(present.values()))
    return ok(f"smddp {facts['version']}, torch {facts['torch'] or 'not installed'}, Python {facts['python']}")


@of_job("settings between ranks")
def settings(job: Facts) -> Finding:
    present = job["present"]
    every = sorted({name for facts in present.values() for name in facts["settings"]})
    apart = {name: _parted(present, lambda facts: facts["settings"].get(name, {}).get("value")) for name in every}  # noqa: B023
    apart = {name: text for name, text in apart.items() if text}
    shown = "; ".join(f"{name}: {text}" for name, text in apart.items())
    # The core rejects a group if a setting differs that all ranks must share.
    refused = (job.get("group") or {}).get("error") or ""
    if any(f"{name} differs" in refused for name in apart):
        return fail(shown, "these ranks reject each other: no group is created", "give all ranks the same environment")
    return ok(
        f"permitted differences: {shown}" if shown else "the same on all ranks" if len(present) > 1 else "one rank"
    )


@of_job("nodes")
def nodes(job: Facts) -> Finding:
    """Checks for ranks of one machine that cannot share memory."""
    present = job["present"]
    machines: dict[str, list[int]] = {}
    for rank, facts in present.items():
        machines.setdefault(facts["identity"]["boot"], []).append(rank)
    for group in machines.values():
        here = {rank: present[rank] for rank in group}
        for what, do in (
            ("user", "run them as one user"),
            ("network namespace", "run them in one container, or containers of one network namespace (`--net=host`)"),
        ):
            if apart := _parted(here, lambda facts: facts["identity"][what]):  # noqa: B023
                return warn(
                    f"ranks of one machine have different values of {what}: {apart}",
                    "they cannot share memory, count as different nodes and use the network, which is slower",
                    do,
                )
    count = len(set((job.get("group") or {}).get("nodes") or ())) or len(machines)
    return ok(f"{len(present)} rank{'s' * (len(present) > 1)} on {count} node{'s' * (count > 1)}")
