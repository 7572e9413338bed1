"""One rank of a group: a small and a large collective, and a message."""

import numpy as np
import smddp

with smddp.init(timeout=20) as comm:
    for count in (1, 300_000):
        total = comm.all_reduce(np.full(count, comm.rank + 1.0, "float32"))
        assert (total == comm.size * (comm.size + 1) / 2).all()
        assert (comm.all_gather(np.full(count, comm.rank)).sum(0) == sum(range(comm.size))).all()
    print(f"over {comm.way.split()[0] if comm.way else 'shm'}", flush=True)
