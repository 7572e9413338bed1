"""What strangers cost a job: small and middle calls over tcp, with and without them, in turns.

    python bench/strangers.py [smddp-bench]

500 connections to the ranks' sockets stay open, half of them silent, half with twenty random bytes; 50 more a second
say up to 200 random bytes and end. Two ranks, a node each, make all_reduce meanwhile; results are checked.

Prints, for each size: medians of the turns with and without them in microseconds, their ratio, and wrong results.
"""

from __future__ import annotations

import glob
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import threading

TURNS = 7
# For one turn, which takes a few.
SECONDS = 120
STAYING, EACH = 500, 0.02
SIZES = ("-b", "8", "-e", "1M", "-f", "128", "-n", "3000", "-w", "200")
_LISTENS = "0A"


def doors(pids: list[str]) -> list[tuple[str, int]]:
    """Where these processes listen."""
    inodes = set()
    for path in (path for pid in pids for path in glob.glob(f"/proc/{pid}/fd/*")):
        try:
            inodes.update(re.findall(r"socket:\[(\d+)\]", os.readlink(path)))
        except OSError:
            continue
    found = set()
    with open("/proc/net/tcp") as table:
        for fields in (line.split() for line in table.readlines()[1:]):
            if fields[3] == _LISTENS and fields[9] in inodes:
                address, port = fields[1].split(":")
                found.add((socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)))
    return sorted(found)


def knock(job: subprocess.Popen, over: threading.Event, calls: list[int]) -> None:
    """Calls the ranks of that job until it is over."""
    there: list[tuple[str, int]] = []
    while not there and not over.wait(0.05):
        ranks = subprocess.run(["pgrep", "-P", str(job.pid)], capture_output=True, text=True).stdout.split()
        there = doors([str(job.pid), *ranks])
    stay = []
    while not over.is_set():
        try:
            stranger = socket.create_connection(there[calls[0] % len(there)], timeout=1)
            if len(stay) < STAYING:
                stay.append(stranger)
                stranger.send(os.urandom(20 * (calls[0] % 2)))
            else:
                stranger.send(os.urandom(calls[0] % 200))
                stranger.close()
                over.wait(EACH)
        except OSError:
            pass
        calls[0] += 1
    for stranger in stay:
        stranger.close()


def turn(bench: str, *, beside: bool) -> tuple[dict[str, tuple[float, str]], int]:
    """By size: microseconds of a call, and wrong results; and how many called."""
    command = [bench, "all_reduce", "--nproc", "2", *SIZES]
    job = subprocess.Popen(command, env={**os.environ, "SMDDP_SHM": "0"}, stdout=subprocess.PIPE, text=True)
    over, calls = threading.Event(), [0]
    strangers = threading.Thread(target=knock, args=(job, over, calls))
    if beside:
        strangers.start()
    try:
        said, _ = job.communicate(timeout=SECONDS)
    finally:
        over.set()
        job.kill()
    if beside:
        strangers.join()
    if job.returncode:
        sys.exit(f"{' '.join(command)} ended with status {job.returncode}")
    rows = [line.split() for line in said.splitlines()]
    return {row[0]: (float(row[5]), row[8]) for row in rows if row and row[0].isdigit()}, calls[0]


def main() -> None:
    bench = sys.argv[1] if len(sys.argv) > 1 else shutil.which("smddp-bench")
    if bench is None:
        sys.exit("no smddp-bench: install the wheel, or give its path")
    pairs = [(turn(bench, beside=False), turn(bench, beside=True)) for _ in range(TURNS)]
    print(f"{'size':>10} {'without':>10} {'beside':>10} {'ratio':>7}  wrong")
    for size in pairs[0][0][0]:
        without, beside = (statistics.median(pair[k][0][size][0] for pair in pairs) for k in (0, 1))
        wrong = ", ".join(sorted({pair[k][0][size][1] for pair in pairs for k in (0, 1)}))
        print(f"{size:>10} {without:>10.2f} {beside:>10.2f} {beside / without:>7.2f}  {wrong}")
    print(f"strangers a turn: {statistics.median(pair[1][1] for pair in pairs)}")


if __name__ == "__main__":
    main()
