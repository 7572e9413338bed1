"""Names of parameters and modules, and lists of them in messages."""

from __future__ import annotations

from collections.abc import Sequence

# Name prefixes that wrapper modules add.
_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


def plain_name(name: str) -> str:
    """``name`` as it is in the model before FSDP1, checkpoint wrappers and torch.compile; without a dot before it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name.lstrip(".")


def some(names: Sequence[str], shown: int = 8) -> str:
    """The first names, for a message."""
    rest = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {rest} more" if rest > 0 else "")
