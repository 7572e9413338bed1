"""Selection of FSDP units: modules whose parameters are gathered together. Pure functions."""

from __future__ import annotations

from collections import Counter

from torch import nn

from smddp.modelparallel.partitioning.partition import called

# Their modules are layers of one kind, which run one after the other.
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def elements(module: nn.Module) -> int:
    """Return the elements of all parameters in a module; shared ones count once."""
    return sum(parameter.numel() for parameter in module.parameters())


def units(model: nn.Module, most: int) -> list[nn.Module]:
    """Return the units in ``model``, outer modules first; ``model`` itself is not listed.

    Units are the layers in lists, and the submodules of a module with more than ``most`` elements. A module that is
    never called, has only vectors, or shares a parameter with an outside module belongs to the enclosing unit.
    """
    uses = Counter(id(parameter) for module in model.modules() for parameter in module.parameters(recurse=False))
    found: list[nn.Module] = []
    seen: set[int] = set()

    def alone(module: nn.Module) -> bool:
        inside = Counter(id(q) for each in module.modules() for q in each.parameters(recurse=False))
        matrices = any(parameter.dim() > 1 for parameter in module.parameters())
        return called(module) and matrices and all(uses[key] == count for key, count in inside.items())

    def visit(module: nn.Module) -> None:
        large = elements(module) > most
        for child in module.children():
            if id(child) in seen:
                continue
            seen.add(id(child))
            if (large or isinstance(module, _LISTS)) and alone(child):
                found.append(child)
                if elements(child) > most:
                    visit(child)
            else:
                visit(child)

    visit(model)
    return found
