"""Makes the name "smddp" known to torch.distributed, and `torch.sagemaker` importable.

torch calls this from two entry points: `torch.backends` at the end of `import torch`, where any exception
would break that import, and, from torch 2.14 on, `torch.distributed.backends` when the name is first used.
Both are fast to import: the backend and the native core are imported when a group is made.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import TYPE_CHECKING, Any

from smddp import _alias, _historic
from smddp._constants import NAME, OLDEST_TORCH

if TYPE_CHECKING:
    from smddp.torch.process_group import SmddpProcessGroup


def _create(options: Any, backend_options: Any) -> SmddpProcessGroup:
    """torch's creator for one group (extended form). Raises ImportError if the core cannot be loaded."""
    from smddp.torch.process_group import create

    return create(options, backend_options)


def register() -> None:
    """Registers the backend with torch.distributed. Idempotent; does nothing in a torch without it.

    Raises ImportError for a torch that is older than the oldest supported version.
    """
    import torch
    import torch.distributed as dist

    if _major_minor(torch.__version__) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise ImportError(
            f"smddp needs torch {oldest} or later, found torch {torch.__version__}. "
            f"Update torch: pip install 'torch>={oldest}'"
        )
    _alias.install()
    if not dist.is_available() or NAME in dist.Backend.backend_list:
        return
    # Naming the devices keeps torch's default backends: it fills only devices that have none.
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def _major_minor(version: str) -> tuple[int, int]:
    """Returns the first two numbers; without their suffixes, which builds from source have ("2.8.0a0+git")."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def autoload() -> None:
    """Entry point that `import torch` runs: registers, and never raises."""
    try:
        register()
    except Exception as error:
        warnings.warn(
            f"smddp could not register its torch.distributed backend ({type(error).__name__}: {error}); "
            "`import smdistributed.dataparallel.torch.torch_smddp` shows the whole error.",
            RuntimeWarning,
            stacklevel=2,
        )
        return
    # A warning turned into an error must not prevent the import of torch.
    with contextlib.suppress(Warning):
        _historic.warn_once()
