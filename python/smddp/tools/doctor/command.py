"""`smddp doctor`: arguments in, text or JSON out, an exit status."""

from __future__ import annotations

import argparse
import errno
import json
import sys
import time
from dataclasses import asdict
from typing import Any

from smddp import files, validation
from smddp.tools.doctor import checks as _checks  # registers them
from smddp.tools.doctor import heatmap, launch, report, session
from smddp.tools.doctor.finding import FAIL, Finding, fail, judge
from smddp.tools.doctor.rendezvous import Client, Lost, Server

assert _checks

_ANYWHERE = "0.0.0.0"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument("--json", action="store_true", help="the same for programs")
    parser.add_argument("--quick", action="store_true", help="no measurements")
    parser.add_argument("--svg", metavar="FILE", help="draw a heat map of the pairs")
    parser.add_argument(
        "--wait", type=validation.seconds, default=20.0, metavar="SECONDS", help="for ranks that come late (20)"
    )
    parser.add_argument("--by-doctor", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("-n", "--ranks", type=int, help="processes to start here, without a launcher (2 to 4)")


def run(given: argparse.Namespace, columns: int) -> int:
    """The exit status: 0 nothing fails, 1 something does, 2 the variables of a launcher make no sense.

    On all ranks but the first it prints nothing unless it finds nobody, and then returns 1.
    """
    try:
        found = launch.launched(given.by_doctor)
    except ValueError as error:
        print(f"smddp doctor: {error}", file=sys.stderr)
        return 2
    wishes = session.Wishes(given.wait, given.quick)
    if found is not None and found.rank > 0:
        try:
            session.other_rank(found, wishes, Client(found.host, found.port, wishes.wait))
        except Lost as error:
            print(f"smddp doctor: rank {found.rank}: {error}", file=sys.stderr)
            return 1
        return 0
    try:
        here = found or launch.alone(given.ranks)
        if given.svg:
            _check_svg(given)
    except ValueError as error:
        print(f"smddp doctor: {error}", file=sys.stderr)
        return 2
    return _first(here, found is None, wishes, given, columns)


def _check_svg(given: argparse.Namespace) -> None:
    """Before the measurements, of which the file is the result."""
    if given.quick:
        raise ValueError("--svg draws what is measured: leave out --quick")
    try:
        files.check_writable(given.svg)
    except OSError as error:
        raise ValueError(f"--svg {given.svg}: {error.strerror}") from None


def _first(here: launch.Launch, starts: bool, wishes: session.Wishes, given: argparse.Namespace, columns: int) -> int:
    begun = time.monotonic()
    children: list[Any] = []
    try:
        server = _listening(here)
        if starts:
            options = [*(["--quick"] if given.quick else []), "--wait", str(given.wait)]
            children = launch.start(here, server.port, options)
        # The others come by the same address; this rank is next to its server.
        own = str(server.server_address[0])
        client = Client("127.0.0.1" if own == _ANYWHERE else own, server.port, wishes.wait)
        job = session.rank_zero(here, wishes, client)
        findings = judge(job)
    except (OSError, Lost) as error:
        job = {"came": {}, "pairs": None, "group": None, "size": here.size}
        means = "the doctor's ranks cannot meet, nor could a job's"
        finding = fail(str(error), means, "see the message; another job may use the port")
        findings = [Finding(**{**asdict(finding), "name": "ranks"})]
    finally:
        launch.end(children, session.ENDING)
    _tell(job, findings, time.monotonic() - begun, given, columns)
    return 1 if any(finding.status == FAIL for finding in findings) else 0


def _listening(here: launch.Launch) -> Server:
    """Listens at the rendezvous address only; on every interface if this host knows that address by another name."""
    try:
        return Server(here.host, here.port, here.size)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise OSError(f"listening at {here.host}:{here.port}, where the ranks meet: {error}") from None
        return Server(_ANYWHERE, here.port, here.size)


def _tell(job: dict[str, Any], findings: list[Finding], took: float, given: argparse.Namespace, columns: int) -> None:
    came, rows = job["came"], (job["pairs"] or {}).get("rows", [])
    if given.svg and not rows:
        print(f"smddp doctor: --svg {given.svg} is not written: no pair of ranks was measured", file=sys.stderr)
    if given.svg and rows:
        nodes, ranks = job["group"]["nodes"], list(came)
        place = {rank: at for at, rank in enumerate(ranks)}
        placed = [{**row, "ranks": [place[rank] for rank in row["ranks"]]} for row in rows]
        hosts = [came[rank]["identity"]["host"] for rank in ranks]
        try:
            files.write_text(given.svg, heatmap.drawn(placed, nodes, hosts))
        except OSError as error:
            print(f"smddp doctor: --svg {given.svg}: {error.strerror}", file=sys.stderr)
    if given.json:
        about = [{"rank": rank, "host": facts["identity"]["host"], "pid": facts["pid"]} for rank, facts in came.items()]
        each = [asdict(finding) for finding in findings]
        told = {"verdict": report.verdict(findings), "seconds": round(took, 2), "size": job["size"], "ranks": about}
        print(json.dumps({**told, "findings": each, "pairs": rows}, indent=2))
        return
    hosts = sorted({facts["identity"]["host"] for facts in came.values()})
    head = f"smddp doctor: {len(came)} of {job['size']} ranks, {len(hosts)} host{'s' * (len(hosts) != 1)}, {took:.1f} s"
    print("\n".join(report.lines(head, findings, len(came), columns)))
