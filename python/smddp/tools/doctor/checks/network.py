"""Checks of interfaces, names and fabrics."""

from __future__ import annotations

import ipaddress
import re

from smddp.text import named_ranks
from smddp.tools.doctor.finding import Facts, Finding, fail, of_job, of_rank, ok, warn

_NOTHING = "nothing: "
_LOOPBACK_WAY = "other hosts cannot reach it"


def hosts(job: Facts) -> set[tuple[str, str]]:
    """Returns the network stacks: each has a separate loopback interface."""
    identities = (facts["identity"] for facts in job["present"].values())
    return {(identity["boot"], identity["network namespace"]) for identity in identities}


@of_rank("interfaces")
def interfaces(facts: Facts) -> Finding:
    way, there = str(facts["core"].get("between_nodes", "")), str(facts["core"].get("interfaces", ""))
    if not facts["core"]:
        return warn("not checked: a setting is invalid", "see `settings`", "correct the setting first")
    if way.startswith(_NOTHING):
        chosen = facts["settings"].get("SMDDP_TRANSPORT", {}).get("value")
        if chosen == "shm":
            return ok(f"{way.removeprefix(_NOTHING)}; it has {there}")
        if "libfabric" in way.lower():
            return ok("not checked: see `libfabric`")
        return fail(
            way.removeprefix(_NOTHING),
            "ranks of different nodes cannot reach each other",
            "name an interface that is up in SMDDP_SOCKET_IFNAME, or unset what names one (NCCL's, gloo's)",
        )
    if "fabric: " in way:
        return ok(way)
    others = []
    for name, state in re.findall(r"(\S+) \(([^)]*)\)", there):
        if f" {name} " not in way.partition("(")[0]:
            why = "loopback" if name == "lo" else state if state in ("down", "no address") else "comes after"
            others.append(f"{name}: {why}")
    return ok(f"{way}{'; not ' if others else ''}{', '.join(others)}")


@of_rank("libfabric")
def libfabric(facts: Facts) -> Finding:
    lines = facts["libfabric"]
    if lines is None:
        return warn("not checked", "see `settings`", "correct the setting first")
    shown = "; ".join(lines)
    setting = {name: row["value"] for name, row in facts["settings"].items() if row["from"] == "environment"}
    asked = [
        f"{name}={setting[name]}"
        for name, tcp in (
            ("SMDDP_TRANSPORT", ("auto", "tcp", "shm")),
            ("SMDDP_LIBFABRIC", ()),
        )
        if setting.get(name) and setting[name].lower() not in tcp
    ]
    devices = [device for device in facts["devices"] if "uverbs" in device]
    if shown.startswith("none: ") and (asked or devices):
        return fail(
            f"{', '.join(asked or devices)}, but {shown.removeprefix('none: ')}",
            "no group over several nodes is made" if asked else "nodes use sockets, which are slower than their fabric",
            "install libfabric with that provider (on EC2: aws-efa-installer), or unset the setting",
        )
    return ok(shown)


def _loopback(addresses: list[str]) -> bool:
    return bool(addresses) and all(ipaddress.ip_address(text.partition("%")[0]).is_loopback for text in addresses)


@of_job("names")
def names(job: Facts) -> Finding:
    present, several = job["present"], len(hosts(job)) > 1
    known = {}
    for rank, facts in present.items():
        place, own = facts["meeting place"], facts["host name"]
        if place and place["error"]:
            return fail(
                f"MASTER_ADDR {place['name']} on {named_ranks([rank])}: {place['error']}",
                "that rank cannot connect: init_process_group times out",
                "name the first host by an address, or add it to /etc/hosts everywhere",
            )
        if place and several and _loopback(place["addresses"]) and rank != min(present):
            return fail(
                f"MASTER_ADDR {place['name']} is {', '.join(place['addresses'])} on {named_ranks([rank])} "
                f"({facts['identity']['host']})",
                "that rank connects to itself instead of the first host",
                "name the first host by an address that all hosts reach; check /etc/hosts for a line with 127.*",
            )
        known[own["name"]] = (rank, own)
    for rank, own in known.values():
        if several and (own["error"] or _loopback(own["addresses"])):
            return warn(
                f"{own['name']} ({named_ranks([rank])}) is {own['error'] or ', '.join(own['addresses'])} there",
                "smddp goes by interfaces, but gloo and torchrun (`--rdzv-endpoint` by name) cannot connect through it",
                "map the name to the host's address in /etc/hosts, or set GLOO_SOCKET_IFNAME and --local-addr",
            )
    shown = [f"{own['name']} is {', '.join(own['addresses']) or own['error']}" for _, own in list(known.values())[:4]]
    only = any(_loopback(own["addresses"]) for _, own in known.values())
    return ok(f"{'; '.join(shown)}{' (sufficient for one host)' if only else ''}")


@of_job("loopback")
def loopback(job: Facts) -> Finding:
    present = job["present"]
    affected = [r for r, facts in present.items() if _LOOPBACK_WAY in str(facts["core"].get("between_nodes", ""))]
    if not affected:
        return ok("no rank uses it")
    if len(hosts(job)) == 1:
        return ok("the only interface here: sufficient for one host")
    return fail(
        f"{named_ranks(affected)}: {present[affected[0]]['core']['between_nodes']}",
        "other hosts cannot reach these ranks",
        "name the interface between the hosts in SMDDP_SOCKET_IFNAME; in a container, give it the host's network",
    )
