"""One rank process in a host of the lab: connects to the test's socket and runs the received cases."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
from multiprocessing.connection import Connection
from pathlib import Path

TESTS = Path(__file__).parents[1]


def main(address: str) -> None:
    sys.path[:0] = [str(TESTS), str(TESTS / "clients")]
    slot = int(os.environ["RANK"])
    stacks = os.open(f"{os.path.dirname(address)}/stacks{slot}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    with socket.socket(socket.AF_UNIX) as unix:
        unix.connect(address)
        pipe = Connection(os.dup(unix.fileno()))

    import torch
    import torch.distributed as dist
    from backend.ranks import BACKEND, init, run_case

    torch.set_num_threads(1)
    # The tests' end closes the pipe; this also makes known that torch is there.
    pipe.send(slot)
    open_store = None
    while True:
        try:
            kind, rank, size, store, module, name = pipe.recv()
        except (EOFError, ConnectionResetError):
            return
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
        if store != open_store and dist.is_initialized():
            dist.destroy_process_group()
        if kind == "client":
            from ranks import perform

            pipe.send((perform(rank, size, BACKEND, module, name, store, {}), None))
        else:
            if store != open_store:
                init(store, rank, size)
            pipe.send(run_case(module, name))
        open_store = store


if __name__ == "__main__":
    main(sys.argv[1])
