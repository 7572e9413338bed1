"""Mixed precision over stages."""

from smddp.modelparallel.optim.amp import GradScaler

__all__ = ["GradScaler"]
