"""Selection of the FSDP units of a model, in one process without a group."""

from __future__ import annotations

from smddp.modelparallel.data_parallel.sharded_units import elements, units
from torch import nn


def names(model, most=1_000_000):
    known = {id(module): name for name, module in model.named_modules()}
    return [known[id(unit)] for unit in units(model, most)]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.down(self.up(self.norm(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.layers, self.head = nn.Embedding(8, 4), nn.ModuleList([Layer(), Layer()]), nn.Linear(4, 8)

    def forward(self, x):
        return x


def test_layers_in_lists_are_units():
    assert names(Model()) == ["layers.0", "layers.1"]
    assert names(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.LayerNorm(4), nn.Linear(4, 4))) == ["0", "3"]


def test_modules_larger_than_a_bucket_are_sharded_by_submodule():
    model = Model()
    inner = [f"layers.{layer}.{name}" for layer in range(2) for name in ("up", "down")]
    found = names(model, elements(model.layers[0]) - 1)
    assert found == ["embed", "layers.0", *inner[:2], "layers.1", *inner[2:], "head"]


def test_a_shared_parameter_belongs_to_the_unit_of_all_its_users():
    model = Model()
    model.head.weight = model.embed.weight
    model.layers[0].up.weight = model.layers[0].down.weight
    model.layers[1].norm.weight = model.layers[0].norm.weight
    assert names(model, 1) == ["layers.1.up", "layers.1.down"]
    model.layers[1].norm.weight = nn.Parameter(model.layers[1].norm.weight.detach().clone())
    assert names(model, 1) == ["layers.0", "layers.1", "layers.1.up", "layers.1.down"]
