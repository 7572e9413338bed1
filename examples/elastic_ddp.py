"""Elastic DDP: one of four processes is killed, three continue from memory, and a new one joins them.

python examples/elastic_ddp.py
torchrun --standalone --nproc-per-node 4 --max-restarts 1 examples/elastic_ddp.py

Reconfiguring (`torch.distributed._reconfigure` from torch 2.15 on, a method of the group in any torch) changes the
ranks of the same group object. The first process starts all ranks and decides which continue; in a cluster the
scheduler or an agent decides. Each step's samples are distributed over the present ranks, so the losses equal those of
a single process. Under torchrun, which restarts all ranks after a death, training resumes from a file.
"""

from __future__ import annotations

import argparse
import datetime
import multiprocessing
import multiprocessing.connection
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from smddp import ReconfigureOptions
from torch.nn.parallel import DistributedDataParallel

SAMPLES = 24  # of each step, for 2, 3 or 4 ranks
LIMIT = datetime.timedelta(seconds=60)
# The order of additions depends on the number of ranks; float64 keeps the effect on the losses small.
torch.set_default_dtype(torch.float64)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(SAMPLES, 16, generator=torch.Generator().manual_seed(step))
    return inputs, inputs.sin().sum(1, keepdim=True)


def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def one_process(steps: int) -> list[float]:
    model, optimizer = make()
    losses = []
    for step in range(steps):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def bring_up_to_date(model: Any, optimizer: Any, step: int) -> int:
    """Copies the state of the most advanced rank to all: a survivor may lack a step, a new rank lacks all."""
    steps: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(steps, step)
    ahead = steps.index(max(steps))
    state = [(model.state_dict(), optimizer.state_dict())]
    dist.broadcast_object_list(state, ahead)
    model.load_state_dict(state[0][0])
    optimizer.load_state_dict(state[0][1])
    return steps[ahead]


def train(number: int, port: int, pipe: Any) -> None:
    """Runs rank process `number`, which receives the ranks and the end, and sends its losses."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=LIMIT)
    # A group of one rank; the first plan adds the others.
    dist.init_process_group("smddp", store=store, rank=0, world_size=1, timeout=LIMIT)
    group = dist.group.WORLD
    pipe.send(("handle", group.get_reconfigure_handle()))
    model, optimizer = make()
    step, until, plan = 0, None, None
    while until is None or step < until:
        while plan is None or pipe.poll(0):
            plan = pipe.recv()
            group.reconfigure(ReconfigureOptions(plan["uuid"], plan["handles"], LIMIT)).wait()
            step = bring_up_to_date(model, optimizer, step)
            # Recreated on all ranks: after a failed pass, DDP keeps the old number of ranks as its divisor.
            parallel = DistributedDataParallel(model)
            until = plan["until"]
            print(f"process {number} is rank {dist.get_rank()} of {dist.get_world_size()} from step {step}", flush=True)
        try:
            inputs, targets = batch(step)
            share = slice(dist.get_rank(), None, dist.get_world_size())
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(parallel(inputs[share]), targets[share])
            loss.backward()
            whole = loss.detach().clone()
            dist.all_reduce(whole, op=dist.ReduceOp.AVG)
        except (dist.DistBackendError, RuntimeError) as error:
            print(f"process {number} at step {step}: {str(error)[:160]}", flush=True)
            # The parent process also detects the death, and sends the next plan.
            if not pipe.poll(LIMIT.total_seconds()):
                raise
            continue
        optimizer.step()
        pipe.send(("loss", step, whole.item()))
        step += 1
    dist.destroy_process_group()


def train_under_torchrun(kill_at: int, steps: int) -> None:
    """Runs one rank under torchrun. Rank 1 is killed once; all restart and resume from the last step's file."""
    torch.set_num_threads(1)
    dist.init_process_group("smddp", timeout=LIMIT)
    rank, size = dist.get_rank(), dist.get_world_size()
    restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    file = Path(tempfile.gettempdir()) / f"elastic-ddp-{os.environ['TORCHELASTIC_RUN_ID']}.pt"
    model, optimizer = make()
    losses: list[float] = []
    if restarts:
        saved = torch.load(file)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        losses = saved["losses"]
    parallel = DistributedDataParallel(model)
    for step in range(len(losses), steps):
        if restarts == 0 and rank == 1 and step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        inputs, targets = batch(step)
        share = slice(rank, None, size)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(parallel(inputs[share]), targets[share])
        loss.backward()
        whole = loss.detach().clone()
        dist.all_reduce(whole, op=dist.ReduceOp.AVG)
        optimizer.step()
        losses.append(whole.item())
        if rank == 0:
            part = file.with_suffix(".part")
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "losses": losses}, part)
            part.replace(file)
    dist.destroy_process_group()
    if rank == 0:
        file.unlink()
        off = max(abs(mine - one) for mine, one in zip(losses, one_process(steps)))
        print(f"{steps} steps, {restarts} restarts; losses differ from one process's by {off:.1e} at most", flush=True)
        if off > 1e-9 or restarts != 1:
            raise SystemExit("that is not the training of one process")


