"""Asynchronous calls and futures complete in a process that cannot start threads."""

from __future__ import annotations

import tempfile
from pathlib import Path

from ranks import forked

PROGRAM = """
import datetime, os, resource, time
import torch, torch.distributed as dist
rank = int(os.environ["RANK"])
dist.init_process_group("smddp", init_method="file://" + os.environ["STORE"], rank=rank, world_size=2,
                        timeout=datetime.timedelta(seconds=30))
dist.barrier()
if rank == 0:
    resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
    if os.getuid() == 0:  # exempt from the limit
        os.setuid(65534)
    import threading
    try:
        threading.Thread(target=int).start()
    except RuntimeError:
        pass
    else:
        print("unlimited")
work = dist.all_reduce(polled := torch.ones(3), async_op=True)
while not work.is_completed():
    time.sleep(0.001)
future = dist.all_reduce(taken := torch.ones(3), async_op=True).get_future().then(lambda done: done.value()[0].sum())
strided = torch.ones(4, 2)[:, 0]
dist.all_reduce(strided, async_op=True).wait()
print(polled.tolist(), float(future.wait()), strided.tolist(), flush=True)
dist.barrier()
os._exit(0)
"""


def test_polls_and_futures_complete_without_another_thread():
    with tempfile.TemporaryDirectory(prefix="smddp-threads-") as folder:
        Path(folder).chmod(0o777)
        variables = [{"RANK": str(rank), "STORE": f"{folder}/store"} for rank in range(2)]
        done = forked.run_all([(PROGRAM, each) for each in variables], seconds=60)
    for rank, one in enumerate(done):
        assert one.returncode == 0, (rank, one)
        assert one.stdout.strip() == "[2.0, 2.0, 2.0] 6.0 [2.0, 2.0, 2.0, 2.0]", (rank, one)
    assert "cannot start the thread smddp-callbacks" in done[0].stderr, done[0].stderr


def test_a_group_that_cannot_start_its_threads_names_them_and_the_limits():
    code = (
        "import tempfile, torch.distributed as dist\n"
        "dist.init_process_group('smddp', init_method='file://' + tempfile.mktemp(), rank=0, world_size=2)"
    )
    # A stack larger than the address space: the kernel fails as at a thread limit.
    done = forked.run(code, RUST_MIN_STACK=str(1 << 46))
    assert done.returncode == 1
    assert "cannot start the thread smddp-" in done.stderr and "ulimit -u" in done.stderr, done.stderr
