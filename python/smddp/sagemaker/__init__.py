"""SMP: sharded training on torch's own engines, as `import torch.sagemaker as tsm`.

    >>> import torch.sagemaker as tsm
    >>> tsm.init({"hybrid_shard_degree": 8, "tensor_parallel_degree": 2})
    >>> model = tsm.transform(model)
    >>> model = FSDP(model, ...)   # unchanged

`tsm.state` says where this process stands, `tsm.patches()` what was changed in torch. The interface is that of the
SageMaker model parallelism library v2; docs/guides/smp describes its use.

Imports `smp` and `torch`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from smddp.sagemaker import torch_patches
from smddp.sagemaker.initialize import init, is_initialized
from smddp.sagemaker.state_handler import state
from smddp.sagemaker.torch_patches import patches
from smddp.sagemaker.transform import transform
from smddp.sagemaker.verify import verify

__all__ = ["init", "is_initialized", "patches", "state", "transform", "verify"]


class _Package(ModuleType):
    """Module class that keeps `transform` the function after imports of the submodule of the same name."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name == "transform" and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
torch_patches.apply_import()
