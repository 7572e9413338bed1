"""Prints the public symbols of the installed package, one line each, for a comparison of two versions.

    python scripts/public_symbols.py torch > tests/source/public_symbols.txt
    python scripts/public_symbols.py tensorflow

Public are the modules of `smdistributed`, `smddp`, its `estimator` and `experimental`, and the modules of
`torch.sagemaker` that scripts for SMP import. A module's symbols are the names in its `__all__`; without `__all__`,
every name of this package without an underscore. A line has a function's parameters, or a class's parameters and
public attributes; "=" marks a default.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
import warnings
from collections.abc import Iterator
from types import ModuleType

MODULES = ["smddp", "smddp.estimator", "smddp.experimental", "torch.sagemaker"]
# Modules of SMP v2 that published scripts and the documentation import.
SMP = [
    "context_parallel.utils",
    "delayed_param",
    "distributed.checkpoint.async_utils",
    "distributed.checkpoint.filesystem",
    "distributed.checkpoint.state_dict_loader",
    "distributed.checkpoint.state_dict_saver",
    "distributed.checkpoint.state_dict_utils",
    "distributed.fsdp.checkpoint",
    "grad_norm",
    "moe.moe_config",
    "tensor_parallel.transformer",
    "utils.process_group_utils",
]


def modules(framework: str) -> Iterator[str]:
    """Yields the names of the public modules. framework: "tensorflow" for its modules alone, "torch" for all others."""
    if framework == "torch":
        yield from MODULES
        yield from (f"torch.sagemaker.{name}" for name in SMP)
    folders = importlib.import_module("smdistributed").__path__
    names = {found.name for found in pkgutil.walk_packages(folders, "smdistributed.", onerror=lambda name: None)}
    # Some modules exist in memory alone, after the import of their package.
    names |= {name for name in sys.modules if name.startswith("smdistributed.")}
    yield from (name for name in names if ("tensorflow" in name) == (framework == "tensorflow"))


def symbols(module: ModuleType) -> list[str]:
    """Returns the names that `module` offers."""
    listed = getattr(module, "__all__", None)
    if listed is not None:
        return sorted(set(listed))
    ours = ("smddp", "smdistributed", "torch.sagemaker")
    return sorted(
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and not isinstance(value, ModuleType)
        and str(getattr(value, "__module__", "smddp")).startswith(ours)
        and name != "annotations"
    )


def described(value: object) -> str:
    """Returns the parameters of a function, or a class's parameters and attributes; empty for other values."""
    if not callable(value):
        return ""
    try:
        text = "(" + ", ".join(map(_parameter, inspect.signature(value).parameters.values())) + ")"
    except (TypeError, ValueError):
        text = "(...)"
    if inspect.isclass(value):
        text += " " + " ".join(sorted(_attributes(value)))
    return text.rstrip()


def _parameter(parameter: inspect.Parameter) -> str:
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    default = "" if parameter.default is inspect.Parameter.empty else "="
    return stars.get(parameter.kind, "") + parameter.name + default


def _attributes(value: type) -> set[str]:
    """Returns the public attributes that classes of this package define on `value`."""
    bases = [base for base in value.__mro__ if base.__module__.startswith(("smddp", "smdistributed"))]
    return {name for base in bases for name in vars(base) if not name.startswith("_")}


def main(framework: str) -> None:
    """Prints the symbols. framework: as of `modules`; an environment without it ends the program."""
    warnings.simplefilter("ignore")
    for name in sorted(modules(framework)):
        module = importlib.import_module(name)
        for symbol in symbols(module):
            print(f"{name}.{symbol}{described(getattr(module, symbol, None))}")


if __name__ == "__main__":
    main(sys.argv[1])
