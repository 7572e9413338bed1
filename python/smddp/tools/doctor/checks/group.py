"""Checks of the group of the present ranks and of its paths."""

from __future__ import annotations

from smddp.tools.doctor.finding import Facts, Finding, fail, of_job, ok, warn

_SHOWN = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


@of_job("group")
def group(job: Facts) -> Finding:
    made = job.get("group")
    if made is None:
        return warn("not created", "no other rank is present", "see `ranks`")
    if made.get("error"):
        return fail(made["error"], "init_process_group fails the same way", "see the failures above")
    network = f"; {made['network']}" if made.get("network") else ""
    return ok(f"of {made['size']}, over {made['way']}, in {made['seconds']:.2g} s{network}")


@of_job("paths")
def paths(job: Facts) -> Finding:
    made = job.get("group") or {}
    found = made.get("paths") or {}
    if not found:
        return warn("none: no group was created", "the paths are unknown", "see `group`")
    return ok(
        "; ".join(f"{name} 4 KiB: {found[name][0]}, 64 MiB: {found[name][1]}" for name in _SHOWN if name in found)
    )
