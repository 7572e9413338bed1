"""Cost of unauthenticated connections: small and medium calls over tcp, with and without them, alternately.

    python bench/unauthenticated.py [smddp-bench]

500 connections to the ranks' sockets remain open, half of them silent, half after twenty random bytes. 50 more per
second send up to 200 random bytes and close. Two ranks on separate nodes call all_reduce; results are checked.

Prints for each size: medians of the rounds with and without them in microseconds, their ratio, and wrong results.
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

ROUNDS = 7
# Limit of one round.
SECONDS = 120
OPEN, PAUSE = 500, 0.02
SIZES = ("-b", "8", "-e", "1M", "-f", "128", "-n", "3000", "-w", "200")
_LISTENS = "0A"


def listeners(pids: list[str]) -> list[tuple[str, int]]:
    """Returns the addresses at which these processes listen."""
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


def connect(job: subprocess.Popen, over: threading.Event, calls: list[int]) -> None:
    """Connects to the ranks of the job until it is over."""
    addresses: list[tuple[str, int]] = []
    while not addresses and not over.wait(0.05):
        ranks = subprocess.run(["pgrep", "-P", str(job.pid)], capture_output=True, text=True).stdout.split()
        addresses = listeners([str(job.pid), *ranks])
    open_connections = []
    while not over.is_set():
        try:
            connection = socket.create_connection(addresses[calls[0] % len(addresses)], timeout=1)
            if len(open_connections) < OPEN:
                open_connections.append(connection)
                connection.send(os.urandom(20 * (calls[0] % 2)))
            else:
                connection.send(os.urandom(calls[0] % 200))
                connection.close()
                over.wait(PAUSE)
        except OSError:
            pass
        calls[0] += 1
    for connection in open_connections:
        connection.close()


def measure(bench: str, *, beside: bool) -> tuple[dict[str, tuple[float, str]], int]:
    """Returns microseconds per call and wrong results by size, and the number of connections."""
    command = [bench, "all_reduce", "--nproc", "2", *SIZES]
    job = subprocess.Popen(command, env={**os.environ, "SMDDP_NODE": "%r"}, stdout=subprocess.PIPE, text=True)
    over, calls = threading.Event(), [0]
    connector = threading.Thread(target=connect, args=(job, over, calls))
    if beside:
        connector.start()
    try:
        output, _ = job.communicate(timeout=SECONDS)
    finally:
        over.set()
        job.kill()
    if beside:
        connector.join()
    if job.returncode:
        sys.exit(f"{' '.join(command)} ended with status {job.returncode}")
    rows = [line.split() for line in output.splitlines()]
    return {row[0]: (float(row[5]), row[8]) for row in rows if row and row[0].isdigit()}, calls[0]


def main() -> None:
    bench = sys.argv[1] if len(sys.argv) > 1 else shutil.which("smddp-bench")
    if bench is None:
        sys.exit("no smddp-bench: install the wheel, or give its path")
    pairs = [(measure(bench, beside=False), measure(bench, beside=True)) for _ in range(ROUNDS)]
    print(f"{'size':>10} {'without':>10} {'beside':>10} {'ratio':>7}  wrong")
    for size in pairs[0][0][0]:
        without, beside = (statistics.median(pair[k][0][size][0] for pair in pairs) for k in (0, 1))
        wrong = ", ".join(sorted({pair[k][0][size][1] for pair in pairs for k in (0, 1)}))
        print(f"{size:>10} {without:>10.2f} {beside:>10.2f} {beside / without:>7.2f}  {wrong}")
    print(f"connections per round: {statistics.median(pair[1][1] for pair in pairs)}")


if __name__ == "__main__":
    main()
