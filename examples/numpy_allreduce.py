"""Collectives on numpy arrays without torch: the same script under any launcher.

mpirun -np 4 python examples/numpy_allreduce.py
torchrun --nproc-per-node 4 examples/numpy_allreduce.py
srun -n 4 python examples/numpy_allreduce.py
"""

import numpy as np
import smddp


def main() -> None:
    with smddp.init(timeout=60) as comm:
        # Least squares on data that no rank has all of: each sums its own part of the normal equations.
        rows = np.random.default_rng(comm.rank).normal(size=(10_000, 5))
        targets = rows @ np.arange(5.0)
        normal, right = rows.T @ rows, rows.T @ targets
        works = [comm.all_reduce(part, async_op=True) for part in (normal, right)]
        for work in works:
            work.wait()
        solution = np.linalg.solve(normal, right)
        assert np.allclose(solution, np.arange(5.0)), solution

        # All ranks' losses, in rank order, and the largest.
        loss = np.array([((rows @ solution - targets) ** 2).mean()])
        losses = comm.all_gather(loss).ravel()
        worst = comm.all_reduce(loss.copy(), "max")[0]
        assert worst == losses.max()
        if comm.rank == 0:
            print(f"{comm.size} ranks over {comm.way}: {np.round(solution, 6)}, largest loss {worst:.1e}")


if __name__ == "__main__":
    main()
