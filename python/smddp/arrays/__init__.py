"""Groups of ranks on numpy arrays and DLPack buffers.

Imports `exit_hooks`, `launch` and `observability`, and no torch.
"""

__all__: list[str] = []
