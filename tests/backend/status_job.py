"""One rank of a job in which rank LATE reads a batch until a file appears, and all others wait for it.

Arguments: the folder of the files, and the time limit of the job in seconds.
"""

import os
import sys
import time
from pathlib import Path

sys.modules["torch"] = None  # type: ignore[assignment]

import numpy as np
import smddp

LATE = 3


def read_batch(go: Path, seconds: float) -> None:
    until = time.monotonic() + seconds
    while not go.exists() and time.monotonic() < until:
        time.sleep(0.01)


def main(comm: smddp.Communicator, folder: Path, seconds: float) -> None:
    data = np.ones(100, "float32")
    half = comm.split(comm.rank % 2)
    for communicator in (half, comm):
        communicator.all_reduce(data)
    (folder / f"pid{comm.rank}").write_text(str(os.getpid()))
    if comm.rank == LATE:
        read_batch(folder / "go", seconds)
    comm.all_reduce(data)


if __name__ == "__main__":
    limit = float(sys.argv[2])
    with smddp.init(timeout=limit) as communicator:
        main(communicator, Path(sys.argv[1]), limit)
