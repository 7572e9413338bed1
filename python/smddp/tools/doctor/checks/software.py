"""Checks of the installation and its settings."""

from __future__ import annotations

from smddp.tools.doctor.finding import Facts, Finding, fail, of_rank, ok, warn


@of_rank("settings")
def settings(facts: Facts) -> Finding:
    if facts["problems"]:
        return fail("; ".join(facts["problems"]), "no group can be made", "set it as described, or unset it")
    given = [f"{name}={row['value']}" for name, row in facts["settings"].items() if row["from"] == "environment"]
    if facts["unknown settings"]:
        return warn(
            f"{', '.join(facts['unknown settings'])}: unknown setting",
            "the variable has no effect",
            "`smddp info` lists all names",
        )
    return ok(", ".join(given) or "all have their defaults")


@of_rank("installation")
def installation(facts: Facts) -> Finding:
    if facts["historic"] != "not installed":
        return fail(facts["historic"], "an import may find the other package's files", "uninstall it")
    return ok("no other package at the same paths")


@of_rank("threads")
def threads(facts: Facts) -> Finding:
    threads, local = facts["environment"].get("OMP_NUM_THREADS"), facts["launch"]["local size"]
    # Ranks of a launcher compute; ranks that the doctor started do not.
    by_launcher = "LOCAL_WORLD_SIZE" in facts["environment"] and not facts["launch"].get("by doctor")
    if threads is None and local > 1 and facts["torch"] and by_launcher:
        share = max(facts["processors"]["usable"] // local, 1)
        return warn(
            f"OMP_NUM_THREADS is not set, with {local} ranks on this host",
            "each rank starts a thread for every processor, and they take turns",
            f"export OMP_NUM_THREADS={share}",
        )
    return ok(f"OMP_NUM_THREADS={threads}" if threads else "OMP_NUM_THREADS is not set")
