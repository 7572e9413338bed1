"""numpy all_reduce: smddp.Communicator beside mpi4py, in the same processes, turn by turn; every result is checked.

    mpirun -np 2 python bench/arrays.py [--sizes 8 1024 65536 1048576 67108864] [--rounds 15] [--json FILE]

Rank 0 prints the median time of a call over all rounds of each library, their ratio, and wrong elements.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np
import smddp
from mpi4py import MPI


def iterations(nbytes: int) -> int:
    return max(3, min(2000, (64 << 20) // max(nbytes, 32 << 10)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 64, 1024, 8192, 65536, 1 << 20, 8 << 20, 64 << 20])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json")
    options = parser.parse_args()
    world = MPI.COMM_WORLD
    comm = smddp.init(timeout=120)
    rows = []
    if comm.rank == 0:
        print(f"# {comm.size} ranks, {comm.way}, {MPI.Get_library_version().split(',')[0]}, float32 sum, median us")
        print(f"{'bytes':>10} {'smddp':>10} {'mpi4py':>10} {'ratio':>7} {'wrong':>6}")
    for nbytes in options.sizes:
        given = (np.arange(nbytes // 4) % 1000 + comm.rank).astype("float32")
        right = sum((np.arange(nbytes // 4) % 1000 + rank).astype("float32") for rank in range(comm.size))
        out = np.empty_like(given)
        count, wrong = iterations(nbytes), 0
        calls = {
            "smddp": lambda given=given, out=out: comm.all_reduce(given, out=out),
            "mpi4py": lambda given=given, out=out: world.Allreduce(given, out),
        }
        times: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(options.rounds + 2):
            for name in calls if turn % 2 else reversed(calls):
                call = calls[name]
                out[:] = -1
                comm.barrier()
                begun = time.perf_counter()
                for _ in range(count):
                    call()
                took = time.perf_counter() - begun
                wrong += int((out != right).sum())
                if turn >= 2:
                    times[name].append(took / count * 1e6)
        slowest = comm.all_gather(np.array([statistics.median(times[name]) for name in calls])).max(axis=0)
        wrong = int(comm.all_reduce(np.array([wrong]))[0])
        if comm.rank == 0:
            smddp_us, mpi_us = (float(value) for value in slowest)
            rows.append({"bytes": nbytes, "smddp": smddp_us, "mpi4py": mpi_us, "wrong": wrong})
            print(f"{nbytes:>10} {smddp_us:>10.2f} {mpi_us:>10.2f} {smddp_us / mpi_us:>7.2f} {wrong:>6}", flush=True)
    if comm.rank == 0 and options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)
    comm.close()


if __name__ == "__main__":
    main()
