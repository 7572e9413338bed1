"""The group that those who came make, and the paths that it would take."""

from __future__ import annotations

from smddp.tools.doctor.finding import Facts, Finding, fail, of_job, ok, warn

_SHOWN = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


@of_job("group")
def group(job: Facts) -> Finding:
    made = job.get("group")
    if made is None:
        return warn("none was made", "there is nobody to make it with", "see `ranks`")
    if made.get("error"):
        return fail(made["error"], "init_process_group fails the same way", "the lines that fail above say why")
    network = f"; {made['network']}" if made.get("network") else ""
    return ok(f"of {made['size']}, over {made['way']}, in {made['seconds']:.2g} s{network}")


@of_job("paths")
def paths(job: Facts) -> Finding:
    made = job.get("group") or {}
    found = made.get("paths") or {}
    if not found:
        return warn("none: there is no group", "what would be chosen is not known", "see `group`")
    return ok(
        "; ".join(f"{name} 4 KiB: {found[name][0]}, 64 MiB: {found[name][1]}" for name in _SHOWN if name in found)
    )
