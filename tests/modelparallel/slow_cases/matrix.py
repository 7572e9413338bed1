"""Every model, cut, number of microbatches and pipeline against one process; with replicas where stages are fewer."""

import contextlib

from pipeline_cases.networks import NETWORKS
from pipeline_cases.parity import one


@contextlib.contextmanager
def named(*what):
    try:
        yield
    except BaseException as error:
        if hasattr(error, "add_note"):
            error.add_note(f"case {what}")
        raise


def matrix(stages, checkpointed=False):
    for name in NETWORKS:
        for microbatches in (1, 4, 8):
            for pipeline in ("interleaved", "simple"):
                with named(name, stages, microbatches, pipeline):
                    # 16 rows, or 32 where four replicas have 8 microbatches.
                    rows = 2 if (stages, microbatches) == (1, 8) else 1
                    one(name, stages, microbatches, pipeline, rows=rows, checkpointed=checkpointed)


def case_every_model_on_one_stage_with_four_replicas():
    matrix(1)


def case_every_model_checkpointed_on_one_stage():
    matrix(1, checkpointed=True)


def case_every_model_checkpointed_on_two_stages():
    matrix(2, checkpointed=True)


def case_every_model_checkpointed_on_four_stages():
    matrix(4, checkpointed=True)


def case_every_model_on_two_stages_with_two_replicas():
    matrix(2)


def case_every_model_on_four_stages():
    matrix(4)


def case_few_active_microbatches_are_enough():
    for name in ("gpt2", "skips", "pingpong"):
        for active in (1, 2, 4):
            with named(name, active):
                one(name, 4, 8, "interleaved", active_microbatches=active)
