"""Check of the TCP connections between nodes, from the kernel's statistics after the measurement of the pairs."""

from __future__ import annotations

from typing import Any

from smddp.observability import links as measured
from smddp.tools.doctor.finding import Facts, Finding, of_job, ok, warn

_SHOWN = 4
# Bytes of a usual TCP segment, and the share of retransmitted segments from which a link is reported.
_SEGMENT = 1448
_LOST = 0.01


def _range(values: list[float]) -> str:
    low, high = f"{min(values):.3g}", f"{max(values):.3g}"
    return low if low == high else f"{low} to {high}"


def _lossy(job: Facts, links: list[tuple[str, int, Any]]) -> list[str]:
    """Describes the connections with many retransmitted segments."""
    found = []
    for host, rank, link in links:
        sent = max(link["sent_bytes"] // _SEGMENT, 1)
        if link["retransmits"] > _LOST * sent and link["sent_bytes"] >= measured.FEWEST_BYTES:
            peer = job["present"][link["peer"]]["identity"]["host"]
            found.append(
                f"rank {rank} (host {host}) to rank {link['peer']} (host {peer}): {link['retransmits']} of {sent} "
                "segments retransmitted"
            )
    return found


@of_job("links")
def links(job: Facts) -> Finding:
    reports = job.get("links")
    if reports is None:
        return warn("not read: no group was created", "the links are unknown", "see `group`")
    groups = [(one, group) for one in reports for group in one["groups"]]
    found = [(one["host"], group["rank"], link) for one, group in groups for link in group["links"]]
    if not found:
        return ok("no TCP connection between nodes")
    slow, lossy = measured.slow(reports), _lossy(job, found)
    if slow or lossy:
        text = "; ".join([*map(str, slow[:_SHOWN]), *lossy[:_SHOWN]])
        more = max(len(slow) - _SHOWN, 0) + max(len(lossy) - _SHOWN, 0)
        return warn(
            text + (f"; and {more} more" if more else ""),
            "collectives between nodes wait for their slowest link",
            "check the errors of these hosts' interfaces (ip -s link, ethtool -S), their MTU and their load",
        )
    trips = [link["min_rtt_us"] for _, _, link in found if link["min_rtt_us"] is not None]
    ratios = [ratio for _, group in groups for ratio in measured.ratios(group).values()]
    parts = [f"{len(found)} TCP connection{'s'[: len(found) > 1]}"]
    parts += [f"round trip {_range(trips)} us"] if trips else []
    parts += [f"measured/estimated time {_range(ratios)}"] if ratios else []
    lost = sum(link["retransmits"] for _, _, link in found)
    sent = sum(link["sent_bytes"] for _, _, link in found) // _SEGMENT
    return ok(", ".join([*parts, f"{lost} of {sent} segments retransmitted"]))
