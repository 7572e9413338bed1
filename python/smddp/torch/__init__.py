"""The torch.distributed backend.

Imports `arrays`, `exit_hooks`, `launch` and `observability`.
"""

__all__: list[str] = []
