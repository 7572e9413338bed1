"""The end of a process: shutdown of its groups, uncaught exceptions, peer failures.

Imports `observability`, and no torch.
"""

__all__: list[str] = []
