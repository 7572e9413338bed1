"""After `destroy_process_group` has raised, a second call ends all groups, and the process can make new ones."""

from __future__ import annotations

from ranks import forked

PROGRAM = """
import os, signal, sys, threading, time
import smddp, torch, torch.distributed as dist
rank = int(os.environ["RANK"])

def init(name):
    store = dist.FileStore(f"{os.environ['STORE']}-{name}", 2)
    dist.init_process_group("smddp", store=store, rank=rank, world_size=2)
    return store

def unreceived(store):
    if rank == 0:
        dist.send(torch.ones(2), 1, tag=9)
    return (smddp.MismatchError,)

def unreceived_in_two_groups(store):
    other = dist.new_group([0, 1])
    if rank == 0:
        dist.send(torch.ones(2), 1, tag=9)
        dist.send(torch.ones(2), 1, other, tag=8)
    return (smddp.MismatchError,)

class Stopped(Exception):
    pass

def stop(*_):
    raise Stopped

def interrupted(store):
    signal.signal(signal.SIGUSR2, stop)
    if rank == 0:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR2)).start()
    else:
        time.sleep(1)
    return (Stopped,)

for case in (unreceived, unreceived_in_two_groups, interrupted):
    store = init(case.__name__)
    dist.all_reduce(torch.ones(1))
    errors, raised = case(store), 0
    while dist.is_initialized():
        try:
            dist.destroy_process_group()
        except errors as error:
            raised += 1
            assert raised < 3, (case.__name__, error)
    if rank == 0:
        assert raised, case.__name__
init("again")
dist.all_reduce(total := torch.ones(1))
assert total.item() == 2.0
dist.destroy_process_group()
print("right")
"""


def test_a_second_destroy_ends_what_a_raising_one_has_left(tmp_path):
    places = [{"RANK": str(rank), "STORE": f"{tmp_path}/store", "SMDDP_LEAVE_SECONDS": "2"} for rank in range(2)]
    done = forked.run_all([(PROGRAM, each) for each in places], seconds=60)
    assert all(each.returncode == 0 and "right" in each.stdout for each in done), done
