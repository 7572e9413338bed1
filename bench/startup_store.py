"""Store requests at the start of a group: those of N ranks, replayed against torch's TCPStore.

    python bench/startup_store.py 1024 8192

A few processes with a few connections each make the requests of all ranks. Each rank sets its address, checks
for its parent's, reads it, checks twice for a failure report, and deletes its own, as the core does when all ranks
are in time. `--all` replays the alternative: every rank reads every rank's information.

Prints, for each N: seconds until all are served, and the bytes that went through the server (keys and values).
"""

from __future__ import annotations

import argparse
import datetime
import multiprocessing
import time
from multiprocessing.synchronize import Barrier

from torch.distributed import TCPStore

# Bytes of a rank's address, and of a card, of a rank with one TCP interface.
ADDRESS, RANK_INFO = 120, 380
WIDTH = 8
# Of each process.
CONNECTIONS = 8


def parent(rank: int) -> int:
    """As smddp-group/src/bootstrap/tree_shape.rs."""
    chunk, place = divmod(rank, WIDTH)
    return (chunk - 1) // WIDTH * WIDTH if place == 0 else chunk * WIDTH


def key(rank: int) -> str:
    return f"smddp/card/{rank}"


def client(port: int) -> TCPStore:
    return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=datetime.timedelta(minutes=10))


def through_the_tree(stores: dict[int, TCPStore], ready: Barrier) -> int:
    """A few small requests a rank."""
    moved = 0
    for rank, store in stores.items():
        store.check(["smddp/refused"])
        store.set(key(rank), "x" * ADDRESS)
        moved += len("smddp/refused") + len(key(rank)) + ADDRESS
    ready.wait()
    for rank, store in stores.items():
        if rank > 0:
            store.check([key(parent(rank))])
            moved += 2 * len(key(parent(rank))) + len(store.get(key(parent(rank))))
        store.check(["smddp/refused"])
        moved += len("smddp/refused")
    ready.wait()
    for rank, store in stores.items():
        store.delete_key(key(rank))
        moved += len(key(rank))
    return moved


def from_all_to_all(stores: dict[int, TCPStore], ready: Barrier, ranks: int) -> int:
    """N keys asked for and N cards read, by each rank."""
    moved, keys = 0, [key(rank) for rank in range(ranks)]
    for rank, store in stores.items():
        store.set(key(rank), "x" * RANK_INFO)
        moved += len(key(rank)) + RANK_INFO
    ready.wait()
    for store in stores.values():
        store.check(keys)
        moved += 2 * sum(map(len, keys)) + sum(len(card) for card in store.multi_get(keys))
    return moved


def work(port: int, mine: range, ranks: int, everything: bool, ready: Barrier, out: multiprocessing.Queue) -> None:
    connections = [client(port) for _ in range(CONNECTIONS)]
    stores = {rank: connections[place % CONNECTIONS] for place, rank in enumerate(mine)}
    ready.wait()
    began = time.monotonic()
    moved = from_all_to_all(stores, ready, ranks) if everything else through_the_tree(stores, ready)
    ready.wait()
    out.put((time.monotonic() - began, moved))


def replay(ranks: int, processes: int, everything: bool) -> tuple[float, int]:
    """Seconds, and bytes through the server."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    ready, out = context.Barrier(processes), context.Queue()
    workers = [
        context.Process(target=work, args=(server.port, range(one, ranks, processes), ranks, everything, ready, out))
        for one in range(processes)
    ]
    for worker in workers:
        worker.start()
    figures = [out.get() for _ in workers]
    for worker in workers:
        worker.join()
    return max(seconds for seconds, _ in figures), sum(moved for _, moved in figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("ranks", type=int, nargs="+")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--all", action="store_true", help="every rank reads every rank's information")
    options = parser.parse_args()
    for ranks in options.ranks:
        seconds, moved = replay(ranks, options.processes, options.all)
        print(f"{ranks:>6} ranks: {seconds:8.2f} s, {moved / 1e6:10.2f} MB through the server", flush=True)


if __name__ == "__main__":
    main()