class Processes:
    """The rank processes and the current members."""

    def __init__(self) -> None:
        self.context = multiprocessing.get_context("forkserver")
        # Imported once for all of them, with what DDP's first step imports.
        self.context.set_forkserver_preload(["__main__", "torch._dynamo"])
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LIMIT)
        self.all: dict[int, tuple[Any, Any]] = {}
        self.handles: dict[int, str] = {}
        self.uuid = self.started = 0
        self.losses: dict[int, float] = {}

    def start(self) -> None:
        mine, theirs = self.context.Pipe()
        arguments = (self.started, self.store.port, theirs)
        process = self.context.Process(target=train, args=arguments, daemon=True)
        process.start()
        theirs.close()
        self.all[self.started] = (process, mine)
        self.started += 1

    def plan(self, until: int | None = None) -> None:
        """Continues with all live ranks that have sent their handle, up to that step."""
        self.uuid += 1
        handles = [self.handles[number] for number in self.all if number in self.handles]
        for number in self.handles.keys() & self.all.keys():
            self.all[number][1].send({"uuid": self.uuid, "handles": handles, "until": until})

    def receive(self) -> str | None:
        """Returns the next message: "handle", "loss", "dead" or "done"; None without remaining processes."""
        if not self.all:
            return None
        pipes = {pipe: number for number, (_, pipe) in self.all.items()}
        ready = multiprocessing.connection.wait(list(pipes), LIMIT.total_seconds())
        if not ready:
            raise SystemExit(f"processes {sorted(self.all)} say nothing any more")
        pipe = ready[0]
        number = pipes[pipe]  # type: ignore[index]
        try:
            kind, *rest = pipe.recv()  # type: ignore[union-attr]
        except EOFError:
            process, _ = self.all.pop(number)
            process.join()
            return "done" if process.exitcode == 0 else "dead"
        if kind == "handle":
            self.handles[number] = rest[0]
        else:
            self.losses[rest[0]] = rest[1]
        return kind


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kill-at", type=int, default=50, help="the step at which the second process is killed")
    parser.add_argument("--more", type=int, default=50, help="steps after another one has joined")
    arguments = parser.parse_args()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return train_under_torchrun(arguments.kill_at, arguments.kill_at + arguments.more)
    processes = Processes()
    for _ in range(4):
        processes.start()
    awaited, killed = 4, False
    while (word := processes.receive()) is not None:
        if word == "handle":
            awaited -= 1
            if awaited == 0:
                processes.plan(max(processes.losses) + arguments.more if killed else None)
        elif word == "dead":
            print(f"a process is dead, {len(processes.all)} go on, and a new one is started", flush=True)
            processes.plan()
            processes.start()
            awaited = 1
        elif word == "loss" and not killed and len(processes.losses) > arguments.kill_at:
            killed = True
            os.kill(processes.all[1][0].pid, signal.SIGKILL)
    steps = max(processes.losses) + 1
    expected = one_process(steps)
    off = max(abs(processes.losses[step] - expected[step]) for step in range(steps))
    print(f"{steps} steps, {processes.uuid} configurations; losses differ from one process's by {off:.1e} at most")
    if off > 1e-9 or processes.uuid != 3 or expected[-1] > 0.7 * expected[0]:
        raise SystemExit("that is not the training of one process")


if __name__ == "__main__":
    main()
