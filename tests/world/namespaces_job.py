"""One rank of a job whose ranks are in separate namespaces: shared memory, questions, a late rank, a death."""

import os
import sys

sys.modules["torch"] = None  # type: ignore[assignment]

import numpy as np
import smddp
from smddp.observability import status

LATE, DYING = 1, 2


def own_sockets() -> list[str]:
    here = (os.getpid(), status._own_namespace())
    return [name for pid, namespace, name in status._sockets() if (pid, namespace) == here]


def main(comm: smddp.Communicator) -> None:
    assert comm.way == "shm", comm.way
    data = np.full(2 << 20, comm.rank + 1.0, "float32")
    comm.all_reduce(data)
    assert (data == 6).all(), data

    # Each process answers each other one, also where its id means nothing.
    names = [name for one in comm.all_gather_object(own_sockets()) for name in one]
    found = [one for one in status.processes() if one.socket in names]
    assert len(found) == len(names) == comm.size, (found, names)
    groups = [status._ask(one, status._STATUS)["groups"][0] for one in found]
    assert sorted(group["rank"] for group in groups) == [0, 1, 2], groups
    assert sum(one.visible for one in found) == (3 if comm.rank == 0 else 1), found

    # A late rank is described by what it does, and not by a process that has its id here.
    half = comm.split(0)
    if comm.rank != LATE:
        try:
            half.barrier(timeout=1)
            raise AssertionError("no rank was late")
        except smddp.CollectiveTimeoutError as error:
            text = str(error)
            assert f"rank {LATE}" in text and "is in no call of this group" in text, text
            assert "is stopped" not in text and "sent no reply" not in text, text
    comm.barrier()
    if comm.rank == DYING:
        os._exit(9)
    try:
        comm.all_reduce(data)
        raise AssertionError("the death was not reported")
    except smddp.PeerLostError as error:
        assert error.ranks == [DYING], error
    print(f"rank {comm.rank} is well", flush=True)


if __name__ == "__main__":
    main(smddp.init(timeout=60))
    os._exit(0)
