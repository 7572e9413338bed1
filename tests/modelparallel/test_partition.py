"""Cuts by cost, and by the script."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from smddp.modelparallel.partitioning import partition
from smddp.modelparallel.partitioning.cutting import Cut
from torch import nn


class Layers(nn.Module):
    def __init__(self, sizes, tied=False):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, size) for size in sizes)
        self.last = nn.Linear(4, 4)
        if tied:
            self.last.weight = self.first.weight

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x).sum(-1, keepdim=True)
        return self.last(x)


def stages(model, count, **options):
    costs = partition.measure(model, lambda: model(torch.ones(2, 4)))
    return partition.cut(partition.units(model, count, costs, 0.8, **options), count)


def test_the_costliest_stage_is_as_cheap_as_any_cut_makes_it():
    generator = random.Random(1)
    for _ in range(60):
        costs = [generator.randint(1, 9) / 10 for _ in range(generator.randint(1, 8))]
        count = generator.randint(1, 4)
        found = partition.balanced(costs, count)
        assert found == sorted(found) and found[0] == 0 and found[-1] == min(count, len(costs)) - 1

        def largest(of, costs=costs):
            return max(sum(cost for cost, stage in zip(costs, of) if stage == at) for at in set(of))

        used = min(count, len(costs))
        every = (cut for cut in itertools.product(range(used), repeat=len(costs)) if list(cut) == sorted(cut))
        best = min(largest(cut) for cut in every if len(set(cut)) == used)
        assert largest(found) == pytest.approx(best)


def test_stages_are_contiguous_in_order_of_execution():
    found = stages(Layers([8] * 6), 4)
    order = ["first", *(f"layers.{index}" for index in range(6)), "last"]
    assert [found[name] for name in order] == sorted(found[name] for name in order)
    assert set(found.values()) == {0, 1, 2, 3}


def test_modules_that_share_a_parameter_are_on_one_stage():
    found = stages(Layers([8] * 6, tied=True), 3)
    assert found["first"] == found["last"] == 0


def test_partitioning_is_deterministic_and_tracing_has_no_side_effects():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.random.get_rng_state()
    assert len({tuple(sorted(stages(model, 2).items())) for _ in range(3)}) == 1
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_modules_are_placed_on_the_stage_that_the_script_sets():
    model = Layers([8] * 2)
    partition.set_partition(model.layers[1], 1)
    with partition.partition(2):
        model.last = nn.Linear(4, 4)
    where = partition.given(model, 0, 3)
    assert where == {"first": 0, "layers.0": 0, "layers.1": 1, "last": 2}
    made = Cut(model, where, 0)
    assert {name: stage for name, _, stage in made.parts} == where


def test_an_unknown_stage_is_an_error():
    model = Layers([8])
    partition.set_partition(model.first, 5)
    with pytest.raises(ValueError, match="module first was put on stage 5; expected 0 to 1"):
        partition.given(model, 0, 2)


def test_lists_and_modules_inside_parts_are_not_parts():
    model = Layers([8] * 2)
    made = Cut(model, {"": 0}, 0)
    assert [name for name, _, _ in made.parts] == [""]
    made = Cut(model, {"first": 0, "layers.0": 1, "layers.1": 1, "last": 0}, 0)
    assert [name for name, _, _ in made.parts] == ["first", "layers.0", "layers.1", "last"]
