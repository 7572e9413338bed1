"""Translators of state dicts: a module for each transformers family that the original supported."""

import sys
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec

from smddp.modelparallel.names import translators

__all__ = ["bert", "gpt2", "gptj", "gptneo", "gptneox", "roberta"]

# The modules differ in nothing but the family in their functions' names.
for _family in __all__:
    _module = module_from_spec(ModuleSpec(f"{__name__}.{_family}", None))
    _module.__doc__ = f"Translators of {_family}: parameters keep transformers' names."
    _module.__dict__.update(translators(_family))
    sys.modules[_module.__name__] = globals()[_family] = _module
