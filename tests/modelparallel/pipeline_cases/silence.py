"""Silent stages: a stopped or busy stage fails the others at the deadline, and a long step succeeds."""

import contextlib
import os
import signal
import subprocess
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from pipeline_cases.against import Pipeline
from pipeline_cases.special import SIZE, Two, place, rows, square
from smddp.modelparallel import ranks
from smddp.modelparallel.pipeline.mailbox import Mail
from smddp.modelparallel.state import state
from torch import nn


class Impatient(Pipeline):
    """Create a pipeline with a separate deadline for its messages."""

    def __init__(self, make, stages, seconds, place):
        super().__init__(make, square, rows(), stages, 4, place=place)
        own = state.ranks
        groups = ranks.place(own.size, "cluster", stages)["pp"]
        group, _ = dist.new_subgroups_by_enumeration(groups, timeout=timedelta(seconds=seconds))
        self.model.mail = Mail(own.pp_rank, own.pp_ranks, group)


def ends_by(both, least, most, *words):
    begun = time.monotonic()
    try:
        both.run()
    except Exception as error:
        took = time.monotonic() - begun
        assert least < took < most, took
        assert all(word in str(error) for word in words), error
        return
    raise AssertionError("the step went through")


def case_a_stage_that_is_busy_beyond_the_deadline_is_named():
    class Busy(nn.Linear):
        seconds = 0

        def forward(self, x):
            time.sleep(Busy.seconds)
            return super().forward(x)

    class Model(Two):
        def __init__(self):
            super().__init__()
            self.b = Busy(SIZE, SIZE)

    with Impatient(Model, 2, 1.0, place) as both:
        both.run()
        Busy.seconds = 2.5
        if state.ranks.pp_rank == 0:
            ends_by(both, 1.5, 4.5, "no message arrived for 1 s", "of stage 1")
        else:
            ends_by(both, 2.4, 5.0, "no message arrived for 1 s", "reported by stage 0")


def case_a_stage_that_is_stopped_is_named_by_its_rank():
    class Stops(nn.Linear):
        armed = False

        def forward(self, x):
            if Stops.armed:
                Stops.armed = False
                subprocess.Popen(["sh", "-c", f"sleep 2; kill -CONT {os.getpid()}"])
                os.kill(os.getpid(), signal.SIGSTOP)
            return super().forward(x)

    class Model(Two):
        def __init__(self):
            super().__init__()
            self.b = Stops(SIZE, SIZE)

    with Impatient(Model, 2, 1.0, place) as both:
        both.run()
        Stops.armed = True
        if state.ranks.pp_rank == 0:
            ends_by(both, 0.9, 4.0, "messages between stages, stage 0", "rank 1 is stopped")
        else:
            try:
                both.run()
            except Exception as error:
                assert "messages between stages" in str(error) or "reported by stage 0" in str(error), error
            else:
                raise AssertionError("the step went through")
    # Unreceived messages are an error at the end of the groups, too.
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


def case_a_step_may_take_longer_than_the_deadline():
    class Slow(nn.Linear):
        def forward(self, x):
            time.sleep(0.3)
            return super().forward(x)

    def make():
        return nn.Sequential(*(Slow(SIZE, SIZE) for _ in range(4)))

    def each(net, stages):
        return [(layer, stage) for stage, layer in enumerate(net)]

    with Impatient(make, 4, 1.0, each) as both:
        for _ in range(2):
            begun = time.monotonic()
            both.run()
            # Stages 0 and 3 exchange no message until the last microbatch has finished.
            assert time.monotonic() - begun > 2.0
        assert torch.is_grad_enabled()
