"""Simulation of every plan: no deadlock, and at most the permitted number of live microbatches."""

from __future__ import annotations

import pytest
from smddp.modelparallel.pipeline.schedule import simulate

STAGES = range(1, 9)
MICROBATCHES = range(1, 17)


def visits_of(shape: str, stages: int) -> list[int]:
    """The stages that a microbatch passes."""
    once = list(range(stages))
    return {"straight": once, "loop": [*once, 0], "twice around": once * 2, "there and back": once + once[::-1]}[shape]


@pytest.mark.parametrize("pipeline", ["interleaved", "simple"])
@pytest.mark.parametrize(
    "shape",
    [
        "straight",
        "loop",
        pytest.param("twice around", marks=pytest.mark.slow),
        pytest.param("there and back", marks=pytest.mark.slow),
    ],
)
def test_no_plan_deadlocks_and_each_stage_keeps_its_limit(shape, pipeline):
    for stages in STAGES:
        visits = visits_of(shape, stages)
        for microbatches in MICROBATCHES:
            for active in (1, stages, stages + 2):
                for forward, backward in ((1.0, 2.0), (2.0, 1.0)):
                    found = simulate(visits, microbatches, pipeline, active, forward, backward)
                    assert len(found.pieces) == 2 * len(visits) * microbatches
                    if pipeline == "interleaved":
                        limits = [max(1, active - stage) for stage in range(stages)]
                        assert all(peak <= limit for peak, limit in zip(found.peak, limits))


@pytest.mark.parametrize("pipeline", ["interleaved", "simple"])
def test_a_straight_pipeline_has_the_bubble_of_theory(pipeline):
    for stages in STAGES:
        for microbatches in MICROBATCHES:
            found = simulate(list(range(stages)), microbatches, pipeline, stages + 2, 1.0, 2.0)
            assert found.length == (microbatches + stages - 1) * 3.0


def test_segments_of_one_stage_follow_the_microbatches():
    """Sums of gradients have one order: that of the microbatches, in each segment."""
    for pipeline in ("interleaved", "simple"):
        found = simulate([0, 1, 2, 0], 8, pipeline, 5)
        for stage in (1, 2):
            back = [number for at, number, piece, _, _ in found.pieces if at == stage and piece == "B"]
            assert back == sorted(back)


def test_simple_finishes_forward_work_first():
    found = simulate([0, 1, 2], 6, "simple", 5)
    for stage in range(3):
        order = [piece for at, _, piece, _, _ in found.pieces if at == stage]
        assert order == ["F"] * 6 + ["B"] * 6
