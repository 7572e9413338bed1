"""The optimizers that scripts took from apex."""

from smddp.modelparallel.optim.optimizers import FusedLAMB, FusedNovoGrad

FusedLamb = FusedLAMB

__all__ = ["FusedLAMB", "FusedLamb", "FusedNovoGrad"]
