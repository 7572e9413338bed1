"""A second process of a rank, started while the group of the first one exists, over torch's FileStore and TCPStore."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ranks import forked
from torch.distributed import TCPStore

_START = """
import os, time, datetime, pathlib
import torch, torch.distributed as dist, smddp
rank, kind, folder, port = {rank}, {kind!r}, pathlib.Path({folder!r}), {port}
os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
                  TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
def join(timeout=30):
    options = {{"timeout": datetime.timedelta(seconds=timeout)}}
    if kind != "env":
        options.update(init_method=f"file://{{folder}}/store", rank=rank, world_size=2)
    dist.init_process_group("smddp", **options)
def wait(name):
    deadline = time.monotonic() + 60
    while not (folder / name).exists() and time.monotonic() < deadline:
        time.sleep(0.01)
def mark(name):
    (folder / name).touch()
"""
_MEMBER = """
join()
mark(f"joined{rank}")
done = torch.zeros(1)
while not done.item():
    done = torch.tensor([float((folder / "refused0").exists() and (folder / "refused1").exists())])
    dist.all_reduce(done, dist.ReduceOp.MIN)
later = dist.new_group([0, 1])
result = torch.tensor([rank + 1.0])
dist.all_reduce(result, group=later)
assert result.item() == 3, result
store = dist.group.WORLD._store
assert store.check([f"smddp/held/{rank}"])
dist.destroy_process_group()
assert not store.check([f"smddp/held/{rank}"])
mark(f"left{rank}")
# This process lives on and no longer holds its rank.
wait(f"again{rank}")
print("ok")
"""
_DUPLICATE = """
wait("joined0"), wait("joined1")
begun = time.monotonic()
try:
    join()
    print("joined")
except smddp.TopologyError as error:
    print(os.getpid(), time.monotonic() - begun < 10, error)
mark(f"refused{rank}")
"""
_REJOIN = """join()
result = torch.ones(1)
dist.all_reduce(result)
mark(f"again{rank}")
dist.destroy_process_group()
print(result.item())
"""
_AGAIN = (
    """
wait("left0"), wait("left1")
"""
    + _REJOIN
)
_ORPHAN = """
join()
mark(f"joined{rank}")
wait(f"joined{1 - rank}")
if rank == 0:
    (folder / "pid.new").write_text(str(os.getpid()))
    (folder / "pid.new").rename(folder / "pid")
    os._exit(0)
if folder.name == "dead":
    try:
        dist.all_reduce(torch.ones(1))
    except smddp.PeerLostError:
        mark("lost")
# The process lives on with its group.
wait("again0"), wait("again1")
os._exit(0)
"""
_RESTART = (
    """
wait("joined0"), wait("joined1"), wait("pid")
if folder.name == "dead":
    wait("lost")
state = pathlib.Path(f"/proc/{(folder / 'pid').read_text()}/stat")
def runs():
    try:
        return state.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
while runs():
    time.sleep(0.01)
"""
    + _REJOIN
)


def ended(folder: Path, kinds: tuple[str, ...], parts: tuple[str, ...], port: int = 0) -> dict[Any, Any]:
    """Runs each part as ranks 0 and 1 over each kind's store; returns the ended processes by kind, part and rank."""
    cells = [(kind, part, rank) for kind in kinds for part in parts for rank in (0, 1)]
    for kind in kinds:
        (folder / kind).mkdir()
    programs = [
        (_START.format(rank=rank, kind=kind, folder=str(folder / kind), port=port) + part, {})
        for kind, part, rank in cells
    ]
    return dict(zip(cells, forked.run_all(programs, 90)))


def test_a_restart_after_the_end_of_a_rank_is_not_refused(tmp_path: Path):
    for (kind, part, rank), done in ended(tmp_path, ("dead", "idle"), (_ORPHAN, _RESTART)).items():
        assert done.returncode == 0, (kind, rank, done)
        assert part is _ORPHAN or done.stdout == "2.0\n", (kind, rank, done)


def test_a_second_process_of_a_rank_is_refused_and_the_group_goes_on(tmp_path: Path):
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    parts = (_MEMBER, _DUPLICATE, _AGAIN)
    for (kind, part, rank), done in ended(tmp_path, ("file", "env"), parts, server.port).items():
        assert done.returncode == 0, (kind, rank, done)
        if part is _MEMBER:
            assert done.stdout == "ok\n", (kind, rank, done)
        elif part is _AGAIN:
            assert done.stdout == "2.0\n", (kind, rank, done)
        else:
            pid, soon, text = done.stdout.split(" ", 2)
            assert soon == "True" and f"two processes claim rank {rank} of group" in text, (kind, done)
            assert "which has joined the group and still holds the rank" in text and f"pid {pid} on host" in text, done
