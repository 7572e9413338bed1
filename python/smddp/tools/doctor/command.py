"""Command line of `smddp doctor`: options, text or JSON output, exit status."""

from __future__ import annotations

import argparse
import errno
import json
import os
import sys
import time
from dataclasses import asdict
from typing import Any

from smddp import command_line, files
from smddp.tools.doctor import checks as _checks  # registers them
from smddp.tools.doctor import heatmap, launch, report, session
from smddp.tools.doctor.finding import FAIL, Finding, evaluate, fail
from smddp.tools.doctor.rendezvous import Client, ConnectionLost, Server

assert _checks

_ANYWHERE = "0.0.0.0"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--quick", action="store_true", help="skip the measurements")
    parser.add_argument("--svg", type=command_line.path, metavar="FILE", help="draw a heat map of the pairs")
    parser.add_argument(
        "--wait", type=command_line.seconds, default=20.0, metavar="SECONDS", help="time to wait for late ranks (20)"
    )
    parser.add_argument("--by-doctor", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("-n", "--ranks", type=int, help="processes to start here, without a launcher (2 to 4)")


def run(given: argparse.Namespace, columns: int) -> int:
    """Returns the exit status: 0 all checks pass, 1 a check fails, 2 the launcher's variables are invalid.

    Ranks other than 0 print nothing, unless they cannot reach rank 0; they then return 1.
    """
    try:
        found = launch.launched(given.by_doctor)
    except ValueError as error:
        print(f"smddp doctor: {error}", file=sys.stderr)
        return 2
    options = session.Options(given.wait, given.quick)
    if sys.stderr.isatty() and (found is None or found.rank == 0):
        options = session.Options(given.wait, given.quick, _show_step)
    if found is not None and found.rank > 0:
        try:
            session.other_rank(found, options, Client(found.host, found.port, options.wait))
        except ConnectionLost as error:
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
    return _first(here, found is None, options, given, columns)


def _check_svg(given: argparse.Namespace) -> None:
    """Checks the --svg file before the measurements."""
    if given.quick:
        raise ValueError("--svg draws what is measured: leave out --quick")
    try:
        files.check_writable(given.svg)
    except OSError as error:
        raise ValueError(f"--svg {given.svg}: {error.strerror}") from None


def _first(here: launch.Launch, starts: bool, options: session.Options, given: argparse.Namespace, columns: int) -> int:
    begun = time.monotonic()
    children: list[Any] = []
    try:
        server = _listen(here)
        if starts:
            arguments = [*(["--quick"] if given.quick else []), "--wait", str(given.wait)]
            children = launch.start(here, server.port, arguments)
        # The other ranks connect to the same address; this rank is on the server's host.
        own = str(server.server_address[0])
        client = Client("127.0.0.1" if own == _ANYWHERE else own, server.port, options.wait)
        job = session.rank_zero(here, options, client)
        findings = evaluate(job)
    except (OSError, ConnectionLost) as error:
        job = {"present": {}, "pairs": None, "group": None, "size": here.size}
        means = "the doctor's ranks cannot reach rank 0; a job's ranks could not either"
        finding = fail(str(error), means, "resolve the error above; another job may use the port")
        findings = [Finding(**{**asdict(finding), "name": "ranks"})]
    finally:
        options.step("")
        launch.end(children, session.ENDING)
    _report(job, findings, time.monotonic() - begun, given, columns)
    return 1 if any(finding.status == FAIL for finding in findings) else 0


def _show_step(text: str) -> None:
    """Replaces the line of the current step on the terminal; an empty text clears it."""
    sys.stderr.write(f"\r\x1b[K{text and f'smddp doctor: {text}'}")
    sys.stderr.flush()


def _listen(here: launch.Launch) -> Server:
    """Listens at the rendezvous address, or on all interfaces if this host does not have that address."""
    try:
        return Server(here.host, here.port, here.size)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise OSError(f"cannot bind the rendezvous address {here.host}:{here.port}: {error}") from None
        return Server(_ANYWHERE, here.port, here.size)


def _report(job: dict[str, Any], findings: list[Finding], took: float, given: argparse.Namespace, columns: int) -> None:
    present, rows = job["present"], (job["pairs"] or {}).get("rows", [])
    if given.svg and not rows:
        print(f"smddp doctor: --svg {given.svg} is not written: no pair of ranks was measured", file=sys.stderr)
    if given.svg and rows:
        nodes, ranks = job["group"]["nodes"], list(present)
        place = {rank: at for at, rank in enumerate(ranks)}
        placed = [{**row, "ranks": [place[rank] for rank in row["ranks"]]} for row in rows]
        hosts = [present[rank]["identity"]["host"] for rank in ranks]
        try:
            files.write_text(given.svg, heatmap.drawn(placed, nodes, hosts))
        except OSError as error:
            print(f"smddp doctor: --svg {given.svg}: {error.strerror}", file=sys.stderr)
    if given.json:
        about = [
            {"rank": rank, "host": facts["identity"]["host"], "pid": facts["pid"]} for rank, facts in present.items()
        ]
        each = [asdict(finding) for finding in findings]
        summary = {"verdict": report.verdict(findings), "seconds": round(took, 2), "size": job["size"], "ranks": about}
        print(json.dumps({**summary, "findings": each, "pairs": rows}, indent=2))
        return
    hosts = sorted({facts["identity"]["host"] for facts in present.values()})
    head = f"smddp doctor: {len(present)} of {job['size']} ranks, "
    head += f"{len(hosts)} host{'s' * (len(hosts) != 1)}, {took:.1f} s"
    text = report.lines(head, findings, len(present), columns)
    if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        text = report.coloured(text)
    print("\n".join(text))
