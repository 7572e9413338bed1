"""Mixed precision over stages."""

from smddp.modelparallel.amp import GradScaler

__all__ = ["GradScaler"]
