"""One rank of a job that hangs in the situation of the first argument. Four ranks on two hosts."""

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.modules["torch"] = None  # type: ignore[assignment]

import numpy as np
import smddp

LIMIT = 100.0
SMALL, LARGE = np.ones(64, "float32"), np.ones(8 << 20, "uint8")


def read_batch() -> None:
    time.sleep(LIMIT)


class Rank:
    """A rank with its communicators: of the world, of its host, of its row (0 and 2, 1 and 3), and of ranks 1 and 2."""

    def __init__(self, world: smddp.Communicator) -> None:
        self.number, self.world = world.rank, world
        self.host = world.split(world.rank // 2)
        self.row = world.split(world.rank % 2)
        self.middle = world.split(1 if world.rank in (1, 2) else None)
        for comm in (world, self.host, self.row):
            comm.all_reduce(SMALL.copy())

    def late(self, *ranks: int) -> None:
        """The given ranks read a batch; all others call all_reduce."""
        read_batch() if self.number in ranks else self.world.all_reduce(SMALL.copy())

    def by_rank(self, *calls: Callable[[], object]) -> None:
        calls[self.number]()

    def reduce(self, comm: smddp.Communicator) -> Callable[[], object]:
        return lambda: comm.all_reduce(SMALL.copy())

    def recv(self, src: int | None) -> Callable[[], object]:
        return lambda: self.world.recv(SMALL.copy(), src)

    def send(self, dst: int) -> Callable[[], object]:
        return lambda: self.world.send(LARGE.copy(), dst)

    def wait_async(self) -> None:
        self.world.all_reduce(SMALL.copy(), async_op=True).wait()

    def wait_in_thread(self) -> None:
        thread = threading.Thread(target=self.reduce(self.world))
        thread.start()
        thread.join()


SITUATIONS: dict[str, Callable[[Rank], object]] = {
    "rank-0-in-user-code": lambda at: at.late(0),
    "rank-2-in-user-code": lambda at: at.late(2),
    "two-ranks-in-user-code": lambda at: at.late(1, 3),
    "three-ranks-in-user-code": lambda at: at.late(0, 1, 2),
    "stopped": lambda at: at.late(3),
    "cut": lambda at: at.late(3),
    "powered-off": lambda at: at.late(3),
    "late-in-a-sub-group": lambda at: at.by_rank(read_batch, at.reduce(at.row), read_batch, read_batch),
    "chain-over-groups": lambda at: at.by_rank(
        at.reduce(at.world), at.reduce(at.world), at.reduce(at.host), read_batch
    ),
    "chain-over-hosts": lambda at: at.by_rank(at.reduce(at.host), at.reduce(at.row), read_batch, read_batch),
    "deadlock-of-two-groups": lambda at: at.by_rank(
        at.reduce(at.host), at.reduce(at.row), at.reduce(at.row), at.reduce(at.host)
    ),
    "deadlock-of-two-ranks": lambda at: at.by_rank(read_batch, at.recv(2), at.reduce(at.middle), read_batch),
    "deadlock-of-recvs": lambda at: at.by_rank(at.recv(2), read_batch, at.recv(0), read_batch),
    "missing-recv": lambda at: at.by_rank(at.send(3), read_batch, read_batch, read_batch),
    "missing-send": lambda at: at.by_rank(read_batch, read_batch, read_batch, at.recv(0)),
    "missing-send-of-any-rank": lambda at: at.by_rank(read_batch, at.recv(None), read_batch, read_batch),
    "asynchronous": lambda at: at.wait_async() if at.number != 1 else read_batch(),
    "in-a-thread": lambda at: at.wait_in_thread() if at.number != 2 else read_batch(),
    "barrier": lambda at: at.world.barrier() if at.number != 3 else read_batch(),
    "split": lambda at: at.world.split(0) if at.number != 1 else read_batch(),
    "idle": lambda at: read_batch(),
}

if __name__ == "__main__":
    situation, folder = sys.argv[1], Path(sys.argv[2])
    world = smddp.init(timeout=LIMIT)
    rank = Rank(world)
    if rank.number == 0:
        (folder / "lab").write_text(f"{os.environ['NETLAB']}\n{os.environ['NETLAB_DIR']}")
    (folder / f"hangs{rank.number}").touch()
    SITUATIONS[situation](rank)
