"""Checkpoints saved over older ones of the same tag: one complete save loads, the older or the newer."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import os
from pathlib import Path
from unittest import mock

import pytest
import smdistributed.modelparallel.torch as smp
import torch
from front_cases.by_hand import OTHERWISE, WHERE, job
from front_cases.optimizers import assert_same, cut_model, steps
from front_cases.sharded import wrapped
from smddp.modelparallel.checkpointing import checkpoint, objects, saved_files, saving
from smddp.modelparallel.state import state

CUTS = {4: WHERE, 2: OTHERWISE, 1: dict.fromkeys(WHERE, 0)}


@contextlib.contextmanager
def trained(partitions, number):
    """A model whose values are ``number``, and its optimizer after so many steps."""
    with job(partitions=partitions, ddp=True):
        model, optimizer = cut_model(CUTS[partitions])
        model.cut()
        steps(model.module, optimizer, range(number))
        for tensor in [*model.local_parameters(), model.module.scale]:
            tensor.data.fill_(float(number))
        yield model, optimizer


def saved(directory, partitions, number, **options):
    """Saves such a model; returns the whole states."""
    with trained(partitions, number) as (model, _):
        checkpoint.save_checkpoint(directory, "last", model=model, user_content=number, **options)
    return values(number)


@functools.cache
def values(number):
    """The whole states of such a model and its optimizer."""
    with trained(1, number) as (model, optimizer):
        return copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())


def check(directory, partitions, wanted, number, partial=True):
    with job(partitions=partitions, ddp=True):
        model, optimizer = cut_model(CUTS[partitions])
        assert checkpoint.resume_from_checkpoint(directory, "last", partial=partial) == number
        model.cut()
        assert_same(dict(model.state_dict()), dict(wanted[0]), exact=True)
        assert_same(optimizer.state_dict(), wanted[1])  # the norm that clips is summed in another order
        objects.barrier()


def case_the_last_save_of_a_tag_loads_under_every_cut(directory):
    for number, (before, after) in enumerate(((4, 1), (1, 2), (2, 4), (4, 2))):
        where = f"{directory}/{number}"
        saved(where, before, 1)
        wanted = saved(where, after, 2)
        for partitions in CUTS:
            check(where, partitions, wanted, 2)
        files = os.listdir(f"{where}/last_partial")
        assert len(files) == 2 * after + 2, files
    # A save without an optimizer leaves none of an older save.
    for partial in (True, False):
        saved(f"{directory}/without", 4, 1, partial=partial)
        with trained(2, 2) as (model, _):
            state.optimizer = None
            checkpoint.save_checkpoint(f"{directory}/without", "last", partial, model)
        with job(partitions=2, ddp=True):
            cut_model(OTHERWISE)[0].cut()
            # A whole checkpoint may have no optimizer's state, a partial one must say load_optimizer=False.
            refused = pytest.raises(FileNotFoundError, match="no optimizer") if partial else contextlib.nullcontext()
            with refused:
                checkpoint.resume_from_checkpoint(f"{directory}/without", "last", partial=partial)
            assert not state.optimizer.state_dict()["state"]


def case_shards_saved_under_one_tag_are_never_mixed(directory):
    """As stages, of which no model here has several."""
    keys = {"ddp": True, "microbatches": 2}
    for number, degree in enumerate((2, 1, 2)):
        with job(**keys, **({"sharded_data_parallel_degree": degree} if degree > 1 else {})):
            model, _ = wrapped()
            if number:
                smp.resume_from_checkpoint(directory, "last")
                found = {float(value) for tensor in model.state_dict().values() for value in tensor.unique()}
                assert found == {float(number - 1)}, (degree, found)
            model.load_state_dict({name: torch.full_like(v, number) for name, v in model.state_dict().items()})
            smp.save_checkpoint(directory, "last")


class Killed(BaseException):
    """Stands for the end of the process."""


def _killed_after(exchanges):
    """All ranks end after so many exchanges of `Save.finish`."""
    original, calls = saving.Save._exchange, itertools.count(1)

    def exchange(self, value):
        found = original(self, value)
        if next(calls) == exchanges:
            raise Killed
        return found

    return mock.patch.object(saving.Save, "_exchange", exchange)


def _killed_in_rename():
    """The first rank has renamed its files by then."""
    original = saved_files.rename

    def rename(paths, save):
        if state.ranks.rank == 0:
            original(paths, save)
        raise Killed

    return mock.patch.object(saved_files, "rename", rename)


def case_a_save_that_ends_early_leaves_the_older_or_the_newer_checkpoint(directory):
    """The next save is complete, and removes leftover files."""
    points = {"written": (1, 1), "listed": (2, 2), "half renamed": (None, 2), "renamed": (3, 2)}
    for (point, (exchanges, number)), partial in itertools.product(points.items(), (True, False)):
        where = f"{directory}/{point}{partial}"
        wanted = {1: saved(where, 4, 1, partial=partial)}
        with contextlib.suppress(Killed), _killed_after(exchanges) if exchanges else _killed_in_rename():
            saved(where, 2, 2, partial=partial)
        wanted[2] = values(2)
        check(where, 4, wanted[number], number, partial)
        check(where, 2, wanted[number], number, partial)
        wanted = saved(where, 1, 3, partial=partial)
        check(where, 4, wanted, 3, partial)
        left = [name for _, _, names in os.walk(where) for name in names if name.startswith(".")]
        assert not left, left


def case_an_error_on_one_rank_leaves_the_older_checkpoint_and_is_raised_on_all(directory):
    wanted = saved(directory, 4, 1)
    with job(partitions=2, ddp=True) as ranks:
        model, optimizer = cut_model(OTHERWISE)
        model.cut()
        failing = mock.patch.object(torch, "save", side_effect=OSError(28, "No space left on device"))
        with failing if ranks.rank == 1 else contextlib.nullcontext():
            with pytest.raises(OSError, match=r"rank 1: OSError: .*No space left on device"):
                checkpoint.save_checkpoint(directory, "last", model=model, optimizer=optimizer)
        objects.barrier()
        with pytest.raises(ValueError, match=r"different places, rank 0: .*tag='step0'.*; rank 3: .*tag='step3'"):
            checkpoint.save_checkpoint(directory, f"step{ranks.rank // 3 * 3}", model=model)
        objects.barrier()
        assert sorted(os.listdir(directory)) == ["last_partial", "newest"]
    check(directory, 4, wanted, 1)


def case_checkpoints_without_a_manifest_load(directory):
    for partial in (True, False):
        wanted = saved(directory, 4, 1, partial=partial)
        with job(partitions=1, ddp=True) as ranks:
            if ranks.rank == 0:
                os.remove(saved_files.manifest_of(Path(directory), "last", partial))
            objects.barrier()
        check(directory, 2, wanted, 1, partial)
