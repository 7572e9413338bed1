"""Ctrl-C gets through to a rank that waits, and costs the group nothing."""

from __future__ import annotations

import os
import signal
import threading
import time

import torch
import torch.distributed as dist

from backend.ranks import on_ranks


@on_ranks(2)
def test_ctrl_c_ends_a_wait_within_half_a_second_and_the_call_goes_on() -> None:
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        tensor = torch.ones(3)
        sent = []

        def interrupt() -> None:
            sent.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        timer = threading.Timer(0.3, interrupt)
        timer.start()
        try:
            dist.all_reduce(tensor)
            raise AssertionError("the other rank has not come yet")
        except KeyboardInterrupt:
            late = time.monotonic() - sent[0]
        finally:
            signal.signal(signal.SIGINT, before)
        assert late < 0.5, f"{late:.2f} s"
        store.set("interrupted", "yes")
    else:
        # Not before the other rank was interrupted in its wait.
        store.wait(["interrupted"])
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [2.0, 2.0, 2.0]
    again = torch.full((2,), float(dist.get_rank()))
    dist.all_reduce(again)
    assert again.tolist() == [1.0, 1.0]
